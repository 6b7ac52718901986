"""The suite that ``make environments`` runs in every environment, in this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from econmt_ops.backends import c
from tests.conftest import PATIENCE, ROOT

SUITE = ROOT / "tests" / "installed" / "smoke.py"


@pytest.mark.thorough
@pytest.mark.skipif(not (Path(sys.executable).parent / "econmt").exists(), reason="econmt is not installed")
def test_the_suite_passes_here() -> None:
    words = [sys.executable, str(SUITE), "--library", "yes" if c.is_built() else "no"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.split(":")[0].strip() for line in done.stdout.splitlines()]
    assert steps == ["train", "translate", "judge", "export", "serve", "extras"]


@pytest.mark.slow
def test_a_failing_step_ends_it(tmp_path: Path) -> None:
    words = [sys.executable, str(SUITE), "--ops"]  # econmt is there, so econmt_ops is not alone
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 1
    assert "ops: failed" in done.stdout
    assert "AssertionError" in done.stdout
