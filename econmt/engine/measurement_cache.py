"""Measurements of this machine that are valid for one day, in the file of :mod:`econmt_ops.dispatch.measurements`.

Without it, two close alternatives could be chosen differently a minute later, and two runs of one recipe on the same
day would differ by rounding.
"""

from __future__ import annotations

import datetime as dt
import warnings
from collections.abc import Callable, Mapping

import torch

from econmt_ops.dispatch.measurements import MeasurementRecord, Store, machine


def measured_today(what: str, measure: Callable[[], Mapping[str, float]]) -> dict[str, float]:
    """Returns today's measurement for this machine and these versions; measures and stores it if there is none.

    ``what`` describes it and is its key together with the date; ``measure`` returns seconds by name.
    """
    store, where = Store(), machine(torch.device("cpu"))
    key = f"{what}, {dt.date.today().isoformat()}"
    records = store.load(where).get(key)
    if not records:
        records = {
            name: MeasurementRecord(1e3 * seconds, 1.0, 1.0, 0, 0.0) for name, seconds in measure().items()
        }
        with warnings.catch_warnings():  # without a writable cache folder, each command measures anew
            warnings.simplefilter("ignore", RuntimeWarning)
            store.add(where, {key: records}, replacing=f"{what}, ")
    return {name: record.milliseconds / 1e3 for name, record in records.items()}
