"""Rank and size of a process from the environment of torchrun or ``econmt train --processes N``."""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

import torch

from econmt.errors import InputError

RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""The variable that counts how often the processes were started again."""


class RankEnvironment(NamedTuple):
    """Rank of this process, as its environment says.

    Attributes:
        rank, size: of all. local_rank, local_size: of those on this host.
        restarts: how often they were started again.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    restarts: int


def rank_environment() -> RankEnvironment | None:
    """Reads the rank environment, or returns None if the process was started alone.

    Raises:
        InputError: the environment says it only in part, or nonsense.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    found = []
    for name, default in (
        ("RANK", None),
        ("WORLD_SIZE", None),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "1"),
        (RESTARTS, "0"),
    ):
        value = os.environ.get(name, default)
        assert value is not None
        if not value.isdecimal():
            raise InputError(
                f"environment variable {name} is '{value}', which is no number; torchrun sets it"
            )
        found.append(int(value))
    place = RankEnvironment(*found)
    if place.rank >= place.size or place.local_rank >= place.local_size:
        raise InputError(
            f"environment variables RANK {place.rank} and LOCAL_RANK {place.local_rank} must be less than WORLD_SIZE "
            f"{place.size} and LOCAL_WORLD_SIZE {place.local_size}; torchrun sets them"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise InputError(f"environment variable {missing[0]} is missing, where ranks meet; torchrun sets it")
    return place


def take_own_gpu(name: str, place: RankEnvironment) -> None:
    """Makes "cuda" mean the GPU of this process, the one with its number on this host.

    Args:
        name: of the recipe's device.
        place: who this process is.

    Raises:
        InputError: the recipe names one GPU for several processes, or there are fewer GPUs than processes.
    """
    if name == "cpu" or not torch.cuda.is_available():
        return
    if name not in ("auto", "cuda") and place.local_size > 1:
        raise InputError(
            f"training.device {name}: {place.local_size} processes need a GPU each; give cuda or auto"
        )
    count: int = torch.cuda.device_count()
    if count < place.local_size:
        raise InputError(
            f"{place.local_size} processes on {socket.gethostname()}, which has {count} GPUs; start as many as there "
            "are GPUs, or give training.device=cpu"
        )
    if name in ("auto", "cuda"):
        torch.cuda.set_device(place.local_rank)
