"""Finds all objects that a program can reach, and puts back what they held."""

from __future__ import annotations

import gc
import io
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from functools import _lru_cache_wrapper, cache, partial
from itertools import chain
from multiprocessing.connection import Connection
from operator import is_not
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "econmt_memory"} - {"__main__"}
_PLAIN = (type(None), str, bytes, int, float, complex, torch.dtype, torch.device, random.SystemRandom)
_CLOSED = (*_PLAIN, ModuleType, CodeType, types.FrameType, types.MappingProxyType, _GeneratorContextManager)
"""Classes of objects that are not looked into."""
_ABSENT = object()

# Classes are found by issubclass(type(...)) and attributes by descriptors, since objects may run code otherwise.

Place = tuple[Any, dict[Any, Any]]
"""A class or namespace with its values by name, or an object with its attributes by descriptor."""
Reached = tuple[str, Any, list[Place]]
"""The names of variables and attributes that lead to an object, the object, and where it holds others."""


def reachable(**roots: Any) -> Iterator[Reached]:
    """Yields all objects that can be reached from others.

    From a function these are variables of the functions around it and the globals that it names, also as attributes
    of modules; from an object its attributes and its class. Functions and classes of PyTorch, NumPy and the standard
    library are not looked into. What is reached only by globals of installed packages comes last, without a name.
    """
    attributes = cache(_attributes)  # of classes, which a cache of the module would keep alive
    seen: dict[int, Any] = {}  # by id, which no other object gets meanwhile
    waiting: list[tuple[str, Any]] = [*roots.items()]
    nameless: list[tuple[str, Any]] = []
    while waiting or nameless:
        name, each = (waiting or nameless).pop()
        kind = type(each)
        if id(each) in seen:
            continue
        seen[id(each)] = each
        places: list[Place] = [(each, {key: _read(each, key) for key in attributes(kind)})]  # type: ignore[arg-type]
        if issubclass(kind, type):
            places = [] if _is_of_library(each.__module__) else [(each, dict(vars(each)))]
        elif kind is FunctionType:
            places += _globals(each)
        yield name, each, places
        is_installed = kind is FunctionType and "-packages" in each.__code__.co_filename
        known = (("" if is_installed else key, part) for _, held in places for key, part in held.items())
        for key, part in chain(known, _parts(each)):
            # Tuples that the garbage collector does not track hold nothing that could change.
            if not issubclass(type(part), _CLOSED) and (type(part) is not tuple or gc.is_tracked(part)):
                inner = name
                if isinstance(key, str):
                    inner = name and key and (key if kind is FunctionType else f"{name}.{key}")
                (waiting if inner else nameless).append((inner, part))


