"""Compilation of many Triton kernels at the same time, before any of them is launched.

The first launch of a kernel otherwise waits for its compilation, half a second or more. A training run launches dozens
of kernels in its first steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from econmt_ops.dispatch.rule import MODE


class CompilerThreads(ThreadPoolExecutor):
    """Threads that compile kernels and load them on the device.

    Attributes:
        failed: True if a kernel could not be compiled or loaded.
    """

    failed = False

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Compiles and loads a kernel in one of the threads."""

        def compile_and_load() -> Any:
            try:
                kernel = compile_kernel()
                kernel._init_handles()  # runs a C compiler, too, for each kind of arguments
            except BaseException:
                self.failed = True
                raise
            return kernel

        return super().submit(compile_and_load)


@contextmanager
def compiling_only(device: torch.device) -> Iterator[CompilerThreads]:
    """Makes launches of Triton kernels compile them in threads and do nothing else; waits for the threads at the end.

    What the kernels would have written is undefined. Backward passes run in the calling thread. A kernel that cannot be
    compiled or loaded is left out; its first launch outside of the context raises the error.

    Args:
        device: CUDA device of the launches, with its index.

    Yields:
        The threads, which tell after the context whether a kernel was left out.
    """
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not MODE.compiles_only:  # another thread
            return run(kernel, *arguments, grid=grid, warmup=warmup, **options)
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **options)
        future = getattr(compiled, "future", None)
        # Triton would keep a failed kernel that is launched again, and lose its error.
        if future is not None and future.done() and future.exception() is None:
            compiled.result()  # from now on, Triton finds the kernel ten times as fast
        return None

    threads = CompilerThreads(initializer=torch.cuda.set_device, initargs=(device,))
    with threads, torch.autograd.set_multithreading_enabled(False):
        MODE.compiles_only, JITFunction.run = True, compile_only
        try:
            with triton.AsyncCompileMode(threads, ignore_errors=True):
                yield threads
        finally:
            MODE.compiles_only, JITFunction.run = False, run
