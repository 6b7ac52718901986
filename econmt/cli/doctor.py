"""``econmt doctor``: says what this machine has for econmt, what is missing, and what that costs.

The modules that it examines are imported in the checks, since any of them may be missing or broken.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import typer

import econmt
from econmt.config.json_reader import json_text
from econmt.errors import EconmtError, printable
from econmt.options.option_groups import option
from econmt_memory.report.tables import WIDTH

REQUIRED = {
    "numpy": "numpy",
    "safetensors": "safetensors",
    "sentencepiece": "sentencepiece",
    "sacrebleu": "sacrebleu",
    "matplotlib": "matplotlib",
    "tensorboard": "tensorboard",
    "num2words": "num2words",
    "google.protobuf": "protobuf",
}
"""Packages by the modules that econmt imports only when it trains or translates."""
EXTRAS = {
    "serve": (("starlette", "uvicorn", "prometheus_client"), "econmt serve"),
    "parquet": (("pyarrow",), "text in Parquet tables"),
    "language": (("py3langid",), "data.filters by language"),
    "hub": (("huggingface_hub",), "models of the Hugging Face Hub"),
    "distill": (("transformers", "ctranslate2"), "econmt distill with teachers of other toolkits"),
}
"""Modules of each extra, and the feature that needs them."""
DRIVER = Path("/proc/driver/nvidia/version")
"""File in which NVIDIA's driver for Linux tells its version."""
BROKEN = (ImportError, OSError, RuntimeError, AttributeError, NameError)
"""Errors with which the import of a package ends that is damaged or does not fit the others."""
LEAST_TORCH = (2, 7)
"""Oldest version of PyTorch that econmt works with."""
LEAST_DISK = 2e9
"""Free bytes below which a run may fill the disk: a checkpoint has parameters and optimizer state several times."""


_BY_PYTORCH = "PyTorch's operations, with the same results and more slowly"
_INSTALL_TORCH = f"install PyTorch {'.'.join(map(str, LEAST_TORCH))} or newer, see pytorch.org"


class Diagnosis(NamedTuple):
    """Result of a check.

    Attributes:
        cost: what is lost with what is missing, and the remedy; empty if nothing is missing.
        fatal: True if econmt cannot train or translate.
    """

    name: str
    text: str
    cost: str = ""
    fatal: bool = False

    @property
    def state(self) -> str:
        """State in one word: ok, note or error."""
        return "error" if self.fatal else "note" if self.cost else "ok"


def doctor(as_json: bool = option(False, "--json", help="Print a JSON object.")) -> None:
    """Say what this machine has for econmt, what is missing, what that costs, and how to get it.

    The exit code is 1 only if econmt can neither train nor translate here.

    \b
    Example:
      econmt doctor
      econmt doctor --json
    """
    findings = list(examine())
    if as_json:
        print(json_text({each.name: {"state": each.state, **each._asdict()} for each in findings}, indent=2))
    else:
        for finding in findings:
            print("\n".join(_lines(finding)))
        notes = sum(finding.state == "note" for finding in findings)
        fatal = any(finding.fatal for finding in findings)
        print("econmt cannot run here" if fatal else f"econmt runs here; notes: {notes}")
    if any(finding.fatal for finding in findings):
        raise typer.Exit(EconmtError.exit_code)


def _lines(finding: Diagnosis) -> list[str]:
    margin = " " * 18
    head = f"{finding.state:<6}{finding.name:<12}"
    texts = [(head, finding.text), *([(margin, finding.cost)] if finding.cost else [])]
    return [
        line
        for start, text in texts
        for line in wrap(printable(text), WIDTH, initial_indent=start, subsequent_indent=margin)
    ]


