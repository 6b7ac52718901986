"""Reads a process's rank from the environment that torchrun or ``econmt train --processes N`` sets."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import torch

from econmt.config import limits
from econmt.engine.outside_memory import outside_meter
from econmt.errors import InputError

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""Environment variable with the number of restarts."""


class RankEnvironment(NamedTuple):
    """Rank of a process in parallel training, from its environment: among all processes, and those on this host."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int


def rank_environment() -> RankEnvironment | None:
    """Returns this process's rank; None if it was started alone.

    Raises:
        InputError: Some environment variables are missing or invalid.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    numbers = []
    for name, default in (
        ("RANK", None),
        ("WORLD_SIZE", None),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        (RESTARTS, "0"),
    ):
        value = os.environ.get(name, default)
        assert value is not None
        number = limits.natural(value)
        if number is None:
            raise InputError(f"environment variable {name} is '{value[:40]}', not a number; torchrun sets it")
        numbers.append(number)
    ranks = RankEnvironment(*numbers)
    if ranks.rank >= ranks.size or ranks.local_rank >= ranks.local_size:
        raise InputError(
            f"environment variables RANK {ranks.rank} and LOCAL_RANK {ranks.local_rank} must be less than WORLD_SIZE "
            f"{ranks.size} and LOCAL_WORLD_SIZE {ranks.local_size}; torchrun sets them"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"environment variable {missing[0]} is missing; torchrun sets it")
    return ranks


def take_own_gpu(name: str, environment: RankEnvironment) -> None:
    """Selects this process's GPU, by its rank on this host, as the device "cuda".

    Raises:
        InputError: The recipe names one GPU for several processes, or there are fewer GPUs than processes.
    """
    if name == "cpu" or not torch.cuda.is_available():
        return
    if name not in ("auto", "cuda") and environment.local_size > 1:
        raise InputError(
            f"training.device {name}: {environment.local_size} processes need one GPU each; use cuda or auto"
        )
    count: int = torch.cuda.device_count()
    if count < environment.local_size:
        raise InputError(
            f"{environment.local_size} processes on {socket.gethostname()}, which has {count} GPUs; start one per "
            "GPU, or set training.device=cpu"
        )
    if name in ("auto", "cuda"):
        # The meter begins before anything else uses the GPU.
        outside_meter(torch.device("cuda", environment.local_rank))
        torch.cuda.set_device(environment.local_rank)
