"""Launches of Triton kernels that take the host a few microseconds.

At every launch Triton examines each argument anew to find the compiled kernel, which takes the host 45 microseconds for
a kernel of 30 arguments. A `Launch` belongs to one set of compile-time arguments. It remembers the compiled kernel and
hands it the addresses of tensors.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from econmt_ops.backends.triton import interpreted
from econmt_ops.dispatch.rule import MODE

_ALIGNMENT = 16
"""Bytes of which the address of a tensor is mostly a multiple; also the divisor that Triton looks for in integers."""

_INT32 = 1 << 31

_KNOWN_LAUNCHER = triton.__version__.startswith("3.6.")
"""True if the arguments of ``CompiledKernel.run`` are known; other versions are called by their public interface."""


_INTERPRETED = interpreted()
"""True if the kernels of this package run in Triton's interpreter."""


def _has_functions(hook: Any) -> bool:
    """Returns True if functions are to be called at launches: a list of them, or one in some versions of Triton."""
    return bool(getattr(hook, "calls", hook))


class Launch:
    """A kernel with its compile-time arguments.

    Args:
        kernel: the function that ``triton.jit`` made, whose first arguments are tensors, followed by integers.
        constants: the compile-time arguments and options such as ``num_warps``, by name.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self._kernel, self._constants = kernel, constants
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}
        names = [parameter.name for parameter in kernel.params] if hasattr(kernel, "params") else []
        self._trailing = tuple(constants[name] for name in names if name in constants)

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        integers: Sequence[int] = (),
        divisible: Sequence[int] = (),
    ) -> None:
        """Launches the kernel on the current device and stream.

        Args:
            programs: size of the grid.
            tensors: of the types that they have in all calls of this object.
            integers: arguments that are in ``do_not_specialize``, below 2^31.
            divisible: further integers, for multiples of 16 of which Triton compiles kernels of their own.
        """
        hooked = _has_functions(knobs.runtime.launch_enter_hook)
        if MODE.device is not None or _INTERPRETED or MODE.compiles_only or hooked:
            self._kernel[(programs,)](*tensors, *integers, *divisible, **self._constants)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        unaligned = functools.reduce(operator.or_, addresses)
        device = torch._C._cuda_getDevice()
        # Numbers that need 64 bits stay as they are: they find no kernel that takes them in 32.
        place = (device, *[number % _ALIGNMENT if number < _INT32 else number for number in divisible])
        launch = self._compiled.get(place)
        if launch is not None and not unaligned % _ALIGNMENT:
            stream = torch._C._cuda_getCurrentRawStream(device)
            launch(programs, stream, addresses, integers, divisible)
            return
        compiled = self._kernel[(programs,)](*tensors, *integers, *divisible, **self._constants)
        # Triton compiles other kernels where an integer is 1 or needs 64 bits.
        usual = all(1 != number < _INT32 for number in divisible)
        if compiled is not None and usual and not unaligned % _ALIGNMENT:
            self._compiled[place] = _launcher(compiled, self._trailing)


def _launcher(compiled: Any, trailing: tuple[Any, ...]) -> Callable[..., Any]:
    """Returns a function that launches a compiled kernel: its programs, the stream, addresses and integers."""
    run = compiled.run
    if not _KNOWN_LAUNCHER or run.global_scratch_size or run.profile_scratch_size:
        return lambda programs, stream, addresses, integers, divisible: compiled[(programs, 1, 1)](
            *addresses, *integers, *divisible, *trailing, stream=stream
        )
    start, function, metadata = run.launch, compiled.function, compiled.packed_metadata
    together, early = run.launch_cooperative_grid, run.launch_pdl

    def launch(
        programs: int, stream: int, addresses: list[int], integers: Sequence[int], divisible: Sequence[int]
    ) -> None:
        start(
            programs, 1, 1, stream, function, together, early, None, None, metadata, None, None, None, *addresses,
            *integers, *divisible, *trailing,
        )  # fmt: skip

    return launch


@functools.cache
def launch_of(kernel: Any, *types: torch.dtype, **constants: Any) -> Launch:  # noqa: ARG001  types tell launches apart
    """Returns the launch of a kernel for these types of tensors and these compile-time arguments.

    Args:
        kernel: the function that ``triton.jit`` made.
        *types: of all tensors whose type can differ from call to call.
        **constants: see `Launch`.
    """
    return Launch(kernel, constants)