def examine() -> Iterator[Diagnosis]:
    """Yields the findings of all checks; checks of what needs torch only if torch can be loaded."""
    yield Diagnosis("versions", f"econmt {econmt.__version__}, Python {platform.python_version()}")
    yield _packages()
    torch, finding = _torch()
    yield finding
    if torch is not None:
        for check in (_gpu, _driver, _library, _triton, _threads):
            yield check(torch)
    yield _compiler()
    yield from _extras()
    yield _cache()
    yield _disk()


def _missing(modules: tuple[str, ...] | dict[str, str]) -> list[str]:
    # A module of a package that is missing itself cannot be looked up.
    roots = {name: name.partition(".")[0] for name in modules}
    return [name for name, root in roots.items() if not all(map(importlib.util.find_spec, (root, name)))]


def _packages() -> Diagnosis:
    missing = ", ".join(REQUIRED[name] for name in _missing(REQUIRED))
    if not missing:
        return Diagnosis("packages", "all that econmt needs")
    return Diagnosis(
        "packages", f"missing: {missing}", f"install them: pip install {missing.replace(',', '')}", fatal=True
    )


def _torch() -> tuple[Any, Diagnosis]:
    """Returns torch, None if it cannot be loaded, and a finding about it."""
    try:
        torch = importlib.import_module("torch")
    except BROKEN as error:
        text = f"cannot be loaded: {error}"
        return None, Diagnosis("torch", text, _INSTALL_TORCH, fatal=True)
    if tuple(map(int, torch.__version__.split(".")[:2])) < LEAST_TORCH:
        return None, Diagnosis("torch", f"{torch.__version__}, too old", _INSTALL_TORCH, fatal=True)
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    build = next(
        (f"built for {name} {version}" for name, version in builds.items() if version), "built without CUDA"
    )
    return torch, Diagnosis("torch", f"{torch.__version__}, {build}")


