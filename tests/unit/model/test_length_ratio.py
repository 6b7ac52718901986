"""Expected lengths: their loss by its definition, with every gradient, and what a search reads of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from econmt.model import Implementations, IncrementalModel
from econmt.model.length_ratio import LengthRatio, length_loss
from tests.unit.model.test_translation import make_batch, make_config, make_model

SOURCES, TARGETS = torch.tensor([5, 1, 3]), torch.tensor([4, 7, 0])


def by_definition(task: str, ratios: list[float], sources: list[int], targets: list[int]) -> float:
    """Of each sentence, as often as it has target tokens."""
    total = 0.0
    for ratio, source, target in zip(ratios, sources, targets, strict=True):
        if task == "ratio":
            total += target * (ratio - target / source) ** 2
        elif target:
            # -log of Poisson's probability, less what it is where the expected length is the true one
            least = target - target * math.log(target)
            total += target * (ratio * source - target * math.log(ratio * source) - least)
    return total


@pytest.mark.parametrize("task", ["ratio", "length"])
def test_the_loss_is_that_of_its_definition(task: str) -> None:
    ratios = torch.tensor([0.3, 5.0, 1.7], dtype=torch.float64, requires_grad=True)
    loss = length_loss(task, ratios, SOURCES, TARGETS)  # type: ignore[arg-type]
    expected = by_definition(task, ratios.tolist(), SOURCES.tolist(), TARGETS.tolist())
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert torch.autograd.gradcheck(lambda x: length_loss(task, x, SOURCES, TARGETS), (ratios,))  # type: ignore[arg-type]
    right = (TARGETS / SOURCES).double()
    assert length_loss(task, right, SOURCES, TARGETS).item() == pytest.approx(0.0, abs=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("layers", [1, 3])
def test_the_network_is_a_perceptron(layers: int) -> None:
    torch.manual_seed(1)
    net = LengthRatio(4, layers).double()
    mean = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    expected = mean
    parts = list(net.parameters())
    for weight, bias in zip(parts[:-2:2], parts[1:-2:2], strict=True):
        expected = torch.tanh(expected @ weight.T + bias)
    expected = torch.log1p(torch.exp(expected @ parts[-2].T + parts[-1]))[:, 0]
    torch.testing.assert_close(net(mean), expected)
    assert torch.autograd.gradcheck(net, (mean,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(net.float()(mean.detach()), expected.detach().float())


def losses(
    config_options: dict[str, object], rows: slice, weight: float, how: str
) -> tuple[Tensor, dict[str, Tensor]]:
    model = make_model(make_config(**config_options))
    batch = tuple(part[rows] for part in make_batch())
    loss = model.loss(*batch, implementations=Implementations.everywhere(how), length_task_weight=weight)
    loss.backward()
    return loss.detach(), {
        name: part.grad for name, part in model.named_parameters() if part.grad is not None
    }


@pytest.mark.parametrize("options", [{}, {"decoder__state_init": "avg", "length_task": "length"}])
@pytest.mark.parametrize("how", ["reference", "recompute"])
def test_it_is_added_to_the_cross_entropy_and_over_batches(options: dict[str, object], how: str) -> None:
    """Every parameter of the network, and of the encoder, gets what autograd says of the mean of valid outputs."""
    options = {"length_task": "ratio", "length_task_layers": 2, **options}
    every = slice(None)
    plain, _ = losses(options, every, 0.0, how)
    whole, gradients = losses(options, every, 3.0, how)
    model = make_model(make_config(**options))
    source, lengths, _, target = make_batch()
    ratios = model.encode(source, lengths).length_ratios
    assert ratios is not None
    targets = (target != 0).sum(dim=1)
    expected = by_definition(str(options["length_task"]), ratios.tolist(), lengths.tolist(), targets.tolist())
    assert whole.item() == pytest.approx(plain.item() + 3.0 * expected, rel=1e-6)
    assert all(
        gradients[name].abs().max() > 0 for name, _ in model.named_parameters() if "length_ratio" in name
    )
    parts = [losses(options, rows, 3.0, how) for rows in (slice(0, 1), slice(1, 3))]
    assert sum(part[0] for part in parts).item() == pytest.approx(whole.item(), rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(sum(part[1][name] for part in parts), gradient)


def test_padded_outputs_do_not_count() -> None:
    model = make_model(make_config(length_task="ratio"))
    values = torch.randn(3, 5, 8, dtype=torch.float64)
    lengths = torch.tensor([5, 2, 4])
    expected = torch.stack(
        [model.length_ratio(values[row : row + 1, :size].mean(dim=1))[0] for row, size in enumerate(lengths)]  # type: ignore[misc]
    )
    for row, size in enumerate(lengths):
        values[row, size:] = torch.nan
    found = model.encoded(values, values[:, 0], lengths).length_ratios
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("state_init", ["last", "avg"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8])
def test_a_search_expects_what_the_model_does(state_init: str, kind: torch.dtype) -> None:
    model = make_model(make_config(length_task="ratio", decoder__state_init=state_init)).float()
    source, lengths, _, _ = make_batch()
    expected = model.encode(source, lengths).length_ratios
    search = IncrementalModel(model, kind)
    tolerance = 1e-5 if kind == torch.float32 else 0.03
    torch.testing.assert_close(
        search.length_ratios(search.encode(source, lengths)), expected, rtol=tolerance, atol=0.0
    )


def test_models_without_it_have_none() -> None:
    model = make_model(make_config())
    assert model.length_ratio is None
    assert model.encode(*make_batch()[:2]).length_ratios is None
    assert set(model.parameter_layers()) < set(
        make_model(make_config(length_task="ratio")).parameter_layers()
    )
