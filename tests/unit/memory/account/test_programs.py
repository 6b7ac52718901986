"""Accounts and predictions of programs that train in less usual ways."""

from __future__ import annotations

import random
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.swa_utils import AveragedModel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import econmt_memory as memory
from econmt_memory.estimate.fake import REPLACEMENTS
from econmt_memory.measure.tracker import Tracker
from tests.unit.memory.account import models


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
    copies = {name: torch.stack([each] * 3).requires_grad_() for name, each in parameters.items()}
    ensemble = torch.func.vmap(partial(torch.func.functional_call, layer), in_dims=(0, None))
    optimizer = torch.optim.SGD(copies.values())

    def train() -> None:
        optimizer.zero_grad()
        ensemble(copies, inputs).square().sum().backward()
        optimizer.step()

    held = [*layer.parameters(), inputs]
    for step, given in (lambda: gradients(parameters, inputs), []), (train, [optimizer]):
        predicted = memory.predict(step, layer, given, device="cpu")
        assert measured(step, layer, given).peak_bytes == predicted.peak_bytes
        optimizer.zero_grad()
        held += copies.values() if given else []
        counted = models.counted_peak(lambda step=step: step)
        assert predicted.peak_bytes == counted + sum(each.nbytes for each in held)


def test_two_blocks_do_not_share_the_profiler() -> None:
    def run() -> None:
        with pytest.raises(ValueError, match="profiler runs already"), memory.track():
            pass

    with memory.track(), ThreadPoolExecutor(1) as pool:
        run()
        pool.submit(run).result()
    with torch.profiler.profile():
        run()
    with memory.track():
        assert torch._C._len_torch_dispatch_stack() == 0  # no operator passes through Python


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
    with memory.track(None, optimizer) as account:
        image.grad = torch.ones_like(image)  # while the one before is there
        optimizer.step()
    assert account.ledger.timeline[0].bytes == 4 * image.nbytes + 4


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

    clear = update


class Counts:
    """An iterator in Python, without a dictionary, of a class with state."""

    __slots__ = ("count", "last")
    seen: ClassVar[Any] = None

    def __init__(self) -> None:
        self.count = 0

    def __next__(self) -> int:
        self.count += 1
        return self.count

    __iter__ = iter


@dataclass(frozen=True)
class Closed:
    """An object that refuses to be changed."""

    last: object = None


