"""CUDA graphs on the CPU: a capture notes the operations and undoes what they did, a replay does them again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from econmt.engine import graphs
from econmt_ops.core.shapes import Shapes
from econmt_ops.dispatch import capture

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}
"""Operations that ask for values of tensors, which no capture can."""


class FakeGraph:
    """What `torch.cuda.CUDAGraph` is."""

    def __init__(self) -> None:
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.replays = 0

    def reset(self) -> None:
        """Forgets what was captured."""
        self.operations.clear()

    def replay(self) -> None:
        """Computes anew into the tensors of the capture."""
        self.replays += 1
        with torch.no_grad():
            for function, args, kwargs, results in self.operations:
                found = tree_leaves(function(*args, **kwargs))
                for there, value in zip(tree_leaves(results), found, strict=True):
                    if isinstance(there, Tensor) and there.data_ptr() != value.data_ptr():
                        there.copy_(value)


class _Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation in a graph; `undo` gives all tensors the values that they had before."""

    def __init__(self, graph: FakeGraph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph = graph
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func in WAITS:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = named.get(argument.name) if place >= len(args) else args[place]
                self._before += [
                    (each, each.clone()) for each in tree_leaves(written) if isinstance(each, Tensor)
                ]
        results = func(*args, **named)
        self._graph.operations.append((func, args, named, results))
        return results

    def undo(self) -> None:
        for tensor, value in reversed(self._before):
            tensor.copy_(value)


@contextlib.contextmanager
def _capturing(graph: FakeGraph, **_: Any) -> Iterator[None]:
    noted = _Capture(graph)
    try:
        with noted:
            yield
    except RuntimeError as error:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture") from error
    finally:
        with torch.no_grad():
            noted.undo()


class _Idle:
    """A stream, or an event: all is done when it is asked for."""

    device_index = 0

    def wait_stream(self, _: object) -> None: ...

    def synchronize(self) -> None: ...

    def record(self) -> None: ...


def use_fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on graphs are captured on the CPU."""
    names = {
        "CUDAGraph": FakeGraph,
        "graph": _capturing,
        "graph_pool_handle": object,
        "Stream": lambda _: _Idle(),
        "Event": _Idle,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda _: _Idle(),
        "set_stream": lambda _: None,
        "synchronize": lambda _: None,
        "empty_cache": lambda: None,
    }
    for name, value in names.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Shapes, "bounded", lambda *_: None)  # ops do not ask a GPU for values
    for module in graphs, capture:
        monkeypatch.setattr(module, "release_workspaces", lambda: None)
    monkeypatch.setattr(capture.GraphCache, "_abandon", lambda *_: None)
