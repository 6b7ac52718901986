"""Finds all objects that a program can reach, and puts back what they held."""

from __future__ import annotations

import gc
import io
import random
import sys
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from functools import _lru_cache_wrapper, cache, partial
from operator import is_not
from pathlib import Path
from types import (
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    ModuleType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "econmt_memory"} - {"__main__"}
_PLAIN = (type(None), str, bytes, int, float, complex, torch.dtype, torch.device, random.SystemRandom)
_CLOSED = (*_PLAIN, ModuleType, CodeType, FrameType, type(Iterator._abc_impl))  # type: ignore[attr-defined]
"""Classes of objects that are not looked into."""
_INSTALLED = {"site-packages", "dist-packages"}
_ABSENT = object()

# Classes are asked for by issubclass(type(...)) and attributes by descriptors, since objects may run code otherwise.


class Reached(NamedTuple):
    """An object, the names of the attributes that lead to it, and where it may hold others.

    These are pairs of an owner and its keys: descriptors of an object's attributes, or names in a class or namespace.
    """

    name: str
    object: Any
    places: list[tuple[Any, Iterable[Any]]]


def reachable(roots: Mapping[str, Any]) -> Iterator[Reached]:
    """Yields all objects that can be reached from others.

    From a function these are variables of the functions around it and the globals that it names, also as attributes
    of modules; from an object its attributes and its class. Functions and classes of PyTorch, NumPy and the standard
    library are not looked into. What is reached only by globals of installed packages comes last, without a name.

    Args:
        roots: Objects to begin at, by name.
    """
    attributes = cache(_attributes)  # of classes, which a cache of the module would keep alive
    seen: dict[int, Any] = {}  # by id, which no other object gets meanwhile
    waiting: list[tuple[str, Any]] = [*roots.items()]
    nameless: list[tuple[str, Any]] = []
    while waiting or nameless:
        name, each = (waiting or nameless).pop()
        kind = type(each)
        if id(each) in seen or issubclass(kind, _CLOSED):
            continue
        seen[id(each)] = each
        places: list[tuple[Any, Iterable[Any]]] = [(each, attributes(kind))]
        if kind is FunctionType:
            places += _globals(each)
        elif issubclass(kind, type):
            places = [] if _is_of_library(each.__module__) else [(each, [*vars(each)])]
        found = Reached(name, each, places)
        yield found
        for inner, part in _parts(found):
            (waiting if name and inner else nameless).append((name and inner, part))


def _parts(found: Reached) -> Iterator[tuple[str, Any]]:
    """Yields the objects that an object refers to, with their names."""
    name, each, places = found
    kind = type(each)
    is_installed = kind is FunctionType and not _INSTALLED.isdisjoint(Path(each.__code__.co_filename).parts)
    for owner, keys in places:
        for key in keys:
            inner = "" if is_installed else key  # of a namespace
            if owner is each:
                inner = f"{each.__name__}.{key}" if isinstance(key, str) else name
            yield inner, _read(owner, key)
    if issubclass(kind, dict | MappingProxyType):
        for key, value in dict.items(each) if issubclass(kind, dict) else each.items():
            yield name, key
            yield f"{name}.{key}" if isinstance(key, str) else name, value
    elif kind is FunctionType:
        yield from zip(each.__code__.co_freevars, each.__closure__ or (), strict=True)
        yield from ((name, value) for value in (each.__defaults__, each.__kwdefaults__))
    elif issubclass(kind, np.ndarray):
        yield from ((name, value) for value in (each.ravel().tolist() if each.dtype.hasobject else ()))
    elif issubclass(kind, np.random.Generator):
        yield name, each.bit_generator
    elif issubclass(kind, weakref.ref):
        yield name, each()
    elif issubclass(kind, type):
        yield from ((name, base) for base in (*each.__bases__, kind) if places)
    elif not issubclass(kind, Tensor):
        is_list = kind is _lru_cache_wrapper and each.cache_info().maxsize is not None
        # Entries of such a cache form a list, which its dict alone cannot restore.
        yield from ((name, part) for part in gc.get_referents(each) if not (is_list and type(part) is dict))


def _is_of_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _attributes(kind: type) -> tuple[Any, ...]:
    """Returns descriptors of the attributes that objects of a class have: their class, dictionary and slots."""
    if kind is CellType:
        return (CellType.cell_contents,)
    found = [each for base in kind.__mro__ for each in vars(base).values() if "__slots__" in vars(base)]
    dictionaries = (vars(base).get("__dict__") for base in kind.__mro__)
    dictionary = [each for each in dictionaries if isinstance(each, GetSetDescriptorType)][:1]
    kinds = [vars(object)["__class__"]] if dictionary else []
    return (*kinds, *dictionary, *(each for each in found if isinstance(each, MemberDescriptorType)))


def _globals(function: FunctionType) -> list[tuple[dict[str, Any], set[str]]]:
    """Returns the globals of a function, and those of modules that it names, with the names to look up there."""
    if _is_of_library(function.__globals__.get("__name__")):
        return []
    codes, names = [function.__code__], set[str]()
    for code in codes:
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    namespaces = [function.__globals__]
    for namespace in namespaces:
        for module in map(namespace.get, names):
            if type(module) is ModuleType and not _is_of_library(module.__name__):
                namespaces += [vars(module)] if all(vars(module) is not each for each in namespaces) else []
    return [(namespace, names) for namespace in namespaces]


