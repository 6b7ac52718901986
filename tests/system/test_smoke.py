"""Runs that are killed, and the suite that ``make environments`` runs in every environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from econmt_ops.backends import c
from scripts.kill_campaign import main
from tests.conftest import ROOT, run_python

SUITE = ROOT / "tests" / "installed" / "smoke.py"


@pytest.mark.thorough
@pytest.mark.skipif(not (Path(sys.executable).parent / "econmt").exists(), reason="econmt is not installed")
def test_the_suite_passes_here() -> None:
    done = run_python(SUITE, "--library", "yes" if c.is_built() else "no", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [line.split(":")[0].strip() for line in done.stdout.splitlines()]
    assert steps == ["train", "translate", "judge", "export", "serve", "extras"]


@pytest.mark.slow
def test_a_failing_step_ends_it(tmp_path: Path) -> None:
    # econmt is there, so econmt_ops is not alone.
    done = run_python(SUITE, "--ops", cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "ops: failed" in done.stdout
    assert "AssertionError" in done.stdout


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kinds", "translation, one process", "--kills", "2", "--updates", "8", "--seed", "5"]) == 0
    assert "2 kills: nothing was lost" in capsys.readouterr().out


@pytest.mark.thorough
def test_runs_of_every_kind_that_are_killed_lose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "5", "--updates", "12", "--seed", "5"]) == 0
    assert "5 kills: nothing was lost" in capsys.readouterr().out


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--kinds", "made-up"])
    assert "--kinds: give beginnings of translation, one process" in capsys.readouterr().err
