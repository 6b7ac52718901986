"""Pipelines of two and three processes compute what one process does; all checks of a size share one group."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.parallel.pipeline_checks import CHECKS
from tests.unit.parallel.several import failures


@pytest.fixture(scope="module", params=[2, 3])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What went wrong on so many processes, by check."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    return failures(request.param, folder, CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_pipeline_computes_what_one_process_does(name: str, found: dict[str, str]) -> None:
    assert not found[name]
