"""Measured times of an op's candidates, the choice between them, and the file that stores them.

The file is ``choices.json`` in the folder ``$ECONMT_CACHE``, or else in ``econmt`` in the system's cache folder. It
holds numbers only; none of it is executed. Times are valid for one machine, its library versions and number of threads.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from econmt_ops.core.caches import cache_folder

MARGIN = 0.03
"""Share by which a candidate needs to be faster than the rule's candidate to replace it, so that noise does not decide.
"""

_FORMAT = "econmt-choices-1"

_MACHINES = 16
"""Largest number of machines (with their library versions) in the file; the most recently written ones are kept."""


CPU_DETAILS: list[Callable[[], str]] = []
"""Functions by which backends add to the key of a machine whose CPU they use; "" adds nothing."""


class MeasurementRecord(NamedTuple):
    """Measurement of one candidate's forward and backward pass.

    Milliseconds that are compared (see `timing.compared`), and lowest and highest decile around them: those of the
    samples, relative to their median; the bytes that autograd keeps; and the seconds by which the first call exceeded
    the median.
    """

    milliseconds: float
    low: float
    high: float
    bytes: int
    first_seconds: float


class Measurement(NamedTuple):
    """Measured candidates of one op at one shape.

    Attributes:
        op: Name of the op.
        key: Op, shape, types and device; see `econmt_ops.dispatch.rule.Problem`.
        rule: Candidate that runs without measurements.
        records: Records by candidate.
        calls: Number of calls of the op at this shape during the session.
    """

    op: str
    key: str
    rule: str
    records: dict[str, MeasurementRecord]
    calls: int = 1

    def choice(self, byte_limit: int | None = None) -> str:
        """Returns the selected candidate; see `decide`."""
        return decide(self.records, self.rule, byte_limit)

    def regret(self, candidate: str) -> float:
        """Returns the share by which a candidate is slower than the fastest; 0 for the fastest itself."""
        fastest = min(record.milliseconds for record in self.records.values())
        return self.records[candidate].milliseconds / fastest - 1


def decide(records: Mapping[str, MeasurementRecord], rule: str, byte_limit: int | None = None) -> str:
    """Returns the fastest candidate, or ``rule`` unless another one is faster by more than `MARGIN`.

    Args:
        records: Records by candidate.
        rule: Candidate of the rule.
        byte_limit: Bytes that a candidate may keep; if all exceed it, the one that keeps least is selected.
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


@functools.cache
def sources() -> str:
    """Returns a digest of econmt_ops' sources, since times change with any of them."""
    digest, root, kinds = hashlib.sha256(), Path(__file__).parents[1], (".py", ".c", ".h", ".cu", ".cuh")
    for file in sorted(file for file in root.rglob("*") if file.suffix in kinds):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


@functools.cache
def processor() -> str:
    """Returns the processor's model name, or its architecture if the system does not tell the name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def machine(device: torch.device) -> str:
    """Returns the key of a machine: library versions, processor or GPU, and number of threads."""
    parts = [f"torch {torch.__version__}", f"econmt_ops {sources()}"]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    else:
        parts += [processor(), f"{torch.get_num_threads()} threads"]
        parts += filter(None, (describe() for describe in CPU_DETAILS))
    return ", ".join(parts)


class Store:
    """File of measurements. Processes may write concurrently: each merges its records under a lock.

    Args:
        path: Path of the file; None: ``choices.json`` in `cache_folder`.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = cache_folder() / "choices.json" if path is None else path

    def load(self, where: str) -> dict[str, dict[str, MeasurementRecord]]:
        """Returns the records of the machine ``where`` by key; empty if the file is absent or broken."""
        return self._read().get(where, {})

    def add(
        self, where: str, records: Mapping[str, Mapping[str, MeasurementRecord]], replacing: str = ""
    ) -> None:
        """Adds or replaces records by key; warns if the file cannot be written.

        Args:
            where: Key of the machine; see `machine`.
            records: Records by key and candidate.
            replacing: Beginning of keys whose records are removed; empty: none.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                content = self._read()
                content[where] = entries = content.pop(where, {})
                for old in list(content)[:-_MACHINES]:
                    del content[old]
                for old in [key for key in entries if replacing and key.startswith(replacing)]:
                    del entries[old]
                for key, candidates in records.items():
                    entries[key] = {**candidates}
                temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
                text = json.dumps({"format": _FORMAT, "machines": content}, indent=1)
                temporary.write_text(text + "\n", encoding="utf-8")
                temporary.replace(self.path)
        except OSError as error:
            warnings.warn(
                f"econmt_ops: {self.path}: cannot store measurements ({error.strerror})",
                RuntimeWarning,
                stacklevel=2,
            )

    def _read(self) -> dict[str, dict[str, dict[str, MeasurementRecord]]]:
        """Returns the records by machine, key and candidate; empty, with a warning, if the file is broken."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if not isinstance(content, dict) or content.get("format") != _FORMAT:
                raise ValueError("unknown format")
            return {where: _records_of(entries) for where, entries in content["machines"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warnings.warn(
                f"econmt_ops: {self.path}: ignoring the broken file of measurements ({error}); it will be overwritten",
                RuntimeWarning,
                stacklevel=2,
            )
            return {}


def _records_of(entries: Any) -> dict[str, dict[str, MeasurementRecord]]:
    """Returns a machine's records by key and candidate from the file's content.

    Raises:
        ValueError, TypeError, AttributeError: If it does not have the form that `Store` writes.
    """
    records = {
        key: {name: MeasurementRecord(*values) for name, values in candidates.items()}
        for key, candidates in entries.items()
    }
    for record in (record for candidates in records.values() for record in candidates.values()):
        if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in record):
            raise ValueError("a value is not a finite, nonnegative number")
        if record.milliseconds <= 0:
            raise ValueError("a time is zero")
    return records


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on a file within the context; on Windows, which lacks this kind of lock, does nothing."""
    with path.open("ab") as file:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
