"""Runs functions on several processes that talk by gloo, started once for many of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import distributed, multiprocessing

Check = Callable[[], None]
"""Runs on every rank; what it raises is a failure."""


def _process(rank: int, size: int, folder: str, checks: Mapping[str, Check]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    for name, check in checks.items():
        file = Path(folder) / f"{name}.{rank}"
        try:
            check()
            file.write_text("")
        except BaseException:
            file.write_text(traceback.format_exc())
            raise
    distributed.destroy_process_group()


def failures(size: int, folder: Path, checks: Mapping[str, Check]) -> dict[str, str]:
    """What went wrong, by check; "" is nothing. After the first failure of a rank the others cannot go on.

    Args:
        size: of the group.
        folder: an empty one.
        checks: by name, functions of a module, in order.
    """
    arguments = (size, str(folder), checks)
    processes = multiprocessing.start_processes(
        _process, arguments, nprocs=size, join=False, start_method="spawn"
    )
    assert processes is not None
    try:
        while not processes.join():
            pass
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException):
        pass
    found = {}
    for name in checks:
        files = [folder / f"{name}.{rank}" for rank in range(size)]
        told = [file.read_text() if file.exists() else "it was not run to its end" for file in files]
        found[name] = "\n".join(filter(None, told))
    return found
