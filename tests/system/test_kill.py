from __future__ import annotations

import pytest

from scripts import kill_campaign
from scripts.kill_test import main


@pytest.mark.slow
def test_a_run_that_is_killed_at_random_moments_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--kills", "3", "--updates", "30", "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "3 kills" in said
    assert "nothing was lost" in said


@pytest.mark.thorough
def test_runs_of_every_kind_that_are_killed_lose_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert kill_campaign.main(["--kills", "5", "--updates", "12", "--seed", "5"]) == 0
    assert "5 kills: nothing was lost" in capsys.readouterr().out
