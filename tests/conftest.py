"""What tests of every part share."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck as Check
from hypothesis import settings

from tests import extras

ROOT = Path(__file__).resolve().parent.parent
SOURCES = os.pathsep.join(str(ROOT / folder) for folder in (".", "ops", "memory", "runtime"))
"""The checkout's packages, as PYTHONPATH names them."""

WORKSPACE = ":16:8"
"""As `econmt.engine.outside_memory`, which is not imported: tests of econmt_ops run without econmt."""

PATIENCE = 1800.0
"""Seconds after which a test fails that waits for something; none expects it sooner, since machines may be slow."""

# The same examples each time; neither deadlines nor the time that drawing them takes are tested.
settings.register_profile("econmt", derandomize=True, deadline=None, suppress_health_check=[Check.too_slow])
settings.load_profile("econmt")


def pytest_configure(config: pytest.Config) -> None:
    """Registers the hooks that pytest asks of a folder before it has read the folder's conftest.py."""
    config.pluginmanager.register(extras)
    gc.set_threshold(50_000, 20, 20)  # a sixth of the time went into looking for garbage that there was not
    # As in commands with a precision of 16 bits, which set it before CUDA is used.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", WORKSPACE)
    # A shell's background jobs ignore Ctrl-C, and so would the programs that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``sampled(n)`` n variants stay as they are, evenly spread; the others are ``thorough``.

    Leaves out tests marked ``cuda`` where there is no CUDA device.
    """
    variants: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("thorough"):
            variants.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for each in variants.values():
        marker = each[0].get_closest_marker("sampled")
        assert marker is not None
        kept = {round(number * len(each) / marker.args[0]) for number in range(marker.args[0])}
        for number, item in enumerate(each):
            if number not in kept:
                item.add_marker(pytest.mark.thorough)
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and not has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish() -> None:
    """Takes what collecting made out of garbage collection, which would look through it again and again."""
    gc.collect()
    gc.freeze()


def has_cuda() -> bool:
    """Whether this machine has a CUDA device that torch can use."""
    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _process() -> Iterator[None]:
    """Gives back what a test has changed in its process: Ctrl-C, which commands ignore when they leave, and threads.

    Random numbers are the same whatever ran before. Beside other workers, two threads wait for each other. On a GPU,
    products of float32 are in float32, not in TF32, as the tolerances expect.
    """
    threads, interrupt, on_gpu = torch.get_num_threads(), signal.getsignal(signal.SIGINT), has_cuda()
    if on_gpu:
        before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    yield
    signal.signal(signal.SIGINT, interrupt)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if on_gpu:
        torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_disks() -> Iterator[None]:
    """Files need not outlive a power failure, so that a small run does not spend its time waiting for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@functools.cache
def _structures() -> dict[str, Any]:
    """Structures of kernels.h, which take ten times as long to read as a library to load."""
    from econmt_ops.backends.c.library import structures

    return structures()


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Has the C library use the instructions of a level, or fewer where the machine has not got them."""
    from econmt_ops.backends import c
    from econmt_ops.backends.c.library import Library

    path, known = c.library_path(), _structures()
    assert path is not None
    monkeypatch.setattr(c.library, "structures", lambda: known)

    def use_level(level: int) -> None:
        library = Library(path, level)
        assert library.level <= level
        monkeypatch.setattr(c, "_library", lambda: library)

    yield use_level
    Library(path)  # what it may use is a state of the library


@pytest.fixture(params=[0, 1, 2], ids=["every-processor", "avx2", "avx512"])
def level(request: pytest.FixtureRequest, use: Callable[[int], None]) -> None:
    """Runs a test with the instructions of every level."""
    use(request.param)


def fails_with(error: BaseException) -> Callable[..., Any]:
    """A function that raises an error, whatever it is given."""

    def function(*_: object, **__: object) -> Any:
        raise error

    return function


PlayGPU = Callable[[str, int, int], None]
"""The type of the fixture ``play_gpu``."""


@pytest.fixture
def play_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayGPU]:
    """Lets torch tell of a GPU of a name and a compute capability, with 12 GiB and 40 multiprocessors."""
    from econmt_ops.dispatch import device_limits

    def play(name: str, major: int, minor: int) -> None:
        sizes = {"shared_memory_per_block_optin": 101_376, "total_memory": 12 << 30}
        properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=40, **sizes)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    device_limits._of_gpu.cache_clear()
    yield play
    device_limits._of_gpu.cache_clear()


def econmt_environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that runs econmt from this checkout, quickly and without colours.

    Output is held back as it is for users, whatever PYTHONUNBUFFERED says.
    """
    fixed = {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"}
    dropped = {key for key in os.environ if key.startswith("ECONMT_")} | {"PYTHONUNBUFFERED"}
    return {**{key: os.environ[key] for key in os.environ.keys() - dropped}, **fixed, **(env or {})}


def run_python(
    *arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path = ROOT, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, as `econmt_environment` has it; what it writes is kept."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=econmt_environment(env),
        cwd=cwd,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
        check=check,
    )
