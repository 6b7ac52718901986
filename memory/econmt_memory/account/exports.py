"""Files of a memory account for other programs: memory_viz snapshots, and traces for Perfetto and Chrome."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from econmt_memory.measure.ledger import CATEGORIES, kind_of
from econmt_memory.measure.storages import MemoryRecord, Storage


def over_time(
    tracker: MemoryRecord, above: Callable[[str], str]
) -> list[tuple[float, str, dict[tuple[str, str], int]]]:
    """Returns the bytes by (category, module) at the start and after each change, with milliseconds and phase."""
    live: Counter[tuple[str, str]] = Counter()
    moments = []
    for seconds, storage, size, phase in _changes(tracker):
        category, name = kind_of(storage)
        live[category, above(name)] += size
        moments.append((1000.0 * seconds, phase, dict(+live)))
    return moments


def _changes(tracker: MemoryRecord) -> Iterator[tuple[float, Storage, int, str]]:
    """Yields time, storage, size and phase of each change, storages that were there before first."""
    phases = {begin.changes: begin.phase for begin in tracker.begins}
    phase = phases.get(0, "forward")
    for storage, size in tracker.start().items():
        yield 0.0, storage, size, phase
    for number, change in enumerate(tracker.changes):
        phase = phases.get(number, phase)
        yield change.seconds, change.storage, change.size, phase


def trace(tracker: MemoryRecord) -> dict[str, Any]:
    """Returns a trace in Chrome's JSON format: operators by module and phase, and live bytes by category."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "training step"}},
        *(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}
            for number, name in enumerate(("phases", "modules", "operators"))
        ),
    ]
    ends = [*(begin.seconds for begin in tracker.begins[1:]), tracker.seconds]
    for begin, end in zip(tracker.begins, ends, strict=True):
        events.append(_slice(begin.phase, 0, begin.seconds, end))
    for layer, group in groupby(tracker.works, key=attrgetter("layer")):
        works = list(group)
        events.append(_slice(layer, 1, works[0].begin, works[-1].end))
        for work in works:
            args = {"module": layer, "flops": work.flops}
            events.append(_slice(work.operator, 2, work.begin, work.end, args))
    live = dict.fromkeys(CATEGORIES, 0)
    for seconds, storage, size, _ in _changes(tracker):
        live[kind_of(storage)[0]] += size
        events.append({"ph": "C", "name": "live bytes", "pid": 0, "ts": 1e6 * seconds, "args": {**live}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(
    name: str, thread: int, begin: float, end: float, args: dict[str, Any] | None = None
) -> dict[str, Any]:
    times = {"ts": 1e6 * begin, "dur": 1e6 * (end - begin)}
    return {"ph": "X", "name": name, "pid": 0, "tid": thread, **times, "args": args or {}}


def write_snapshot(tracker: MemoryRecord, path: Path) -> None:
    """Writes what ``torch.cuda.memory._dump_snapshot`` does, of a CPU's memory too.

    The frames of an allocation are its category and module, its operator, and the program's line.
    """
    addresses: dict[Storage, int] = {}
    live: dict[Storage, int] = {}
    events: list[dict[str, Any]] = []
    after = 1 << 20  # fake tensors and freed memory get addresses of their own, which do not overlap
    for seconds, storage, size, _ in _changes(tracker):
        entry = {"stream": 0, "time_us": int(1e6 * seconds), "frames": _frames(storage)}
        if storage in live:
            freed = live.pop(storage)
            freed_entry = {**entry, "addr": addresses[storage], "size": freed}
            events += [{"action": action, **freed_entry} for action in ("free_requested", "free_completed")]
            size += freed
        if size > 0:
            addresses[storage], after = after, after + size
            live[storage] = size
            events.append({"action": "alloc", "addr": addresses[storage], "size": size, **entry})
    segments = [_segment(addresses[storage], size, _frames(storage)) for storage, size in live.items()]
    path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [events]}, protocol=4))


def _frames(storage: Storage) -> list[dict[str, Any]]:
    category, name = kind_of(storage)
    frames = [{"filename": category, "line": 0, "name": name}]
    if storage.operator:
        frames.append({"filename": "operator", "line": 0, "name": storage.operator})
    if storage.line is not None:
        file, number, function = storage.line
        frames.append({"filename": file, "line": number, "name": function})
    return frames


def _segment(address: int, size: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a segment that holds one storage."""
    block = {"address": address, "size": size, "requested_size": size, "state": "active_allocated"}
    sizes = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), size)
    kind = {"segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False}
    blocks = [{**block, "frames": frames}]
    return {"address": address, **sizes, **kind, "device": 0, "stream": 0, "frames": [], "blocks": blocks}
