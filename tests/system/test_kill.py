from __future__ import annotations

import pytest

from scripts import kill_ranks
from scripts.kill_test import main


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "3", "--updates", "30", "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "3 kills" in said
    assert "nothing was lost" in said


@pytest.mark.thorough
def test_a_run_whose_ranks_are_killed_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert kill_ranks.main(["--kills", "2", "--updates", "18", "--seed", "5"]) == 0
    assert "nothing was lost" in capsys.readouterr().out
