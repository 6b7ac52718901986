"""Counts the live bytes of a program by the memory events of PyTorch's profiler alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch


def counted_peak(make: Callable[[], Callable[[], object]]) -> int:
    """Returns the most live bytes during a step, of all that was allocated since before the model was made.

    Args:
        make: Makes the model and returns its step, which runs twice to warm up, and once to be counted.
    """
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as profile:
        step = make()
        step()
        step()
        gc.collect()
        with torch.profiler.record_function("counted step"):
            step()
    begin = end = 0
    events: list[tuple[int, int, int]] = []
    waiting: list[Any] = list(profile.profiler.kineto_results.experimental_event_tree())  # type: ignore[union-attr]
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "counted step":
            begin, end = event.start_time_ns, event.end_time_ns
        if event.tag.name == "Allocation":
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    live: dict[int, int] = {}
    total = peak = 0
    for time, address, size in sorted(events):
        if size < 0 and address not in live:
            continue  # made before, by another test
        total += size
        if size > 0:
            live[address] = size
        else:
            del live[address]
        if begin <= time <= end:
            peak = max(peak, total)
        elif time < begin:
            peak = total
    return peak
