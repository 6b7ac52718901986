"""A tracked step runs as it does alone; what Python does not see comes from the profiler's events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import econmt_memory as memory
from econmt_memory.account.step_recorder import StepRecorder, _StepMemory
from tests.unit.memory.account.models import gpt, tracked

CPU = torch.device("cpu")


def live(account: memory.Account) -> list[int]:
    """Live bytes at the start and after each change."""
    return list(account._settled().live())


def test_what_existed_before_counts_whole_until_it_is_released() -> None:
    table, factors, unused = torch.zeros(100, 10), torch.zeros(10), torch.zeros(7)
    weight = nn.Parameter(torch.ones(10))
    row = table[3]
    del table
    with memory.track() as account:
        product = weight * row  # which keeps the row
        del row
        with torch.no_grad():  # which keeps nothing: a release of factors may be seen or not
            product += factors
        del product
    assert unused.numel() == 7
    assert live(account) == [4000 + 40 + 40, 4000 + 40 + 40 + 40, 40 + 40 + 40, 40 + 40]
    assert account.by_category()["other"] == 4000 + 40 + 40


def test_gradients_count_for_the_module_that_owns_the_parameter() -> None:
    case = gpt(tied=True, passes=2)
    case.optimizer.zero_grad()
    with memory.track(case.model, case.optimizer) as account:
        case.step()
    storages = {change.storage for change in account._settled().changes}
    sizes = {each.layer: each.size for each in storages if each.category == "gradients"}
    assert sizes["words"] == 500 * 64 * 4
    assert "head" not in sizes


class Residual(nn.Module):
    """A product, and a function of its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        doubled = self.linear(x)
        result = doubled.sin()
        return x + result


def test_lines_are_those_of_calls_of_modules_and_of_uses_of_functions() -> None:
    model, inputs = nn.Sequential(Residual(), Residual()), torch.ones(256, 128)
    first = Residual.forward.__code__.co_firstlineno
    with memory.track(model) as account:
        model(inputs).sum().backward()
    lines = {
        (change.storage.operator, int(change.storage.line.split(":")[1].split()[0]) - first)
        for change in account._settled().changes
        if change.storage.kept_by and change.storage.line
    }
    assert ("aten.addmm", 1) in lines
    # The sum, which is made in the last line, is kept where the next product reads it.
    assert ("aten.add", 1) in lines


def test_a_gpu_tells_the_size_of_what_it_releases() -> None:
    recorder = StepRecorder(torch.device("cuda", 0))
    recorder._at_start = start = 10_000
    memory_of_gpu = _StepMemory(recorder)
    memory_of_gpu.use(0, 1 << 20, 1000, (1000,), torch.uint8)
    memory_of_gpu.label(0, 1 << 20, "weights", "layer")
    memory_of_gpu.change(0, 1 << 21, 2048, start + 2048, "aten.mm", None)
    memory_of_gpu.mark(0, 1 << 21, "layer", None)
    # A block that was not split, and one that nothing was known of.
    memory_of_gpu.change(0, 1 << 20, -1536, start + 512, "", None)
    memory_of_gpu.change(0, 1 << 22, -4096, start - 3584, "", None)
    sizes = {storage.address: size for storage, size in memory_of_gpu.older.items()}
    assert sizes == {1 << 20: 1536, 1 << 22: 4096}
    assert [change.size for change in memory_of_gpu.changes] == [2048, -1536, -4096]
    assert memory_of_gpu.changes[0].storage.kept_by == "layer"


def test_workspaces_of_cublas_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is older, one is made in the block; a tensor of their size is no workspace, nor is what is released."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    recorder, size = StepRecorder(torch.device("cuda", 0)), 32 << 20
    blocks = [{"address": number << 30, "size": size, "state": "active_allocated"} for number in (1, 2)]
    blocks.append({"address": 3 << 30, "size": size, "state": "inactive"})
    recorder._note_workspaces([{"device": 0, "blocks": blocks}, {"device": 1, "blocks": blocks}])
    memory_of_gpu = _StepMemory(recorder)
    for note in recorder._notes["use"]:
        memory_of_gpu.use(*note)
    memory_of_gpu.use(0, 2 << 30, size, (8 << 20,), torch.float32)
    for number, total in ((4, size), (5, 2 * size)):
        memory_of_gpu.change(0, number << 30, size, total, "aten.mm", None)
    memory_of_gpu.change(0, 5 << 30, -size, size, "", None)
    memory_of_gpu.name_workspaces()
    storages = {*memory_of_gpu.older, *(change.storage for change in memory_of_gpu.changes)}
    assert [each.address >> 30 for each in storages if each.layer == "cuBLAS"] in ([1, 4], [4, 1])


