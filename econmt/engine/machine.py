"""Description of the machine, its free memory, and measurements of it that are valid for one day.

Measurements are in the file of :mod:`econmt_ops.dispatch.measurements`. Without it, two close alternatives could be
chosen differently a minute later, and two runs of one recipe on the same day would differ by rounding.
"""

from __future__ import annotations

import datetime as dt
import platform
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch

import econmt
from econmt_memory.measure.ram import free_ram, total_ram
from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.dispatch.measurements import MeasurementRecord, Store, machine, processor


def describe_machine(device: str) -> dict[str, str]:
    """Returns the environment of a measurement: versions, processor, threads and, on "cuda" or "cuda:N", the GPU."""
    description = {
        "econmt": econmt.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "threads": str(torch.get_num_threads()),
    }
    if device.startswith("cuda") and torch.cuda.is_available():
        description["GPU"] = torch.cuda.get_device_name(device)
    return description


def total_memory(device: torch.device) -> int:
    """Returns the bytes of memory of a GPU or of the machine; 0 if the system does not tell."""
    if device.type == "cuda":
        return limits_of(device).memory
    return total_ram()


def free_memory(device: torch.device) -> int:
    """Returns the bytes that a process may still take: of the GPU, or of the machine without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_ram()


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
