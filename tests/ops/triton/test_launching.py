"""A launch remembers a compiled kernel, and no kernel serves a call that Triton would compile another one for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops.backends.triton import launching
from econmt_ops.backends.triton.launching import Launch, launch_of
from econmt_ops.backends.triton.layer_kernels import preparation
from econmt_ops.dispatch.rule import MODE, rules_only


class Kernel:
    """A kernel of `triton.jit` that only notes its launches, with those of the kernels that it compiles.

    Attributes:
        compiled: Arguments of the calls for which Triton looked for a kernel itself.
        remembered: Number of the compiled kernel and arguments of the calls of kernels that were remembered.
    """

    params = (SimpleNamespace(name="x"), SimpleNamespace(name="BLOCK"))

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.remembered: list[tuple[int, tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*arguments: Any, **constants: Any) -> Any:
            assert constants == {"BLOCK": 8, "num_warps": 4}
            self.compiled.append((grid[0], *arguments))
            number = len(self.compiled) - 1

            def start(*given: Any) -> None:
                self.remembered.append((number, given))

            sizes = {"global_scratch_size": 0, "profile_scratch_size": 0}
            run = SimpleNamespace(launch=start, launch_cooperative_grid=False, launch_pdl=False, **sizes)
            return SimpleNamespace(run=run, function="function", packed_metadata="metadata")

        return call


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU on which kernels can be launched: its number and the current stream."""
    state = SimpleNamespace(device=0, stream=7)
    monkeypatch.setattr(launching, "_INTERPRETED", False)
    monkeypatch.setattr(launching, "_KNOWN_LAUNCHER", True)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state.device, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: state.stream, raising=False)
    return state


@pytest.fixture
def kernel() -> Kernel:
    return Kernel()


@pytest.fixture
def launch(gpu: SimpleNamespace, kernel: Kernel) -> Launch:
    return Launch(kernel, {"BLOCK": 8, "num_warps": 4})


def aligned() -> Tensor:
    tensor = torch.zeros(64)
    return tensor if tensor.data_ptr() % 16 == 0 else aligned()


def test_the_second_call_launches_the_compiled_kernel(
    gpu: SimpleNamespace, kernel: Kernel, launch: Launch
) -> None:
    first, second = aligned(), aligned()
    launch(3, [first], (5,), (32,))
    gpu.stream = 9
    launch(4, [second], (6,), (48,))
    assert kernel.compiled == [(3, first, 5, 32)]
    ((number, given),) = kernel.remembered
    assert number == 0
    # Programs, stream, kernel, addresses, integers and compile-time arguments.
    assert given[:5] == (4, 1, 1, 9, "function")
    assert given[-4:] == (second.data_ptr(), 6, 48, 8)


def test_a_remembered_kernel_is_not_launched_where_kernels_are_only_compiled(
    kernel: Kernel, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(3, [aligned()])
    monkeypatch.setattr(MODE, "compiles_only", True)
    launch(3, [aligned()])
    assert (len(kernel.compiled), kernel.remembered) == (2, [])


def test_tensors_at_other_addresses_are_compiled_for(kernel: Kernel, launch: Launch) -> None:
    tensor = aligned()
    launch(1, [tensor[1:]])  # 4 bytes behind a multiple of 16
    launch(1, [tensor[1:]])
    assert len(kernel.compiled) == 2
    launch(1, [tensor])
    launch(1, [tensor[4:]])
    assert (len(kernel.compiled), len(kernel.remembered)) == (3, 1)
    launch(1, [tensor[2:]])
    assert (len(kernel.compiled), len(kernel.remembered)) == (4, 1)
    launch(1, [tensor])
    assert kernel.remembered[-1][0] == 2


@pytest.mark.parametrize("other", [8, 40, 33, 0x80000000, 0x80000010])
def test_integers_of_another_divisibility_or_width_are_compiled_for(
    other: int, kernel: Kernel, launch: Launch
) -> None:
    tensor = aligned()
    for number in (32, 48, other):
        launch(1, [tensor], (), (number,))
    assert len(kernel.compiled) == 2
    launch(1, [tensor], (), (64,))
    assert kernel.remembered[-1][0] == 0


@pytest.mark.parametrize("number", [1, 0x80000000])
def test_kernels_for_one_and_for_64_bits_are_not_remembered(
    number: int, kernel: Kernel, launch: Launch
) -> None:
    """Triton makes 1 a constant of the kernel, which 17 must not find."""
    tensor = aligned()
    launch(1, [tensor], (), (number,))
    launch(1, [tensor], (), (17 if number == 1 else number + 16,))
    assert len(kernel.compiled) == 2
    assert not kernel.remembered


def test_each_device_has_its_kernel(gpu: SimpleNamespace, kernel: Kernel, launch: Launch) -> None:
    tensor = aligned()
    for gpu.device in (0, 1, 0, 1):
        launch(1, [tensor])
    assert len(kernel.compiled) == 2
    assert [number for number, _ in kernel.remembered] == [0, 1]


def test_types_and_constants_have_launches_of_their_own(kernel: Kernel) -> None:
    one = launch_of(kernel, torch.float32, BLOCK=8)
    assert launch_of(kernel, torch.float32, BLOCK=8) is one
    assert launch_of(kernel, torch.float16, BLOCK=8) is not one
    assert launch_of(kernel, torch.float32, torch.float32, BLOCK=8) is not one
    assert launch_of(kernel, torch.float32, BLOCK=16) is not one


def test_estimates_and_hooks_see_every_launch(
    kernel: Kernel, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = aligned()
    launch(1, [tensor])
    with rules_only("cuda"):
        launch(1, [tensor])
    monkeypatch.setattr(launching, "_has_functions", lambda hook: True)
    launch(1, [tensor])
    assert len(kernel.compiled) == 3
    assert not kernel.remembered


def test_an_unknown_launcher_is_called_by_its_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_KNOWN_LAUNCHER", False)
    calls: list[Any] = []

    class Compiled:
        run = SimpleNamespace()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *arguments, stream: calls.append((grid, arguments, stream))

    launching._launcher(Compiled(), (8,))(3, 7, [64], (5,), (32,))
    assert calls == [((3, 1, 1), (64, 5, 32, 8), 7)]


@pytest.mark.cuda
def test_results_do_not_depend_on_what_was_launched_before() -> None:
    """Rows are copied from tensors at aligned and other addresses, and with strides of any divisibility."""
    types = torch.float32, torch.float16, *[torch.int32] * 10
    launch, programs, *ends = preparation((4, 6, 20), False, 20, 24, 8, (False, False), False, 0, 8, types)
    scratch = torch.zeros(64, dtype=torch.int32, device="cuda")
    memory = torch.randn(4096, device="cuda")
    for begin, step, row in (
        (0, 192, 32), (0, 192, 32), (4, 96, 16), (1, 192, 32), (0, 192, 32), (3, 130, 21), (0, 1, 6), (0, 17, 102),
    ):  # fmt: skip
        given = memory[begin:].as_strided((4, 6, 20), (step, row, 1))
        made = torch.full((24, 24), float("nan"), dtype=torch.float16, device="cuda")
        launch(programs, [given, made, *[scratch] * 10], (4, 6, 8, *ends), (step, row, 0, 0))
        assert torch.equal(made[:, :20], given.reshape(24, 20).half())
        assert made[:, 20:].eq(0).all()
