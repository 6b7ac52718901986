"""Capturing CUDA graphs, and putting in order what a capture leaves that failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from econmt_ops.dispatch.rule import captured

_Result = TypeVar("_Result")


def first_error(error: BaseException) -> BaseException:
    """The error during which an error happened: that of ending a capture tells nothing of what made it fail."""
    while error.__context__ is not None:
        error = error.__context__
    return error


class Capturer:
    """Captures graphs that run one after another and so share one pool of memory.

    Args:
        device: a CUDA device.
        threads: whether other threads may ask the device something meanwhile, as NCCL's watchdog does; what this one
            must not do is found out all the same.
    """

    def __init__(self, device: torch.device, *, threads: bool = False) -> None:
        self._device = device
        self._mode = "thread_local" if threads else "global"
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """The context of a first run outside the pool: kernels are compiled, libraries make their handles."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with captured(), torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(self, run: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """A graph of what ``run`` launches, which is not run by this, and what it returns.

        Raises:
            RuntimeError: it cannot be captured; `first_error` tells why.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        try:
            with (
                captured(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=self._mode),
            ):
                result = run()
        except RuntimeError:
            torch.cuda.set_stream(current)
            self._abandon(graph)
            raise
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Puts in order what a capture leaves that could not be ended: its pool in use, which others cannot share."""
        with contextlib.suppress(RuntimeError):  # it was ended
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            torch._C._cuda_releasePool(self._stream.device_index, self._pool)
            self._failed.append(graph)  # which the allocator for pinned memory may still ask
        self._pool = torch.cuda.graph_pool_handle()
