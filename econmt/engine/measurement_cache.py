"""Cache of measurements of this machine, valid for one day.

Without it, two close alternatives could be chosen differently a minute later, and two runs of one recipe on the same
day would differ by rounding.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field

from econmt.config.json_reader import Record, read_json
from econmt.data.files import cache_folder, write_atomically
from econmt.errors import InputError
from econmt_ops.dispatch.measurements import machine

Times = dict[str, float]
"""Seconds by name."""


class _MeasuredToday(Record):
    """Content of the cache file: a date, and measurements by their keys."""

    date: str
    measured: dict[
        str, Annotated[dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
    ]


def cache_file() -> Path:
    """Returns the path of the cache file, which may be deleted at any time."""
    return cache_folder() / "measured.json"


def measured_today(what: str, measure: Callable[[], Mapping[str, float]]) -> Times:
    """Returns today's measurement for this machine and these versions; measures and stores it if there is none.

    ``what`` describes it and is its key together with machine and versions; ``measure`` returns seconds by name.
    """
    today = dt.date.today().isoformat()
    key = f"{what}, {machine(torch.device('cpu'))}"
    known = _read(today)
    if key not in known:
        known[key] = dict(measure())
        text = json.dumps({"date": today, "measured": known}, indent=1) + "\n"
        with contextlib.suppress(InputError):  # without a writable cache folder, each command measures anew
            write_atomically(cache_file(), text.encode())
    return known[key]


def _read(today: str) -> dict[str, Times]:
    """Returns the entries of today; empty if the file is missing, broken or of another day."""
    try:
        cache = read_json(_MeasuredToday, cache_file(), "it may be deleted")
    except (OSError, InputError):
        return {}
    return cache.measured if cache.date == today else {}
