"""Measurements of this machine, kept for a day.

What is near enough to be measured differently a minute later would else be chosen differently, and two runs of the same
recipe on the same day would differ by rounding.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from econmt.data.files import cache_folder, write_atomically
from econmt.errors import InputError
from econmt_ops.dispatch.measurements import machine

Times = dict[str, float]
"""Seconds by name."""


def remembered_file() -> Path:
    """Returns the path of the file, which can be removed at any time."""
    return cache_folder() / "measured.json"


def remembered(what: str, measure: Callable[[], Mapping[str, float]]) -> Times:
    """Returns today's measurement on this machine with these versions, or measures and keeps it.

    Args:
        what: is measured; with the machine and the versions it tells the entries apart.
        measure: gives seconds by name.
    """
    today = dt.date.today().isoformat()
    key = f"{what}, {machine(torch.device('cpu'))}"
    known = _read(today)
    if key not in known:
        known[key] = dict(measure())
        text = json.dumps({"date": today, "measured": known}, indent=1) + "\n"
        with contextlib.suppress(InputError):  # where nothing can be kept, each command measures
            write_atomically(remembered_file(), text.encode())
    return known[key]


def _read(today: str) -> dict[str, Times]:
    """The entries of today; none if the file is missing, broken or of another day."""
    try:
        found = json.loads(remembered_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if (
        not isinstance(found, dict)
        or found.get("date") != today
        or not isinstance(found.get("measured"), dict)
    ):
        return {}
    return {key: times for key, times in found["measured"].items() if _are_times(times)}


def _are_times(value: object) -> bool:
    return (
        isinstance(value, dict)
        and bool(value)
        and all(isinstance(name, str) and type(time) is float and time > 0.0 for name, time in value.items())
    )
