"""Finds the processes of one run by a mark in their environment, for tests and the kill campaign."""

from __future__ import annotations

import os
import time
from pathlib import Path

MARK = "KILL_CAMPAIGN_RUN"
"""Environment variable that all processes of a run inherit."""


def processes_of_run(mark: str) -> dict[int, int | None]:
    """Finds the living processes of a run by the value ``mark`` of :data:`MARK` in their environment.

    Returns:
        The rank of each process by its id; None for a process without a rank (a launcher, or a single process).
    """
    rank_by_process: dict[int, int | None] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended, or belongs to someone else
            continue
        if f"{MARK}={mark}".encode() in words and state not in "ZX":
            ranks = [int(word[5:]) for word in words if word.startswith(b"RANK=")]
            rank_by_process[int(folder.name)] = ranks[0] if ranks else None
    return rank_by_process


def ranks_of_run(mark: str) -> dict[int, int]:
    """Finds the living ranks of a run; their process ids by rank."""
    return {rank: process for process, rank in processes_of_run(mark).items() if rank is not None}


def seconds_until_all_ended(mark: str, limit: float) -> float:
    """Waits until no process of a run lives; returns the seconds that it took, or infinity after ``limit`` seconds."""
    began = time.monotonic()
    while processes_of_run(mark):
        if time.monotonic() - began > limit:
            return float("inf")
        time.sleep(0.02)
    return time.monotonic() - began


def connections_to(port: int) -> int:
    """Counts the connections of this host to one of its ports."""
    lines = Path("/proc/net/tcp").read_text().splitlines() + Path("/proc/net/tcp6").read_text().splitlines()
    fields = [line.split() for line in lines]
    return sum(each[2].endswith(f":{port:04X}") and each[3] == "01" for each in fields)


def port_of(process: int) -> int:
    """Reads the port where a rank meets the others, from its environment."""
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return int(next(word for word in words if word.startswith(b"MASTER_PORT=")).partition(b"=")[2])


def imports_torch(process: int) -> bool:
    """Returns True if a process has begun to load torch's libraries, or has loaded them."""
    try:
        return "libtorch" in Path(f"/proc/{process}/maps").read_text()
    except OSError:  # it has ended
        return False


def environment_with_mark(mark: str) -> dict[str, str]:
    """Makes the environment of a run that :func:`processes_of_run` finds."""
    return {**os.environ, MARK: mark}
