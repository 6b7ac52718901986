"""Accounts and predictions of programs that train in less usual ways."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import econmt_memory as memory
from econmt_memory.estimate.fake import REPLACEMENTS
from econmt_memory.measure.tracker import Tracker


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64))


def measured(step: Callable[[], object], *models: object) -> memory.Account:
    """The account of the third step."""
    step()
    step()
    with memory.track(*models) as account:  # type: ignore[arg-type]
        step()
    return account


def test_transforms_of_torch_func_run_in_the_block() -> None:
    layer, inputs = nn.Linear(64, 128), torch.randn(16, 64)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (row,)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    expected = gradients(parameters, inputs)["weight"]
    with memory.track(layer) as account:
        found = gradients(parameters, inputs)["weight"]
        layer(torch.randn(1024, 64)).square().sum()  # the hooks are there again
        with pytest.raises(RuntimeError, match="saved tensor"), torch.autograd.graph.save_on_cpu():
            torch.func.grad(loss)(parameters, inputs[0])
    assert torch.equal(found, expected)
    assert account.by_category()["feature maps"] == 1024 * (64 + 128) * 4
    assert account.by_category()["workspace"] >= expected.nbytes
    predicted = memory.predict(lambda: gradients(parameters, inputs), layer, device="cpu")
    assert predicted.by_category()["workspace"] >= expected.nbytes


def test_two_blocks_do_not_share_the_profiler() -> None:
    refused = []

    def run() -> None:
        with pytest.raises(ValueError, match="profiler runs already") as error, memory.track():
            pass
        refused.append(error)

    with memory.track():
        run()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    with torch.profiler.profile():
        run()
    with memory.track():
        assert torch._C._len_torch_dispatch_stack() == 0  # no operator passes through Python
    assert len(refused) == 3


def test_a_block_in_which_nothing_happens(tmp_path: Path) -> None:
    with memory.track() as account:
        pass
    account.show()
    account.save(tmp_path / "page.html")
    assert account.peak_bytes == 0


def test_the_history_of_lbfgs_is_optimizer_state() -> None:
    model, inputs = perceptron(), torch.randn(8, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(inputs).square().mean()
        loss.backward()
        return loss

    account = measured(lambda: optimizer.step(closure), model, optimizer)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert account.by_category()["optimizer state"] > 10 * weights
    assert account.by_category()["other"] == inputs.nbytes


def test_a_tensor_that_is_optimized_counts_as_a_parameter() -> None:
    image = torch.randn(64, 64, requires_grad=True)
    optimizer = torch.optim.Adam([image])

    def step() -> None:
        optimizer.zero_grad()
        image.square().sum().backward()
        optimizer.step()

    categories = measured(step, None, optimizer).by_category()
    assert (categories["weights"], categories["gradients"]) == (image.nbytes, image.nbytes)
    assert categories["other"] == 0


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam])
def test_a_prediction_of_mixed_precision_with_scaled_gradients(kind: type[torch.optim.Optimizer]) -> None:
    model, inputs, scaler = perceptron(), torch.randn(32, 64), torch.amp.GradScaler("cpu")
    optimizer = kind(model.parameters())  # type: ignore[call-arg]

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    predicted = memory.predict(step, model, optimizer, device="cpu")
    account = measured(step, model, optimizer)
    assert predicted.peak_bytes == pytest.approx(account.peak_bytes, rel=0.001)
    assert predicted.by_category()["optimizer state"] == account.by_category()["optimizer state"] > 0


def test_a_prediction_says_that_hooks_of_parameters_do_not_run() -> None:
    model, inputs = perceptron(), torch.randn(8, 64)

    def notes() -> str:
        return " ".join(memory.predict(lambda: model(inputs).sum().backward(), model, device="cpu").notes)

    assert "Hooks" not in notes()
    model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
    assert "Hooks of parameters did not run" in notes()


class Frozen(dict[str, object]):
    """A dictionary that refuses to be changed, as some libraries keep their configurations."""

    def update(self, *_: object, **__: object) -> None:
        raise TypeError


class Stateful(nn.Module):
    """A module that keeps tensors from one step to the next, in every place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.seen, self.cache = nn.LSTM(4, 4), None, [], {}
        self.config = Frozen(size=4)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, state = self.layer(inputs, self.last)
        self.last = tuple(part.detach() for part in state)
        self.seen.append(outputs.detach())
        self.cache["outputs"] = outputs.detach()
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(4), persistent=False)
        return outputs * self.mask


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prediction_leaves_what_the_step_can_reach_as_it_was(device: str) -> None:
    model, inputs = Stateful(), torch.randn(6, 3, 4)
    averaged, optimizer = AveragedModel(model.layer), torch.optim.SGD(model.parameters(), 0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses: list[list[Any]] = [[]]
    state: dict[str, Any] = {
        "loss": torch.ones(()),
        "recent": deque(maxlen=2),
        "kinds": set(),
        "losses": losses,
    }

    def step() -> None:
        loss = model(inputs).sum()
        loss.backward()
        optimizer.step()
        schedule.step()
        averaged.update_parameters(model.layer)
        state["loss"] = 0.9 * state["loss"] + 0.1 * loss.detach()
        assert loss.detach().numpy().shape == ()
        for add in (state["recent"].append, state["kinds"].add, losses[0].append):
            add(loss.item())

    def seen() -> tuple[str, list[int]]:
        scheduled = schedule.last_epoch, schedule.get_last_lr(), optimizer.param_groups[0]["lr"]
        parts = [*state.values(), *vars(model).values(), *model.parameters()]
        return repr((scheduled, averaged.n_averaged, parts)), [*map(id, parts)]

    before = seen()
    memory.predict(step, model, optimizer, device=device)
    assert seen() == before
    step()
    assert (schedule.last_epoch, int(averaged.n_averaged), len(losses[0])) == (1, 1, 1)
    assert losses[0][0] == pytest.approx(model.seen[0].sum().item(), rel=1e-5)


def test_a_prediction_of_a_model_and_its_batch_on_the_meta_device() -> None:
    def peak(device: str) -> int:
        with torch.device(device):
            model, inputs = perceptron(), torch.randn(8, 64)
        return memory.predict(lambda: model(inputs).sum().backward(), model, device="cpu").peak_bytes

    assert peak("meta") == peak("cpu")


def test_the_stash_is_that_of_the_pass_that_keeps_most() -> None:
    model = perceptron()

    def step(*rows: int) -> Counter[str]:
        model.zero_grad()
        return measured(
            lambda: [model(torch.ones(count, 64)).sum().backward() for count in rows], model
        ).ledger.stash

    assert step(2, 9) == step(9) != step(2)


def test_packed_sequences_are_not_predicted_for_a_cpu() -> None:
    layer, inputs, lengths = nn.LSTM(4, 5), torch.randn(6, 3, 4), torch.tensor([6, 3, 1])
    with pytest.raises(ValueError, match="packed sequences cannot be predicted for a CPU"):
        memory.predict(lambda: layer(pack_padded_sequence(inputs, lengths)), layer, device="cpu")


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_grouped_mm"), reason="not in this version of PyTorch")
@pytest.mark.parametrize(
    ("left", "right", "grouped", "shape"),
    [
        ((12, 8), (3, 8, 4), True, (12, 4)),
        ((3, 12, 8), (8, 4), True, (12, 4)),
        ((6, 12), (12, 4), True, (3, 6, 4)),
        ((3, 6, 8), (3, 8, 4), False, (3, 6, 4)),
    ],
)
def test_grouped_products_have_their_shapes(
    left: tuple[int, ...], right: tuple[int, ...], grouped: bool, shape: tuple[int, ...]
) -> None:
    with FakeTensorMode(), Tracker(torch.device("cpu"), replacements=REPLACEMENTS):
        ends = torch.zeros(3, dtype=torch.int32) if grouped else None
        assert torch._grouped_mm(torch.zeros(left), torch.zeros(right), ends).shape == shape


def test_masks_are_looked_up_like_nonzero_elements() -> None:
    model, inputs, rows = nn.Linear(64, 64), torch.randn(512, 64), torch.ones(512, dtype=torch.bool)

    def by_rows() -> None:
        model(inputs)[rows, :3].square().sum().backward()

    def by_elements() -> None:
        model(inputs).masked_select(inputs == inputs).sum().backward()

    for step in (by_rows, by_elements):
        account, predicted = measured(step, model), memory.predict(step, model, device="cpu")
        assert predicted.peak_bytes == account.peak_bytes
        assert predicted.ledger.stash == account.ledger.stash
        assert memory.predict(step, model, device="cpu", nonzero=0.5).peak_bytes <= account.peak_bytes


def test_a_shape_that_depends_on_values_is_named() -> None:
    values = torch.arange(8)
    with pytest.raises(ValueError, match=r"repeat_interleave\.Tensor depends on values.* output_size"):
        memory.predict(lambda: values.repeat_interleave(values), device="cpu")


def test_tensors_that_a_cpu_converts_first_are_predicted() -> None:
    single, half, whole = torch.randn(512, 64), torch.randn(512, 64).bfloat16(), torch.ones(512, 64).long()

    def step() -> Tensor:
        single.mul_(half)
        return (half * single).sum() + torch.where(single > 0, half, single).sum() + (whole / 2).sum()

    assert memory.predict(step, device="cpu").peak_bytes == measured(step).peak_bytes
    assert memory.predict(lambda: whole // whole, device="cpu").peak_bytes == 2 * whole.nbytes


def test_what_a_checkpoint_recomputes_from_is_predicted_once() -> None:
    model, inputs = perceptron(), torch.randn(512, 64)

    def step() -> None:
        checkpoint(model, inputs, use_reentrant=False).square().mean().backward()

    assert memory.predict(step, model, device="cpu").by_category()["other"] == inputs.nbytes


def test_a_prediction_knows_parameters_that_the_program_holds_elsewhere() -> None:
    model, inputs = perceptron(), torch.randn(16, 64)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters)

    def step() -> None:
        optimizer.zero_grad()
        penalty: Tensor = sum(each.square().sum() for each in parameters)  # type: ignore[assignment]
        (model(inputs).square().mean() + penalty).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    before = [each.detach().clone() for each in parameters]
    predictions = [memory.predict(step, model, *given, device="cpu") for given in ([], [optimizer])]
    assert not optimizer.state
    assert all(map(torch.equal, parameters, before))
    (group,) = optimizer.param_groups
    assert all(found is wanted for found, wanted in zip(group["params"], parameters, strict=True))
    account = measured(step, model, optimizer)
    for predicted in predictions:
        assert predicted.by_category()["optimizer state"] == account.by_category()["optimizer state"]
        assert predicted.peak_bytes == pytest.approx(account.peak_bytes, rel=1e-3)


def test_batches_of_numpy_are_gone_after_their_step() -> None:
    model, rows = nn.Linear(64, 8), np.ones((512, 64), np.float32)

    def step() -> None:
        model(torch.from_numpy(rows)).sum().backward()

    assert memory.predict(step, model, device="cpu").by_category()["other"] == rows.nbytes


@pytest.mark.parametrize("sparse", [False, True])
def test_a_prediction_says_that_gradients_are_sparse(sparse: bool) -> None:
    model, rows = nn.Embedding(100, 8, sparse=sparse), torch.arange(50)
    predicted = memory.predict(lambda: model(rows).sum().backward(), model, device="cpu")
    assert any("Gradients are sparse" in note for note in predicted.notes) == sparse


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prediction_reads_lists_and_knows_inference_and_blocks_in_the_step(device: str) -> None:
    layer, inputs = nn.Linear(8, 8), torch.randn(4, 8)

    def step() -> None:
        with torch.inference_mode():
            layer(inputs)
        with memory.track(layer):
            layer(torch.tensor(inputs.tolist())).sum().backward()
        layer(inputs).sum().backward()

    account = memory.predict(step, layer, device=device)
    assert account.by_category()["weights"] > 0


def test_what_cannot_be_predicted_is_told() -> None:
    lines, lazy, sparse = nn.Linear(8, 8), nn.LazyLinear(8), nn.Module()
    sparse.weight = nn.Parameter(torch.eye(8).to_sparse())
    parts = [torch.ones(2, 8), torch.ones(3, 8)]
    padded, jagged = (
        torch.nested.nested_tensor(parts, layout=kind) for kind in (torch.strided, torch.jagged)
    )
    for step, model, message in (
        (lambda: lines(jagged), lines, "nested tensors cannot be predicted"),
        (lambda: lines(padded), lines, "nested tensors cannot be predicted"),
        (lambda: lazy(parts[0]), lazy, "a lazy parameter has no shape yet; run the model once before"),
        (lambda: torch.sparse.mm(sparse.weight, parts[0]), sparse, "sparse parameters cannot be predicted"),
    ):
        with pytest.raises(ValueError, match=f"^memory.predict: {message}"):
            memory.predict(step, model, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="step is no function that runs a step, but float"):
        memory.predict(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nonzero 'x' is no share; give a number from 0 to 1"):
        memory.predict(step, nonzero="x")  # type: ignore[arg-type]
