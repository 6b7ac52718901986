"""CUDA graph capture, and recovery from a failed capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from econmt_ops.dispatch.rule import captured

_Result = TypeVar("_Result")


def first_error(error: BaseException) -> BaseException:
    """Returns the original cause of an error; the error of ending a capture does not tell what made it fail."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def release_workspaces() -> None:
    """Frees the workspaces of cuBLAS, 32 MiB per thread and stream on a Hopper GPU, until they are needed again."""
    torch._C._cuda_clearCublasWorkspaces()


class Capturer:
    """Captures graphs that run one after another and therefore share one memory pool.

    The workspaces of cuBLAS belong to the pool too and are freed with the graphs; outside of it, every stream that was
    ever captured on would keep its own.

    Args:
        device: CUDA device.
        threads: True if other threads may call CUDA meanwhile, as NCCL's watchdog does; calls that this thread must not
            make are still detected.
    """

    def __init__(self, device: torch.device, *, threads: bool = False) -> None:
        self._device = device
        self._mode = "thread_local" if threads else "global"
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """Context of a first run outside the pool, in which kernels are compiled and libraries create their handles."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with captured(), torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def capture(self, run: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        """Captures the kernels that ``run`` launches, without executing them.

        Returns:
            The graph and the return value of ``run``.

        Raises:
            RuntimeError: If the capture fails; `first_error` gives the cause.
        """
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)
        release_workspaces()
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
        finally:
            release_workspaces()
        return graph, result

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Releases the memory pool of a capture that could not be ended, so that later captures can proceed."""
        with contextlib.suppress(RuntimeError):  # the capture was ended after all
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            torch._C._cuda_releasePool(self._stream.device_index, self._pool)
            self._failed.append(graph)  # the allocator of pinned memory may still query it
        self._pool = torch.cuda.graph_pool_handle()
