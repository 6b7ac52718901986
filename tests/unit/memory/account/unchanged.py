"""Compares all that a program can reach before and after, by a walk that knows nothing of the package's own."""

from __future__ import annotations

import functools
import gc
import hashlib
import random
import sys
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from types import CodeType, FrameType, FunctionType, GeneratorType, GenericAlias, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_NOT_FOLLOWED = {*sys.stdlib_module_names, "torch", "numpy", "econmt_memory", "pytest", "_pytest", "pluggy"}
_CLOSED = (GenericAlias, ModuleType, CodeType, FrameType, str, bytes, int, float, torch.Generator)


class Fingerprints:
    """Objects that can be reached, with what each holds: identities of others, bits, and states of generators."""

    def __init__(self, *roots: object) -> None:
        self.of: dict[int, tuple[Any, object]] = {}
        waiting: list[Any] = [*roots, random.random, np.random.mtrand._rand, torch.default_generator]
        while waiting:
            each = waiting.pop()
            if id(each) not in self.of and _is_followed(each):
                parts = list(_parts(each))
                self.of[id(each)] = each, (type(each), _state(each), [*map(id, parts)])
                waiting += parts

    def differences(self, later: Fingerprints) -> list[str]:
        """Describes the objects that are others now, were not there before, or hold fake tensors."""
        found = []
        for key, (each, state) in later.of.items():
            if type(each).__name__ == "FakeTensor":
                found.append("a fake tensor is left")
            elif key not in self.of:
                found.append(f"new: {type(each).__name__} {each!r:.80}")
            elif self.of[key][1] != state:
                found.append(f"changed: {type(each).__name__} {each!r:.80}")
        return found + [f"gone: {each!r:.80}" for key, (each, _) in self.of.items() if key not in later.of]


def _is_followed(each: Any) -> bool:
    if isinstance(each, type):
        return str(each.__module__).partition(".")[0] not in _NOT_FOLLOWED
    return type(each) is torch.Generator or (
        not isinstance(each, _CLOSED) and type(each).__name__ != "_abc_data"
    )


def _parts(each: Any) -> Iterator[Any]:
    """Yields what an object refers to."""
    if isinstance(each, FunctionType):
        yield from (each.__closure__, each.__defaults__, each.__kwdefaults__, each.__dict__, each.__code__)
        yield from _globals(each.__globals__, set(_names(each.__code__)))
    elif isinstance(each, type):
        yield from vars(each).values()
    elif isinstance(each, GeneratorType):
        return
    elif isinstance(each, functools._lru_cache_wrapper):
        yield each.__wrapped__
    else:
        yield getattr(each, "__dict__", None)
        yield each.grad if isinstance(each, Tensor) and each.is_leaf else None
        parts = OrderedDict.items(each) if isinstance(each, OrderedDict) else [gc.get_referents(each)]
        yield from chain.from_iterable(
            sorted(part, key=id) if isinstance(each, set) else part for part in parts
        )


def _globals(namespace: dict[str, Any], names: set[str]) -> Iterator[Any]:
    if str(namespace.get("__name__")).partition(".")[0] in _NOT_FOLLOWED:
        return
    for value in map(namespace.get, sorted(names)):
        yield value
        if isinstance(value, ModuleType) and value.__name__.partition(".")[0] not in _NOT_FOLLOWED:
            yield from map(vars(value).get, sorted(names))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _state(each: Any) -> object:
    """Returns what an object holds besides other objects."""
    if isinstance(each, Tensor):
        about = each.dtype, each.layout, each.requires_grad, each._version
        if (
            each.layout is not torch.strided
            or each.is_nested
            or type(each) not in (Tensor, torch.nn.Parameter)
        ):
            return about
        bits = b""
        if each.numel() and each.device.type != "meta":
            bits = each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return *about, each.shape, each.stride(), each.data_ptr(), hashlib.sha1(bits).digest()
    if isinstance(each, np.ndarray):
        return each.tobytes()
    if isinstance(each, GeneratorType):
        return each.gi_frame and each.gi_frame.f_lasti
    if isinstance(each, torch.Generator):
        return each.get_state().tolist()
    if isinstance(each, random.Random):
        return each.getstate()
    if isinstance(each, np.random.RandomState | np.random.BitGenerator):
        return str(each.__getstate__())
    return bytes(each) if isinstance(each, bytearray) else None
