"""Runs without pictures: drawing them takes as long as a tiny model trains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from econmt.decoding.attention_picture import draw_attention
from econmt.training import results
from econmt.training.results import draw_learning_curve


def _leave_empty(*arguments: object) -> str:
    """Writes an empty picture; returns the characters that no font has: none."""
    (path,) = (argument for argument in arguments if isinstance(argument, Path))
    path.parent.mkdir(exist_ok=True)
    path.touch()
    return ""


@pytest.fixture(scope="session", autouse=True)
def _no_pictures() -> Iterator[None]:
    """Runs leave their pictures empty, but for those of tests that ask for the fixture ``pictures``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "draw_learning_curve", _leave_empty)
        patch.setattr(results, "draw_attention", _leave_empty)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs draw their pictures."""
    monkeypatch.setattr(results, "draw_learning_curve", draw_learning_curve)
    monkeypatch.setattr(results, "draw_attention", draw_attention)
