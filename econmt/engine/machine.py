"""Description of the machine, and its free memory."""

from __future__ import annotations

import platform

import numpy as np
import torch

import econmt
from econmt_memory.measure.ram import free_ram, total_ram
from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.dispatch.measurements import processor


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
