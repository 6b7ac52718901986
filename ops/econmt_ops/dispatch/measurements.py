"""What was measured: times of an op's candidates, the choice between them, and the file that remembers.

The file is ``choices.json`` in the folder ``$ECONMT_CACHE``, or else in ``econmt`` in the system's cache folder. It
holds numbers alone: nothing in it is run. Times count only on the machine, with the libraries and with the number of
threads with which they were taken.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from econmt_ops.backends import c as native

MARGIN = 0.03
"""What the rule names is kept unless another candidate is faster by this share: noise must not decide."""

_FORMAT = "econmt-choices-1"

_MACHINES = 16
"""Machines (and versions of the libraries on them) that the file remembers: those written to last."""


class MeasurementRecord(NamedTuple):
    """A candidate's call, forward and backward.

    Median (see `timing.compared`), lowest and highest decile in milliseconds; the bytes that autograd keeps; and the
    seconds that the first call took longer than the others.
    """

    milliseconds: float
    low: float
    high: float
    bytes: int
    first_seconds: float


class Measurement(NamedTuple):
    """The candidates of one op at one shape.

    Attributes:
        op: its name.
        key: op, shape, types, device: see `econmt_ops.dispatch.rule.Problem`.
        rule: the candidate that runs where nothing is measured.
        records: by candidate.
        calls: how often the op was called at this shape while it was measured.
    """

    op: str
    key: str
    rule: str
    records: dict[str, MeasurementRecord]
    calls: int = 1

    def choice(self, byte_limit: int | None = None) -> str:
        """See `decide`."""
        return decide(self.records, self.rule, byte_limit)

    def regret(self, candidate: str) -> float:
        """By which share a candidate is slower than the best."""
        return regret(self.records, candidate)


def decide(records: Mapping[str, MeasurementRecord], rule: str, byte_limit: int | None = None) -> str:
    """The fastest candidate; ``rule`` unless another one is faster by more than `MARGIN`.

    Args:
        records: of the candidates.
        rule: one of them.
        byte_limit: candidates that keep more are out; if all do, the one that keeps least is chosen.
    """
    fitting = {
        name: record for name, record in records.items() if byte_limit is None or record.bytes <= byte_limit
    }
    if not fitting:
        return min(records, key=lambda name: (records[name].bytes, records[name].milliseconds))
    best = min(fitting, key=lambda name: fitting[name].milliseconds)
    if rule in fitting and fitting[best].milliseconds >= (1 - MARGIN) * fitting[rule].milliseconds:
        return rule
    return best


def regret(records: Mapping[str, MeasurementRecord], candidate: str) -> float:
    """By which share a candidate is slower than the fastest: 0 is the best there is."""
    return records[candidate].milliseconds / min(record.milliseconds for record in records.values()) - 1


def cache_folder() -> Path:
    """``$ECONMT_CACHE``, or the folder ``econmt`` where this system keeps caches."""
    named = os.environ.get("ECONMT_CACHE")
    if named:
        return Path(named)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "econmt"


@functools.cache
def sources() -> str:
    """Tells versions of econmt_ops apart: a digest of its sources, since times change with any of them."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".c", ".h")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def processor() -> str:
    """The processor as its maker calls it, or as the system does."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def machine(device: torch.device) -> str:
    """What times depend on beside the op and its shape: libraries, processor or GPU, threads."""
    parts = [f"torch {torch.__version__}", f"econmt_ops {sources()}"]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    else:
        parts += [processor(), f"{torch.get_num_threads()} threads"]
        parts += [] if native.is_built() else ["no C library"]
    return ", ".join(parts)


class Store:
    """The file. Two processes may write at a time: each adds what it has to what is there, under a lock.

    Args:
        path: of the file; `cache_folder` says where if None.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = cache_folder() / "choices.json" if path is None else path

    def load(self, where: str) -> dict[str, dict[str, MeasurementRecord]]:
        """The records by key that were taken on the machine ``where``; none if the file is absent or broken."""
        found: dict[str, dict[str, MeasurementRecord]] = {}
        for key, records in self._read().get(where, {}).items():
            found[key] = {name: MeasurementRecord(*values) for name, values in records.items()}
        return found

    def add(self, where: str, records: Mapping[str, Mapping[str, MeasurementRecord]]) -> None:
        """Adds or replaces records by key; without effect, but for a warning, where nothing can be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                content = self._read()
                content[where] = entries = content.pop(where, {})
                for old in list(content)[:-_MACHINES]:
                    del content[old]
                for key, candidates in records.items():
                    entries[key] = {name: list(record) for name, record in candidates.items()}
                temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
                text = json.dumps({"format": _FORMAT, "machines": content}, indent=1)
                temporary.write_text(text + "\n", encoding="utf-8")
                temporary.replace(self.path)
        except OSError as error:
            warnings.warn(
                f"econmt_ops: {self.path}: measurements are not remembered ({error.strerror})",
                RuntimeWarning,
                stacklevel=2,
            )

    def _read(self) -> dict[str, dict[str, dict[str, list[Any]]]]:
        """By machine, key and candidate the values of a record; empty, with a warning, if the file is broken."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise ValueError("another format")
            return _checked(content["machines"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warnings.warn(
                f"econmt_ops: {self.path}: left aside, it is broken ({error}); it is written anew",
                RuntimeWarning,
                stacklevel=2,
            )
            return {}


def _checked(machines: Any) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """The content of a file, if it has the form that `Store` writes.

    Raises:
        ValueError, TypeError, AttributeError: it has not.
    """
    for entries in machines.values():
        for candidates in entries.values():
            for values in candidates.values():
                record = MeasurementRecord(*values)
                if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in record):
                    raise ValueError("a number is none")
                if record.milliseconds <= 0:
                    raise ValueError("a time is zero")
    checked: dict[str, dict[str, dict[str, list[Any]]]] = machines
    return checked


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits until no other process holds the lock; on Windows, which has none of this kind, goes on at once."""
    with path.open("ab") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