def _gpu(torch: Any) -> Diagnosis:
    names = []
    if _sees_gpu(torch)[0]:
        for number in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(number)
            names.append(f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
    if names:
        cost = f"AMD's GPUs run {_BY_PYTORCH}; nothing is tested with ROCm" if torch.version.hip else ""
        return Diagnosis("GPU", "; ".join(names), cost)
    for name, module, maker in (("mps", torch.backends.mps, "Apple"), ("xpu", torch.xpu, "Intel")):
        if module.is_available():
            cost = f"econmt does not use {maker}'s GPUs; training and translating run on the CPU"
            return Diagnosis("GPU", f"{maker}'s, which torch calls {name}", cost)
    cost = "training and translating run on the CPU; one H200 trains about 200 times as fast as two cores"
    return Diagnosis("GPU", "none that torch can use", cost)


def _sees_gpu(torch: Any) -> tuple[bool, str]:
    """Returns True if torch can use a GPU, and the warning with which it says why not."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sees = bool(torch.cuda.is_available())
    return sees, " ".join(str(caught[0].message).split()) if caught else ""


def _driver(torch: Any) -> Diagnosis:
    """Compares NVIDIA's driver with the CUDA of torch."""
    try:
        text = (
            DRIVER.read_text(encoding="utf-8", errors="replace")
            .splitlines()[0]
            .removeprefix("NVRM version: ")
        )
    except (OSError, IndexError):
        text = "nvidia-smi is there" if shutil.which("nvidia-smi") else ""
    sees, why = _sees_gpu(torch)
    text = " ".join(text.split())
    if torch.version.hip:
        return Diagnosis("driver", "that of ROCm")
    if sees:
        return Diagnosis("driver", text or "works")
    if not text:
        return Diagnosis("driver", "no driver of NVIDIA")
    if torch.version.cuda is None:
        return Diagnosis(
            "driver", text, "its GPU is not used: this torch is built without CUDA; install a build with CUDA"
        )
    return Diagnosis(
        "driver", text, why or f"torch sees no GPU; the driver may be older than CUDA {torch.version.cuda}"
    )


def _library(_: Any) -> Diagnosis:
    """Tests whether the C library of the CPU's kernels can be loaded."""
    from econmt.engine.threads import missing_library

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # says the same as the finding
        cost = missing_library()
    return Diagnosis("C library", "built" if cost is None else "missing", cost or "")


def _triton(torch: Any) -> Diagnosis:
    if torch.version.hip:
        return Diagnosis("Triton", "not used on AMD's GPUs")
    if importlib.util.find_spec("triton") is None:
        cost = "on the GPU econmt runs PyTorch's kernels only, several times as slowly; pip install triton"
        sees = _sees_gpu(torch)[0]
        return Diagnosis(
            "Triton", "missing" if sees else "missing, needed on a GPU only", cost if sees else ""
        )
    try:
        triton = importlib.import_module("triton")
    except BROKEN as error:
        return Diagnosis(
            "Triton", f"cannot be loaded: {error}", "reinstall it in the version that torch needs"
        )
    from econmt_ops.backends import triton as kernels

    why = kernels.why_unused() if _sees_gpu(torch)[0] else ""
    cost = f"econmt's GPU kernels are not used: {why}; the GPU runs {_BY_PYTORCH}" if why else ""
    return Diagnosis("Triton", str(getattr(triton, "__version__", "unknown version")), cost)


def _threads(torch: Any) -> Diagnosis:
    from econmt.engine.threads import crowded, usable_cores

    count, setting = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    told = f", OMP_NUM_THREADS={setting}" if setting else ""
    return Diagnosis("threads", f"{count} on {usable_cores()} cores{told}", crowded(count) or "")


def _compiler() -> Diagnosis:
    names = [name for name in (os.environ.get("CC", ""), "gcc", "clang", "cc") if name and shutil.which(name)]
    cost = "needed to build the C library when econmt is installed, and for ops of kind compiled; install gcc"
    return Diagnosis("compiler", names[0] if names else "none", "" if names else cost)


def _extras() -> Iterator[Diagnosis]:
    lacking = {name: feature for name, (modules, feature) in EXTRAS.items() if _missing(modules)}
    present = [name for name in EXTRAS if name not in lacking]
    yield Diagnosis("extras", f"installed: {', '.join(present) or 'none'}")
    for name, feature in lacking.items():
        yield Diagnosis(
            f"[{name}]", "not installed", f"not available: {feature}; pip install 'econmt[{name}]'"
        )


def _cache() -> Diagnosis:
    try:
        from econmt.data.files import cache_folder

        folder = cache_folder()
    except BROKEN as error:  # it is in econmt_ops, which needs torch
        return Diagnosis("cache", f"unknown: {error}", "comes back with torch")
    problem = _why_not_writable(folder)
    if problem is None:
        return Diagnosis("cache", str(folder))
    cost = "every command measures anew what is fastest, and data sets cannot be downloaded; set ECONMT_CACHE"
    return Diagnosis("cache", f"{folder}: {problem}", cost)


def _why_not_writable(folder: Path) -> str | None:
    """Returns the reason why no file can be made in a folder, or in the nearest one that exists; None if one can."""
    nearest = next((each for each in (folder, *folder.parents) if each.exists()), folder)
    try:
        with tempfile.NamedTemporaryFile(dir=nearest, prefix=".econmt-doctor-"):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _disk() -> Diagnosis:
    """Tests whether a run could be written in the current folder."""
    try:
        folder = Path.cwd()
    except OSError as error:
        cost = "the folder of this shell was removed; change into another one"
        return Diagnosis("disk", f"current folder: {error.strerror}", cost)
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Diagnosis("disk", f"{folder}: {error.strerror}", "the free space is unknown")
    problem = _why_not_writable(folder)
    text = f"{free / 1e9:,.1f} GB free in {folder}"
    if problem is not None:
        return Diagnosis(
            "disk", f"{text}: {problem}", "a model cannot be trained into this folder; set output"
        )
    cost = "a run may fill it; free some space" if free < LEAST_DISK else ""
    return Diagnosis("disk", text, cost)