def _parts(each: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the objects that an object holds, other than by attributes and globals, with their keys."""
    kind = type(each)
    if kind is FunctionType:
        yield from zip(each.__code__.co_freevars, each.__closure__ or (), strict=True)
        yield from enumerate((each.__defaults__, each.__kwdefaults__))
    elif issubclass(kind, type):
        yield from enumerate(() if _is_of_library(each.__module__) else each.__bases__)
    elif issubclass(kind, dict):
        yield from dict.items(each)
        yield from enumerate(dict.keys(each))
    elif not issubclass(kind, Tensor) and kind.__name__ != "_abc_data":  # of abstract classes
        # A cache that forgets has its entries in a list, too, so that they are not put back into its dict.
        forgets = kind is _lru_cache_wrapper and each.cache_info().maxsize is not None
        yield from enumerate(part for part in gc.get_referents(each) if not (forgets and type(part) is dict))


def _is_of_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _attributes(kind: type) -> list[Any]:
    """Returns descriptors of what objects of a class hold: dictionary, slots, and the variable of a cell."""
    return [
        each
        for base in map(vars, kind.__mro__)
        for name, each in base.items()
        if (type(each) is types.MemberDescriptorType and "__slots__" in base)
        or (type(each) is types.GetSetDescriptorType and name in ("__dict__", "cell_contents"))
    ]


def _globals(function: FunctionType) -> list[Place]:
    """Returns the globals that a function names, and those of modules that it names."""
    if _is_of_library(function.__globals__.get("__name__")):
        return []
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names.update(filter(str.isidentifier, code.co_names))  # not pytest's "@pytest_ar"
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    namespaces = [function.__globals__]
    for namespace in namespaces:
        for module in map(namespace.get, names):
            if type(module) is ModuleType and not _is_of_library(module.__name__):
                namespaces += [vars(module)] if all(vars(module) is not each for each in namespaces) else []
    return [(namespace, {name: _read(namespace, name) for name in names}) for namespace in namespaces]


@contextmanager
def restored(objects: Iterable[Reached], *, isolated: bool) -> Iterator[None]:
    """Puts back what objects held.

    Raises:
        ValueError: One of them would be used up. A process of its own (``isolated``) has copies of iterators, but
            shares connections and files.
    """
    before: list[tuple[Callable[[Any, Any], object], Any, Any]] = []
    for name, each, places in objects:
        kind: Any = type(each)
        is_read = issubclass(kind, Iterator) and not isinstance(kind.__next__, FunctionType) and not isolated
        if issubclass(kind, io.IOBase):
            is_read = not (each.closed or each.writable())
        if name and (is_read or issubclass(kind, Connection)):
            remedy = "read from it before the step" + ("" if isolated else ", or give isolated=True")
            raise ValueError(f"memory.predict: '{name}' ({kind.__name__}) would be used up; {remedy}")
        before += [(_assign, owner, held) for owner, held in places if held]
        if issubclass(kind, np.ndarray) and not each.flags.writeable:
            continue
        before += [(write, each, read(each)) for base, read, write in _STATES if issubclass(kind, base)][:1]
    try:
        yield
    finally:
        for write, each, state in before:
            write(each, state)


def _read(owner: Any, key: Any) -> Any:
    """Returns what a namespace, class or object holds; ``_ABSENT`` if it is nothing."""
    if isinstance(key, str):
        return (owner if type(owner) is dict else vars(owner)).get(key, _ABSENT)
    try:
        return key.__get__(owner)
    except (AttributeError, ValueError):  # ValueError: of a cell
        return _ABSENT


def _assign(owner: Any, held: dict[Any, Any]) -> None:
    """Puts back what a namespace, class or object held; modules that have been imported since stay."""
    is_class = issubclass(type(owner), type)
    for key in {**held, **(vars(owner) if is_class else {})}:
        value, now = held.get(key, _ABSENT), _read(owner, key)
        if value is now or (value is _ABSENT and isinstance(now, ModuleType)):
            continue
        if not isinstance(key, str):
            key.__delete__(owner) if value is _ABSENT else key.__set__(owner, value)
        elif is_class:
            type.__delattr__(owner, key) if value is _ABSENT else type.__setattr__(owner, key, value)
        else:
            owner.pop(key) if value is _ABSENT else owner.update({key: value})


def _contents(kind: Any, container: Any) -> list[Any]:
    """Returns what a container holds, of a dict each key and its value."""
    if issubclass(kind, dict):
        return [part for item in kind.items(container) for part in item]
    return list(kind.__iter__(container))


def _refill(kind: Any, container: Any, parts: list[Any]) -> None:
    """Gives a container its contents back by methods of ``kind``, which a subclass may forbid."""
    now = _contents(kind, container)
    if len(now) != len(parts) or any(map(is_not, now, parts)):
        kind.clear(container)
        fill = kind.extend if hasattr(kind, "extend") else kind.update
        fill(container, zip(parts[::2], parts[1::2], strict=True) if issubclass(kind, dict) else parts)


def _empty(filled: Any, before: Any) -> None:
    """Empties the cache of a function if it has been filled since; its entries are made again."""
    if filled.cache_info().misses != before.misses:
        filled.cache_clear()


_CONTAINERS = (OrderedDict, dict, list, deque, set)
_BitGenerator: Any = np.random.BitGenerator
_STATES: tuple[tuple[type, Callable[[Any], Any], Callable[[Any, Any], object]], ...] = (
    *((kind, partial(_contents, kind), partial(_refill, kind)) for kind in _CONTAINERS),
    (np.ndarray, np.ndarray.copy, np.copyto),
    (_lru_cache_wrapper, _lru_cache_wrapper.cache_info, _empty),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (_BitGenerator, _BitGenerator.__getstate__, _BitGenerator.__setstate__),
)
"""Classes of objects that hold something besides attributes, with functions that read it and put it back."""
