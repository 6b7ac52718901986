"""Compares all that a prediction's step can reach before and after, by a walk that knows nothing of the package's."""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, FunctionType, GeneratorType, GenericAlias, ModuleType, NoneType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import econmt_memory as memory

LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "econmt_memory", "pytest", "_pytest", "pluggy"}
CLOSED = (ModuleType, CodeType, FrameType, GenericAlias, str, bytes, int, float)


@pytest.fixture(autouse=True)
def _predictions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    predict = memory.predict

    def checked(*args: Any, **settings: Any) -> memory.Account:
        roots = args, random.random, np.random.mtrand._rand, torch.default_generator
        before = fingerprints(roots)
        try:
            return predict(*args, **settings)
        finally:
            after = fingerprints(roots)
            changed = [key for key in before | after if before.get(key, ())[1:] != after.get(key, ())[1:]]
            found = [(before.get(key) or after[key])[0] for key in changed]
            assert [f"{type(each).__name__} {each!r:.80}" for each in found] == []

    monkeypatch.setattr(memory, "predict", checked)


def fingerprints(roots: Any) -> dict[int, tuple[Any, ...]]:
    """Returns all objects that can be reached by id, with class, bits or state, and the identities of what they hold."""
    found: dict[int, tuple[Any, ...]] = {}
    waiting = [roots]
    while waiting:
        each = waiting.pop()
        is_closed = isinstance(each, CLOSED) or type(each).__name__ == "_abc_data"
        if (
            id(each) not in found
            and not is_closed
            and not (isinstance(each, type) and is_of(each.__module__))
        ):
            parts = list(parts_of(each))
            found[id(each)] = each, type(each), state_of(each), [*map(id, parts)]
            waiting += parts
    return found


def is_of(module: Any) -> bool:
    return str(module).partition(".")[0] in LIBRARIES


def parts_of(each: Any) -> Iterable[Any]:
    if isinstance(each, FunctionType):
        names = sorted(names_of(each.__code__))
        found = [] if is_of(each.__globals__.get("__name__")) else [*map(each.__globals__.get, names)]
        spaces = [vars(one) for one in found if isinstance(one, ModuleType) and not is_of(one.__name__)]
        found += [space.get(name) for space in spaces for name in names]
        kept = [one for one in found if not isinstance(one, ModuleType | NoneType)]  # modules may be imported
        return [each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__, *kept]
    if isinstance(each, type):
        return vars(each).values()
    if isinstance(each, GeneratorType | torch.Generator | threading.local):
        return [vars(each)] if isinstance(each, threading.local) else []
    if isinstance(each, functools._lru_cache_wrapper) and each.cache_info().maxsize is not None:
        return [each.__wrapped__]
    # Before the object's parts, of which it becomes one.
    attributes = getattr(each, "__dict__", None) if type(each).__dictoffset__ else None
    parts = gc.get_referents(each)
    if isinstance(each, OrderedDict):
        parts = [part for item in OrderedDict.items(each) for part in item]
    grad = each.grad if isinstance(each, Tensor) and each.is_leaf else None
    return [attributes, grad, *(sorted(parts, key=id) if isinstance(each, set) else parts)]


def names_of(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        yield from names_of(inner) if isinstance(inner, CodeType) else ()


def state_of(each: Any) -> object:
    """Returns what an object holds besides other objects."""
    if isinstance(each, Tensor):
        about = each.dtype, each.layout, each.requires_grad, each._version
        if type(each) not in (Tensor, nn.Parameter) or each.layout is not torch.strided or each.is_nested:
            return about
        if each.device.type != "meta":
            about += (each.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(),)  # type: ignore[assignment]
        return *about, each.shape, each.stride(), each.data_ptr()
    readers = [reader for kind, reader in READERS.items() if isinstance(each, kind)]
    return readers and readers[0](each)


READERS: dict[type, Callable[[Any], object]] = {
    np.ndarray: np.ndarray.tobytes,
    random.Random: random.Random.getstate,
    torch.Generator: lambda each: each.get_state().tolist(),
    np.random.RandomState: lambda each: str(each.get_state()),
    np.random.BitGenerator: lambda each: str(each.state),
    GeneratorType: lambda each: each.gi_frame and each.gi_frame.f_lasti,
}
