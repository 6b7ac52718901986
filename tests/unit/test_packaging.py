"""What an installed econmt holds: both packages and the recipes, and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from econmt import __version__
from tests.conftest import ROOT, econmt_environment


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("sources")
    for name in ("econmt", "ops", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", build, str(folder / "dist")], cwd=folder, check=True, capture_output=True
    )
    (built,) = (folder / "dist").glob("*.whl")
    return built


def test_holds_every_module_and_recipe_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {file.relative_to(ROOT) for file in (ROOT / "econmt").rglob("*.py")}
    modules |= {file.relative_to(ROOT / "ops") for file in (ROOT / "ops").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == {path.as_posix() for path in modules}
    recipes = {f"econmt/_recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")}
    assert len(recipes) >= 6
    assert recipes <= names
    assert {"econmt/py.typed", "econmt_ops/py.typed"} <= names
    assert {name for name in names if name.endswith(".html")} == {"econmt/memory/page.html"}
    assert {Path(name).suffix for name in names} <= {".py", ".yaml", ".md", ".typed", ".html"}


def test_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    installed = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    environment = econmt_environment({"PYTHONPATH": str(installed)})
    done = subprocess.run(
        [sys.executable, "-m", "econmt", "recipes", "copy", "iwslt"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "iwslt.yaml\n", "")
    assert (tmp_path / "iwslt.yaml").read_bytes() == (ROOT / "recipes" / "iwslt.yaml").read_bytes()


def test_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        scripts = archive.read(name.replace("METADATA", "entry_points.txt")).decode()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Dist: torch>=2.4\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "econmt = econmt.cli.main:main" in scripts