class Stateful(nn.Module):
    """A module that keeps tensors from one step to the next, in every place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.seen, self.cache = nn.LSTM(4, 4), None, [], {}
        self.config, self.norm = Frozen(size=4), nn.BatchNorm1d(3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs, state = self.layer(inputs, self.last)
        self.last = tuple(part.detach() for part in state)
        self.seen.append(outputs.detach())
        self.cache["outputs"] = outputs.detach()
        dict.update(self.config, self.cache)
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(4), persistent=False)
        return self.norm(outputs * self.mask)


@cache
def tables(size: int) -> dict[str, Tensor]:
    return {"ones": torch.ones(size)}


@lru_cache(maxsize=2)
def ones(size: int) -> Tensor:
    return torch.ones(size)


@contextmanager
def managed() -> Iterator[None]:
    yield


total: object = 0.0


def in_every_place() -> Callable[[Tensor], None]:
    """Returns a function that keeps its argument in all places but modules."""
    running, counts, array, closed = torch.ones(()), Counts(), np.zeros(3), Closed()
    containers: Any = [[], deque(maxlen=2), set(), Counter("ab"), OrderedDict(a=1, b=2), WeakKeyDictionary()]
    own = random.Random(1), np.random.default_rng(1), np.random.RandomState(1), torch.Generator()
    tables(1), ones(1)

    @managed()
    def keep(loss: Tensor, default: list[Any] = []) -> None:  # noqa: B006 - kept between steps, too
        global total, new
        nonlocal running
        running = 0.9 * running + 0.1 * loss
        total = new = counts.last = Counts.seen = Counts.new = models.last = keep.last = loss  # type: ignore
        object.__setattr__(closed, "last", loss)
        array[next(counts) % 3] += loss.item()
        for each, add in zip(containers, ("append", "append", "add", "subtract"), strict=False):
            getattr(each, add)([loss.item()] if add == "subtract" else loss.item())
        containers[4].move_to_end("a")
        containers[4]["c"] = containers[5][keep] = loss
        (lambda: tables(1).update(loss=tables(2)["ones"] + ones(2)))()
        own[0].random(), own[1].random(), own[2].normal(), own[3].manual_seed(len(default))
        random.random(), np.random.rand(), torch.manual_seed(len(default))
        default.append(loss)

    return keep


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_prediction_leaves_what_the_step_can_reach_as_it_was(device: str) -> None:
    """Compared by the fixture of these tests, with one real step and none before."""
    model, inputs, keep = Stateful(), torch.randn(6, 3, 4), in_every_place()
    averaged, optimizer = AveragedModel(model.layer), torch.optim.SGD(model.parameters(), 0.5)
    schedule, scaler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), torch.amp.GradScaler("cpu")

    def step() -> None:
        loss = model(inputs).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        averaged.update_parameters(model.layer)
        loss.detach().numpy().item()
        keep(loss.detach())

    for _ in range(2):
        memory.predict(step, model, optimizer, device=device)
        step()
    assert (schedule.last_epoch, int(averaged.n_averaged), len(model.seen)) == (2, 2, 2)
    assert type(ones(2)) is type(total) is Tensor


def test_what_a_step_replaces_counts_once() -> None:
    model, hidden = nn.Linear(64, 64), torch.zeros(512, 64)

    def step() -> None:
        nonlocal hidden
        outputs = model(hidden)
        assert outputs.shape == hidden.shape  # rewritten, so that it names all that pytest holds
        outputs.square().mean().backward()
        model.zero_grad()
        hidden = outputs.detach().tanh()

    predicted = memory.predict(step, model, device="cpu")
    assert predicted.peak_bytes == measured(step, model).peak_bytes


def training(batches: Iterator[Any]) -> tuple[Callable[[], None], nn.Linear]:
    model = nn.Linear(64, 256)

    def step() -> None:
        (inputs,) = next(batches)
        model(inputs).square().mean().backward()

    return step, model


def test_iterators_are_refused_by_name_or_read_by_a_process_of_its_own(tmp_path: Path) -> None:
    rows = torch.randn(6, 32, 64)
    for batches, name in (
        (((row,) for row in rows), r"'batches' \(generator\)"),
        (zip(rows, strict=True), r"'batches' \(zip\)"),
        (iter(DataLoader(TensorDataset(rows), batch_size=None)), r"'batches._sampler_iter' \(\w+\)"),
    ):
        step, model = training(batches)
        with pytest.raises(ValueError, match=f"^memory.predict: {name} would be used up; .* isolated=True$"):
            memory.predict(step, model, device="cpu")
        account = memory.predict(step, model, device="cpu", isolated=True)
        assert account.by_category()["weights"] == 4 * 65 * 256
        assert torch.equal(next(batches)[0], rows[0])
    receiver, _ = Pipe()
    (tmp_path / "lines").write_text("1\n2\n")
    with (tmp_path / "lines").open() as lines:
        for read in (receiver.recv, lambda: next(lines)):
            with pytest.raises(ValueError, match=r"' .* would be used up; read from it before the step$"):
                memory.predict(read, isolated=True)


def test_an_account_of_a_process_of_its_own_is_whole_and_errors_are_one_line(tmp_path: Path) -> None:
    case = models.gpt()
    given = case.step, case.model, case.optimizer
    here, there = (memory.predict(*given, isolated=each) for each in (False, True))
    for what in (memory.Account.advice, memory.Account.tables, memory.Account.by_module):
        assert what(there) == what(here)
    assert [sizes for *_, sizes in there.over_time()] == [sizes for *_, sizes in here.over_time()]
    there.save(tmp_path / "page.html")

    def fails() -> None:
        raise RuntimeError("first\nsecond")

    for step, message in ((fails, "RuntimeError: first second"), (lambda: sys.exit(3), "SystemExit: 3")):
        with pytest.raises(ValueError, match=f"^memory.predict: {message}$"):
            memory.predict(step, isolated=True)


def test_a_profiler_in_the_step_is_predicted_and_refused_where_it_is_tracked() -> None:
    model, inputs = perceptron(), torch.randn(512, 64)

    def step() -> None:
        model(inputs).square().mean().backward()

    def profiled() -> None:
        with torch.profiler.profile(profile_memory=True):
            step()

    account = measured(step, model)
    assert memory.predict(profiled, model, device="cpu").peak_bytes == account.peak_bytes
    with pytest.raises(ValueError, match=r"^memory.track: .* profiler"), memory.track(model):
        profiled()
    profiled()


def test_a_prediction_of_a_model_and_its_batch_on_the_meta_device() -> None:
    def peak(device: str) -> int:
        with torch.device(device):
            model, inputs = perceptron(), torch.randn(8, 64)
        return memory.predict(lambda: model(inputs).sum().backward(), model, device="cpu").peak_bytes

    assert peak("meta") == peak("cpu")


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

    for step in (
        lambda: model(inputs)[rows, :3].square().sum().backward(),
        lambda: model(inputs).masked_select(inputs == inputs).sum().backward(),
    ):
        account, predicted = measured(step, model), memory.predict(step, model, device="cpu")
        assert predicted.peak_bytes == account.peak_bytes
        assert predicted.ledger.stash == account.ledger.stash
        assert memory.predict(step, model, device="cpu", nonzero=0.5).peak_bytes <= account.peak_bytes


def test_a_shape_that_depends_on_values_is_named() -> None:
    values = torch.arange(8, device="meta")  # those of a tensor with memory would be known
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

    predictions = [memory.predict(step, model, *given, device="cpu") for given in ([], [optimizer])]
    assert predictions[0].by_module() == predictions[1].by_module()
    account = measured(step, model, optimizer)
    for predicted in predictions:
        assert predicted.by_category()["optimizer state"] == account.by_category()["optimizer state"]
        assert predicted.peak_bytes == pytest.approx(account.peak_bytes, rel=1e-3)


def test_batches_of_numpy_are_gone_after_their_step() -> None:
    model, rows = nn.Linear(64, 8), np.ones((512, 64), np.float32)
    predicted = memory.predict(lambda: model(torch.from_numpy(rows)).sum().backward(), model, device="cpu")
    assert predicted.by_category()["other"] == rows.nbytes


def test_a_weight_in_a_wrapper_is_predicted_by_its_parts() -> None:
    model, inputs = nn.Linear(64, 8), torch.ones(4, 64)
    model.weight = nn.Parameter(TwoTensor(torch.ones(8, 64), torch.ones(8, 64)))  # type: ignore[no-untyped-call]
    predicted = memory.predict(lambda: model(inputs).sum().backward(), model, device="cpu")
    assert predicted.by_category()["weights"] == 2 * 4 * 8 * 64 + model.bias.nbytes


@pytest.mark.parametrize("sparse", [False, True])
def test_a_prediction_says_that_gradients_are_sparse(sparse: bool) -> None:
    model, rows = nn.Embedding(100, 8, sparse=sparse), torch.arange(50)
    predicted = memory.predict(lambda: model(rows).sum().backward(), model, device="cpu")
    assert any("Gradients are sparse" in note for note in predicted.notes) == sparse
    found = measured(lambda: backward_pass(model, rows), model)
    # Of 50 rows, values of eight times four bytes and an index of eight.
    assert found.by_category()["gradients"] == (50 * (32 + 8) if sparse else 100 * 32)


def backward_pass(model: nn.Module, inputs: Tensor) -> None:
    model.zero_grad()
    model(inputs).sum().backward()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_first_step_alone_takes_is_not_predicted(device: str) -> None:
    model, inputs, steps = nn.Linear(64, 64), torch.zeros(4, 64), list[int]()

    def predicted(bytes_of_first: int) -> tuple[int, int | None, int | None]:
        def step() -> None:
            if not steps:
                torch.zeros(bytes_of_first, dtype=torch.uint8)
            steps.append(1)
            backward_pass(model, inputs)

        steps.clear()
        account = memory.predict(step, model, device=device)
        return account.peak_bytes, account.ledger.allocated, account.by_category()["gradients"]

    assert predicted(10**9) == predicted(0)


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
    parts, nested = [torch.ones(2, 8), torch.ones(3, 8)], torch.nested.nested_tensor
    padded, jagged = (nested(parts, layout=kind) for kind in (torch.strided, torch.jagged))
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


def test_attributes_that_a_step_gives_a_class_are_as_before() -> None:
    class Counting(nn.Linear):
        steps = 0

    model, inputs = Counting(8, 8), torch.ones(2, 8)

    def step() -> None:
        Counting.steps += 1
        Counting.last = model(inputs).sum()
        Counting.last.backward()

    memory.predict(step, model, device="cpu")
    assert (Counting.steps, hasattr(Counting, "last")) == (0, False)


@pytest.mark.parametrize("kind", [nn.Sequential, lambda *layers: nn.ModuleList(layers)])
def test_a_container_of_layers_is_one_model(kind: Callable[..., Any]) -> None:
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)
    model = kind(*layers)
    with memory.track(model) as account:
        values = torch.ones(8, 64)
        for layer in layers:
            values = layer(values)
    assert {"0", "2"} <= set(account.by_module())