@contextmanager
def restored(roots: Mapping[str, Any]) -> Iterator[None]:
    """Puts back what all objects held that can be reached, and the state of random generators.

    Raises:
        ValueError: An iterator can be reached that cannot be put back.
    """
    generators = random.random, np.random.mtrand._rand, torch.default_generator, torch.cuda.default_generators
    before: list[tuple[Callable[[Any, Any], object], Any, Any]] = []
    for name, each, places in reachable({**roots, "random generators": generators}):
        if name and _is_used_up(each):
            raise ValueError(
                f"memory.predict: {name} is a {type(each).__name__}, which the prediction would use up; read from it "
                "before the step, or predict in a process of its own with isolated=True"
            )
        functions = next((functions for kind, *functions in _STATES if issubclass(type(each), kind)), None)
        if functions is not None:
            before.append((functions[1], each, functions[0](each)))
        before += [
            (_assign, owner, {key: _read(owner, key) for key in keys}) for owner, keys in places if keys
        ]
    try:
        yield
    finally:
        for write, each, state in before:
            write(each, state)


def _is_used_up(each: Any) -> bool:
    """Returns True for iterators and files whose place cannot be put back, unlike that of iterators in Python."""
    kind: Any = type(each)
    if issubclass(kind, io.IOBase):
        return not issubclass(kind, io.BytesIO | io.StringIO) and not each.closed and each.readable()
    return issubclass(kind, Iterator) and not isinstance(kind.__next__, FunctionType)


def _read(owner: Any, key: Any) -> Any:
    """Returns an attribute, or a value of a class or namespace; ``_ABSENT`` if there is none."""
    if isinstance(key, str):
        return (owner if type(owner) is dict else vars(owner)).get(key, _ABSENT)
    try:
        return key.__get__(owner)
    except (AttributeError, ValueError):  # ValueError: of a cell
        return _ABSENT


def _assign(owner: Any, values: dict[Any, Any]) -> None:
    """Sets what is another now; what is new goes, but for modules imported since."""
    is_class = issubclass(type(owner), type)
    for key in {**values, **(vars(owner) if is_class else {})}:
        value, now = values.get(key, _ABSENT), _read(owner, key)
        if value is now or (value is _ABSENT and isinstance(now, ModuleType)):
            continue
        if not isinstance(key, str):
            key.__delete__(owner) if value is _ABSENT else key.__set__(owner, value)
        elif is_class:
            type.__delattr__(owner, key) if value is _ABSENT else type.__setattr__(owner, key, value)
        elif value is _ABSENT:
            del owner[key]
        else:
            owner[key] = value


def _contents(kind: Any, container: Any) -> list[Any]:
    """Returns what a container holds, of a dict each key and its value."""
    if issubclass(kind, dict):
        return [part for item in dict.items(container) for part in item]
    return list(kind.__iter__(container))


def _refill(kind: Any, fill: Callable[[Any, Any], object], container: Any, parts: list[Any]) -> None:
    """Gives a container its contents back by methods of ``kind``, which a subclass may forbid."""
    now = _contents(kind, container)
    if len(now) != len(parts) or any(map(is_not, now, parts)):
        kind.clear(container)
        fill(container, zip(parts[::2], parts[1::2], strict=True) if issubclass(kind, dict) else parts)


def _copied(buffer: Any) -> Any:
    """Copies an array; None for one that nobody can write to."""
    return copy(buffer) if not isinstance(buffer, np.ndarray) or buffer.flags.writeable else None


def _overwrite(buffer: Any, values: Any) -> None:
    if values is not None:
        buffer[... if isinstance(buffer, np.ndarray) else slice(None)] = values


def _empty(filled: Any, before: Any) -> None:
    """Empties the cache of a function if it has been filled since; its entries are made again."""
    if filled.cache_info().misses != before.misses:
        filled.cache_clear()


_CONTAINERS: tuple[tuple[Any, Any], ...] = (
    (OrderedDict, OrderedDict.update),
    (dict, dict.update),
    (list, list.extend),
    (deque, deque.extend),
    (set, set.update),
)
_STATES: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], object]], ...] = (
    *((kind, partial(_contents, kind), partial(_refill, kind, fill)) for kind, fill in _CONTAINERS),
    ((np.ndarray, bytearray, array), _copied, _overwrite),
    (_lru_cache_wrapper, _lru_cache_wrapper.cache_info, _empty),
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, random.Random.getstate, random.Random.setstate),
    (np.random.RandomState, np.random.RandomState.get_state, np.random.RandomState.set_state),
    (np.random.BitGenerator, np.random.BitGenerator.__getstate__, np.random.BitGenerator.__setstate__),
    (io.BytesIO, io.BytesIO.__getstate__, io.BytesIO.__setstate__),
    (io.StringIO, io.StringIO.__getstate__, io.StringIO.__setstate__),
)
"""Classes of objects that hold something besides attributes, with the functions that read it and put it back."""
