"""The learning curve: what is written on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from econmt.training.results import WHY_BELOW, draw_learning_curve


def drawn(metrics: list[dict[str, float]], path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    figures: list[Figure] = []
    save = Figure.savefig

    def kept(self: Figure, *args: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    draw_learning_curve(metrics, 1000, path, "learning curve of mine")
    (figure,) = figures
    return figure


def row(update: int, loss: float, bleu: float = float("nan")) -> dict[str, float]:
    return {"update": update, "train_loss": loss, "valid_perplexity": 0.9 * 2.718**loss, "bleu": bleu}


@pytest.mark.parametrize("losses", [(5.0, 2.0), (1.2, 1.1), (9.0, 0.5), (0.0, 0.0)])
def test_ticks_are_plain_numbers_and_enough_of_them(
    losses: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = [row(1000, losses[0]), row(20_000, losses[1])]
    axis = drawn(metrics, tmp_path / "curve.png", monkeypatch).axes[0]
    low, high = axis.get_ylim()
    places = zip(axis.get_yticks(), axis.get_yticklabels(), strict=True)
    shown = [label.get_text() for place, label in places if low <= place <= high]
    assert 2 <= len(shown) <= 16
    assert all(float(text.replace(",", "")) > 0.0 for text in shown)
    assert len(set(shown)) == len(shown)
    assert "20,000" in [label.get_text() for label in axis.get_xticklabels()]


def test_there_are_a_title_and_the_reason_for_validation_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = drawn([row(1000, 3.0, 5.0)], tmp_path / "curve.png", monkeypatch)
    assert figure.get_suptitle() == "learning curve of mine"
    assert WHY_BELOW in [text.get_text() for text in figure.texts]
    assert len(figure.axes) == 2
