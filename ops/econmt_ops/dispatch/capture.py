"""CUDA graph capture, recovery from a failed capture, and a cache of graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any, NamedTuple

import torch

from econmt_ops.dispatch.rule import captured

_ALLOCATION_FAILED = (
    "DefaultCPUAllocator",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
    "could not create a primitive",
    "could not initialize a memory object",
)
"""Texts of PyTorch's out-of-memory errors that have no exception type of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an error says that the device or the machine has run out of memory."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    # The text "primitive descriptor" means "not implemented".
    if not isinstance(error, RuntimeError) or "primitive descriptor" in str(error):
        return False
    return any(words in str(error) for words in _ALLOCATION_FAILED)


def first_error(error: BaseException) -> BaseException:
    """Returns the original cause of an error; the error of ending a capture does not tell what made it fail."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def release_workspaces() -> None:
    """Frees the workspaces of cuBLAS, 32 MiB per thread and stream on a Hopper GPU, until they are needed again."""
    torch._C._cuda_clearCublasWorkspaces()


Note = Callable[[str], object]


class CapturedGraph(NamedTuple):
    """Captured graph, and the return value of its function, whose tensors a replay fills."""

    graph: torch.cuda.CUDAGraph
    result: Any


class GraphCache:
    """CUDA graphs by key, which run one after another and therefore share one memory pool.

    A function has a first run outside of the pool, then it is captured once and replayed. The workspaces of cuBLAS
    belong to the pool too and are freed with the graphs; outside of it, every stream that was ever captured on would
    keep its own.

    Args:
        device: CUDA device.
        threads: True if other threads may call CUDA meanwhile, as NCCL's watchdog does; calls that this thread must not
            make are still detected.

    Attributes:
        graphs: Captured graphs.
        warm: Keys of functions that have had their first run.
        refused: Keys of functions that cannot be captured.
        releases: Number of times that all graphs were released.
    """

    def __init__(self, device: torch.device, *, threads: bool = False) -> None:
        self._device = device
        self._mode = "thread_local" if threads else "global"
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []
        self.graphs: dict[Hashable, CapturedGraph] = {}
        self.warm: set[Hashable] = set()
        self.refused: set[Hashable] = set()
        self.releases = 0
        self._made_room: set[Hashable] = set()

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

    def capture(self, run: Callable[[], object]) -> CapturedGraph:
        """Captures the kernels that ``run`` launches, without executing them.

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
        return CapturedGraph(graph, result)

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """Releases the memory pool of a capture that could not be ended, so that later captures can proceed."""
        with contextlib.suppress(RuntimeError):  # the capture was ended after all
            torch._C._cuda_endAllocateToPool(self._stream.device_index, self._pool)
            torch._C._cuda_releasePool(self._stream.device_index, self._pool)
            self._failed.append(graph)  # the allocator of pinned memory may still query it
        self._pool = torch.cuda.graph_pool_handle()

    def call(self, key: Hashable, function: Callable[[], object], note: Note) -> None:
        """Runs a function without arguments, whose tensors must keep their addresses; see `find`.

        The first call compiles kernels, the second one captures, later ones replay. Keys must not refer to the caller:
        the reference cycle would keep device memory until Python's garbage collector runs.
        """
        if key not in self.warm:
            self.warm.add(key)
            with self.warming_up():
                function()
            return
        entry = self.find(key, lambda: function, note)
        if entry is None:
            function()
        else:
            entry.graph.replay()

    def find(
        self,
        key: Hashable,
        prepare: Callable[[], Callable[[], object]],
        note: Note,
        *,
        makes_room: bool = True,
    ) -> CapturedGraph | None:
        """Returns the graph of a key, captured if there is none; None if its function cannot be captured.

        Args:
            prepare: Returns the function to capture, after its first run if it is not in ``warm``.
            note: Called with the reason, in one line, if the function turns out not to be capturable.
            makes_room: True to release all graphs, once for each key, if memory does not suffice; they are captured
                again when they are needed.

        Raises:
            RuntimeError: There is too little memory.
        """
        if key in self.refused or key in self.graphs:
            return None if key in self.refused else self.graphs[key]
        makes_room = makes_room and bool(self.graphs) and key not in self._made_room
        try:
            self.graphs[key] = self.capture(prepare())
            return self.graphs[key]
        except RuntimeError as error:
            first = first_error(error)
            if not is_out_of_memory(first):
                self.refused.add(key)
                note(str(first).strip().splitlines()[0])
                return None
            if not makes_room:
                raise first from None
            del first
        # The tensors of the failed run are released only now, after its exception.
        self._made_room.add(key)
        self._drop_all()
        return self.find(key, prepare, note)

    def keep(self, keys: Collection[Hashable]) -> None:
        """Destroys the graphs of all other keys, even those still referenced elsewhere."""
        for key in self.graphs.keys() - keys:
            self.graphs.pop(key).graph.reset()

    def release(self) -> None:
        """Destroys all graphs and frees their memory."""
        self._drop_all()
        self._made_room.clear()

    def _drop_all(self) -> None:
        self.releases += 1
        torch.cuda.synchronize(self._device)
        self.keep(())
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
