from __future__ import annotations

import pytest

from scripts.kill_campaign import main


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