def test_a_gpu_tells_what_other_threads_allocate_and_release() -> None:
    memory_of_gpu = _StepMemory(StepRecorder(torch.device("cuda", 0)))
    memory_of_gpu.change(0, 1 << 20, 512, 512, "aten.mm", None)
    memory_of_gpu.change(0, 1 << 21, 2048, 512 + 1024 + 2048, "aten.mm", None)  # 1,024 bytes elsewhere
    # The first are released elsewhere.
    memory_of_gpu.change(0, 1 << 22, 4096, 1024 + 2048 + 4096, "aten.mm", None)
    memory_of_gpu.change(0, 1 << 23, -1024, 2048 + 4096, "", None)  # those of elsewhere
    # What happened elsewhere happened before, so that no peak is too high.
    assert [change.size for change in memory_of_gpu.changes] == [512, 1024, 2048, -512, 4096, -1024]
    assert memory_of_gpu.changes[3].storage is memory_of_gpu.changes[0].storage
    assert not memory_of_gpu.older


def test_what_is_released_between_operators_is_within_a_range() -> None:
    """The profiler's tree has a GPU's events below others alone."""
    recorder = StepRecorder(CPU)
    with recorder.recording():
        made = torch.zeros(1000)
        del made
    (root,) = (event for event in recorder._recorded[0].experimental_event_tree() if event.children)
    allocations = [event.extra_fields for event in root.children if event.tag.name == "Allocation"]
    assert [each.alloc_size for each in allocations] == [-4000]


def test_what_a_cpu_says_of_older_memory_is_left_aside() -> None:
    """It reports the releases of some of it, with the size of what was there in an earlier record of the profiler."""
    memory_of_cpu = _StepMemory(StepRecorder(CPU))
    memory_of_cpu.change(0, 1 << 20, -1536, 0, "", None)
    assert not memory_of_cpu.older
    memory_of_cpu.use(0, 1 << 21, 1000, (1000,), torch.uint8)
    memory_of_cpu.label(0, 1 << 21, "gradients", "layer")
    memory_of_cpu.release_older(0, 1 << 21)  # by a weak reference
    memory_of_cpu.change(0, 1 << 21, -1536, 0, "", None)
    assert list(memory_of_cpu.older.values()) == [1000]
    assert [change.size for change in memory_of_cpu.changes] == [-1000]


def test_sparse_and_fake_tensors_are_passed_on() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    linear = nn.Linear(3, 2)
    with memory.track(linear) as account:
        torch.sparse.mm(torch.eye(3).to_sparse(), weight).sum().backward()  # type: ignore[no-untyped-call]
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = linear(mode.from_tensor(torch.ones(4, 3)) * 2)
    assert fake.shape == (4, 2)
    assert weight.grad is not None
    assert account.by_category()["weights"] == linear.weight.nbytes + linear.bias.nbytes


def test_a_block_of_several_steps() -> None:
    """Phases follow each other again."""
    case = gpt()
    case.step()
    with memory.track(case.model, case.optimizer) as account:
        case.step()
        case.step()
    assert [begin.phase for begin in account._settled().begins] == ["forward", "backward", "optimizer"] * 2
    assert account.peak_bytes == tracked(case).peak_bytes


class MatrixOptimizer(torch.optim.Optimizer):
    """An optimizer that multiplies matrices."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mm(parameter.grad.T)


def test_an_optimizer_that_multiplies_nothing_counts_as_one_operator() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer, matrices = torch.optim.SGD([weight], momentum=0.9), MatrixOptimizer([weight])
    weight.grad = torch.ones(8, 8)
    with memory.track() as account:
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
        optimizer.step()  # makes its state
        matrices.step()
    assert {change.storage.operator for change in account._settled().changes} == {"SGD.step", "aten.mm"}
    assert [begin.phase for begin in account._settled().begins] == ["forward", "optimizer"]
    assert account.by_category()["optimizer state"] == weight.nbytes


def test_operators_and_phases_are_recorded_again_after_an_optimizer_failed() -> None:
    weight = nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    optimizer = torch.optim.SGD([weight])
    with memory.track(None, optimizer) as account:
        optimizer.param_groups[0]["lr"] = "large"
        with pytest.raises(TypeError):
            optimizer.step()
        nn.Linear(8, 8)(weight)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        nn.Linear(8, 8)(weight)
    phases = [begin.phase for begin in account._settled().begins]
    assert phases == ["forward", "optimizer", "forward", "optimizer", "forward"]
    optimizer.param_groups[0]["lr"] = "large"
    with pytest.raises(TypeError), memory.track(None, optimizer):
        optimizer.step()
    with torch.profiler.profile() as profiler:
        torch.ones(8).sum()
    assert any(event.name == "aten::sum" for event in profiler.events())


def test_what_an_operator_of_econmt_consists_of_is_not_recorded() -> None:
    recorder = StepRecorder(CPU)
    table, ids = torch.ones(3, 4), torch.tensor([2, 0])
    with recorder.recording():
        with pytest.raises((IndexError, RuntimeError)):
            torch.ops.econmt_ops.look_up(table, ids + 9, -1, table.dtype)
        torch.ops.econmt_ops.look_up(table, ids, -1, table.dtype).sum()
    (root,) = (event for event in recorder._recorded[0].experimental_event_tree() if event.children)
    inside = {event.name: [child.tag.name for child in event.children] for event in root.children}
    assert inside["econmt_ops::look_up"] == ["Allocation"]
    assert "aten::sum" in inside
