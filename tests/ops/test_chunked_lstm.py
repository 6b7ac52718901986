"""A layer in chunks of time has the outputs and gradients of one call, its weights' gradients made once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt_ops import LSTMWeights, lstm
from econmt_ops.dispatch.rule import rules_only
from econmt_ops.lstm import chunked
from econmt_ops.lstm.chunked import ChunkedLSTM
from tests.ops.helpers import Make, assert_close, each_implementation

BATCH, WIDTH, HIDDEN = 3, 5, 4
FULL = pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])


def leaves(device: str, steps: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    make = Make(device, dtype)
    given = {**make.layer(WIDTH, HIDDEN)._asdict(), "inputs": make(BATCH, steps, WIDTH)}
    given |= {"h": make(BATCH, HIDDEN), "c": make(BATCH, HIDDEN)}
    return {name: value.detach().clone().requires_grad_() for name, value in given.items()}


def weights_of(own: dict[str, Tensor]) -> LSTMWeights:
    """Of leaves, the recurrent matrix made of one, as by dropout; the bias has a gradient already."""
    own["bias"].grad = torch.ones_like(own["bias"])
    return LSTMWeights(own["input"], own["hidden"] * 2.0, own["bias"])


def loss_of(outputs: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
    weighting = torch.linspace(-1.0, 1.0, outputs.numel(), dtype=outputs.dtype, device=outputs.device)
    return (outputs * weighting.view(outputs.shape)).sum() + state[0].square().sum() + state[1].sum()


def in_chunks(
    own: dict[str, Tensor], layer: ChunkedLSTM, size: int, lengths: Tensor | None, reverse: bool, how: str
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    steps, state, found = own["inputs"].shape[1], (own["h"], own["c"]), {}
    begins = range(0, steps, size)
    for begin in reversed(begins) if reverse else begins:
        part = own["inputs"][:, begin : begin + size]
        here = None if lengths is None else (lengths - begin).clamp(0, part.shape[1])
        found[begin], state = layer(part, state, lengths=here, reverse=reverse, implementation=how)
    return torch.cat([found[begin] for begin in begins], 1), state


@each_implementation("lstm")
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@FULL
@pytest.mark.parametrize(("steps", "size"), [(7, 3), (7, 7), (5, 1)])
def test_equals_one_call(
    steps: int, size: int, full: bool, reverse: bool, implementation: str, device: str
) -> None:
    lengths = None if full else torch.tensor([steps, 1, steps - 1])
    alone, own = leaves(device, steps), leaves(device, steps)
    options = {"state": ((alone["h"], alone["c"]),), "lengths": lengths, "reverse": reverse}
    outputs, (state,) = lstm(alone["inputs"], (weights_of(alone),), **options)
    loss_of(outputs, state).backward()  # type: ignore[no-untyped-call]
    layer = ChunkedLSTM(weights_of(own))
    found, last = in_chunks(own, layer, size, lengths, reverse, implementation)
    loss_of(found, last).backward()  # type: ignore[no-untyped-call]
    layer.backward()
    assert_close([found, *last], [outputs, *state], 1e-12)
    gradients = [[leaf.grad for leaf in each.values() if leaf.grad is not None] for each in (own, alone)]
    assert len(gradients[0]) == len(own)
    assert_close(*gradients, 1e-12)


@each_implementation("lstm")
@FULL
def test_a_probe_tells_the_gradient_of_the_gates(full: bool, implementation: str, device: str) -> None:
    steps = 6
    lengths = None if full else torch.tensor([steps, 0, 4])
    alone, own = leaves(device, steps), leaves(device, steps)
    gate_gradient = torch.zeros(
        steps, BATCH, 4 * HIDDEN, dtype=torch.float64, device=device, requires_grad=True
    )
    made = []
    for given, options in ((alone, {}), (own, {"gate_gradient": gate_gradient})):
        layer, first = LSTMWeights(given["input"], given["hidden"], given["bias"]), (given["h"], given["c"])
        more = {"state": (first,), "lengths": lengths, "implementation": implementation, **options}
        outputs, (state,) = lstm(given["inputs"], (layer,), **more)
        loss_of(outputs, state).backward()  # type: ignore[no-untyped-call]
        made.append(outputs)
    assert [name for name, leaf in own.items() if leaf.grad is None] == ["input", "hidden", "bias"]
    dgates = gate_gradient.grad
    assert dgates is not None
    before = torch.cat([own["h"].unsqueeze(0), made[1].transpose(0, 1)[:-1]])
    found = {
        **{name: leaf.grad for name, leaf in own.items() if leaf.grad is not None},
        "input": torch.einsum("tbg,tbi->gi", dgates, own["inputs"].transpose(0, 1)),
        "hidden": torch.einsum("tbg,tbh->gh", dgates, before),
        "bias": dgates.sum((0, 1)),
    }
    for name, leaf in alone.items():
        assert leaf.grad is not None
        assert_close([found[name]], [leaf.grad], 1e-12)


def test_weights_are_cast_once_and_sums_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("add_outer", "cast_weights"):
        original = getattr(chunked, name)
        monkeypatch.setattr(
            chunked, name, lambda *given, _name=name, _how=original: (calls.append(_name), _how(*given))[1]
        )
    own = leaves("cpu", 7, torch.float32)
    layer = ChunkedLSTM(LSTMWeights(own["input"], own["hidden"], own["bias"]))
    with torch.autocast("cpu"), rules_only():
        outputs, state = in_chunks(own, layer, 2, None, False, "auto")
    loss_of(outputs.float(), state).backward()  # type: ignore[no-untyped-call]
    assert own["input"].grad is None
    layer.backward()
    assert calls == ["cast_weights", "add_outer", "add_outer"]
    assert own["hidden"].grad is not None
    assert own["hidden"].grad.dtype == torch.float32
    before = own["hidden"].grad.clone()
    layer.backward()
    torch.testing.assert_close(own["hidden"].grad, before)


def test_the_next_update_reads_the_weights_as_they_are_then() -> None:
    """Weights whose copies in another type are kept from chunk to chunk."""
    own = leaves("cpu", 4, torch.float32)
    weights = LSTMWeights(own["input"], own["hidden"], own["bias"])
    layer, found = ChunkedLSTM(weights), []
    for factor in (1.0, 0.5):
        with torch.no_grad():
            own["hidden"].mul_(factor)
        with torch.autocast("cpu"), rules_only():
            wanted, _ = in_chunks(own, ChunkedLSTM(weights), 2, None, False, "auto")
            outputs, state = in_chunks(own, layer, 2, None, False, "auto")
        assert torch.equal(outputs, wanted)
        found.append(outputs)
        loss_of(outputs.float(), state).backward()  # type: ignore[no-untyped-call]
        layer.backward()
    assert not torch.equal(*found)


@pytest.mark.parametrize("wrong", ["shape", "layers", "reverse"])
def test_what_a_probe_does_not_go_with_is_refused(wrong: str) -> None:
    own = leaves("cpu", 4)
    layers = (LSTMWeights(own["input"], own["hidden"], own["bias"]),)
    square = LSTMWeights(own["hidden"], own["hidden"], own["bias"])
    gate_gradient = own["inputs"].new_zeros(3 if wrong == "shape" else 4, BATCH, 4 * HIDDEN)
    with pytest.raises(ValueError, match=r"lstm: gate_gradient (must be|requires one layer of LSTMWeights)"):
        lstm(
            own["inputs"],
            (*layers, square) if wrong == "layers" else layers,
            gate_gradient=gate_gradient,
            reverse=wrong == "reverse",
        )
