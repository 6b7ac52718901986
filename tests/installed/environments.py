"""Installs econmt in many environments, from nothing, and runs ``tests/installed/smoke.py`` in each.

They differ in Python, in the versions of dependencies (the lowest that pyproject.toml allows, those of constraints.txt,
the newest), in how econmt is installed (wheel, editable), and in what is there (no C compiler; econmt_ops alone).
PyTorch is that of constraints.txt except in "lowest", which fetches some gigabytes. What is installed is the last
commit, for "editable" the folder as it is. Each environment is made in a folder that is deleted afterwards. Exit code 1
if any of them fails.

Examples:
    python tests/installed/environments.py
    python tests/installed/environments.py --only editable no-compiler
    python tests/installed/environments.py --python ~/.pyenv/versions/3.12.1/bin/python
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import requires
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "serve,parquet,language,hub"
SOME_EXTRAS = {
    "lowest": "serve,parquet,hub",  # no version of py3langid without a pickled model allows numpy 1
    "no-compiler": "serve",  # what the other extras bring must not be missed
}
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
CHOICES = ("lowest", "tested", "newest", "editable", "no-compiler", "ops")
TORCH, TRITON = re.compile(r"^torch==.*", re.MULTILINE), re.compile(r"^triton==.*\n", re.MULTILINE)


class Environment(NamedTuple):
    """Environment to install econmt in.

    Attributes:
        name: one of :data:`CHOICES`.
        python: path of the interpreter.
        constraints: lines for pip that pin versions.
        editable: True if econmt is installed from this folder with ``--editable``, not as a wheel.
        compiler: True if there is a C compiler.
        ops: True if only ``econmt-ops``, the distribution of the operations, and what it needs are installed.
    """

    name: str
    python: str
    constraints: str
    editable: bool = False
    compiler: bool = True
    ops: bool = False


def lower_bounds() -> str:
    """Returns lines that pin every dependency, with those of :data:`EXTRAS`, to the lowest version allowed."""
    requirements = [each.partition(";") for each in requires("econmt") or ()]
    needed = [
        what for what, _, marker in requirements if not marker or marker.split('"')[1] in EXTRAS.split(",")
    ]
    return "".join(f"{what.strip().replace('>=', '==')}\n" for what in needed)


def environments(pythons: Sequence[str], names: Sequence[str]) -> list[Environment]:
    """Returns the environments of these names; ``pythons`` are interpreters, the oldest version first."""
    tested = TRITON.sub("", (ROOT / "constraints.txt").read_text(encoding="utf-8"))  # torch's own, if any
    torch = "".join(TORCH.findall(tested)) + "\n"
    known = [
        Environment("lowest", pythons[0], lower_bounds()),
        *(Environment("tested", python, tested) for python in pythons),
        Environment("newest", pythons[-1], torch),
        Environment("editable", sys.executable, tested, editable=True),
        Environment("no-compiler", sys.executable, tested, compiler=False),
        Environment("ops", sys.executable, tested, ops=True),
    ]
    return [each for each in known if each.name in names]


def found_pythons() -> list[str]:
    """Returns the interpreters of supported versions on the path that run; a stub of pyenv may not."""
    paths = [path for version in PYTHONS if (path := shutil.which(f"python{version}")) is not None]
    return [path for path in paths if version_of(path)] or [sys.executable]


def version_of(python: str) -> tuple[int, ...]:
    """Returns the version of an interpreter; empty if it does not run."""
    code = "import sys; print(*sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else ()


def run(words: Sequence[object], env: Mapping[str, str], cwd: Path) -> None:
    """Runs a command and prints its output if it fails; raises CalledProcessError then."""
    done = subprocess.run(
        [str(word) for word in words], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if "WARNING" not in line]
        print("\n".join(said[-40:]), flush=True)
        done.check_returncode()


def try_one(which: Environment, folder: Path) -> None:
    """Makes the environment in a folder and runs the suite; raises CalledProcessError if something fails."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "CC")}
    env |= {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | ({} if which.compiler else {"CC": "/nonexistent/cc"})
    # Editable: installed from the checkout itself; else from a copy, so that building leaves nothing behind.
    source = ROOT
    if not which.editable:
        source = folder / "source"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(source)], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(which.constraints, encoding="utf-8")
    run([which.python, "-m", "venv", folder / "venv"], env, folder)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints]
    if which.ops:
        run([*pip, source / "ops"], env, folder)
    else:
        extras = SOME_EXTRAS.get(which.name, EXTRAS)
        run([*pip, *(["--editable"] if which.editable else []), f"{source}[{extras}]"], env, folder)
    suite = [str(python), str(Path(__file__).with_name("smoke.py")), *(["--ops"] if which.ops else [])]
    library = ["--library", "yes" if which.compiler else "no"]
    env.pop("CC", None)
    subprocess.run([*suite, *library], env=env, cwd=folder, check=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=CHOICES, default=CHOICES, help="environments to try; default: all")
    text = "interpreter; may be repeated; default: python3.10 to python3.13 on the path"
    add("--python", action="append", help=text)
    given = parser.parse_args(arguments)
    pythons = sorted(given.python or found_pythons(), key=version_of)
    failed = []
    for which in environments(pythons, given.only):
        title = f"{which.name}, Python {'.'.join(map(str, version_of(which.python)))}"
        print(title, flush=True)
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="econmt-environment-") as folder:
            try:
                try_one(which, Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"  failed: {error}", flush=True)
                failed.append(title)
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    print(f"failed: {'; '.join(failed)}" if failed else "all environments passed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
