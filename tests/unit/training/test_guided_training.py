"""Runs with word alignments and weights of pairs: they learn from them, and notice changed files."""

from __future__ import annotations

from pathlib import Path

import pytest

from econmt.errors import InputError
from tests.unit.training.tiny import Run, metrics, write_guides, write_text

GUIDED = ("data.alignment=align", "training.guided_alignment_weight=0.5", "training.max_updates=6")
FACTORS = ("data.source_factors=[case]", "model.source_factors_num_embed=[2]")
TERMS = (
    "data.annotate_terms={glossary: terms, share: 0.9}",
    "data.subwords={type: bpe, size: 40, joint: true}",
)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    write_text(tmp_path, {"train": 30, "valid": 6})
    write_guides(tmp_path)
    return tmp_path


def run(text: Path, name: str, *overrides: str) -> Run:
    return Run(text, text / name, (*overrides, f"data.prepared={text}/prepared-{name}"))


@pytest.mark.slow
def test_attention_follows_the_alignment(text: Path) -> None:
    losses = []
    for name, weight in (("little", "0.001"), ("much", "2.0")):
        each = run(text, name, *GUIDED, f"training.guided_alignment_weight={weight}", "training.max_updates=40",
                   "training.checkpoint_interval=20", "training.decode_and_evaluate=0")  # fmt: skip
        each.train()
        losses.append([row["valid_alignment_loss"] for row in metrics(each.folder)])
        assert "alignment loss" in each.said()
    assert losses[1][-1] < 0.8 * losses[0][-1]
    assert losses[1][-1] < losses[1][0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("file", "line", "overrides"),
    [
        ("train.weights", "0.25", ("data.weights=weights",)),
        ("train.align", "0-0", ("data.alignment=align",)),
        ("valid.align", "0-0", ("data.alignment=align",)),
        ("train.case", "y", FACTORS),
        ("valid.case", "y", FACTORS),
        ("terms", "a = B", TERMS),
    ],
)
def test_a_changed_file_beside_the_text_stops_a_resumed_run(
    text: Path, file: str, line: str, overrides: tuple[str, ...]
) -> None:
    for split in ("train", "valid"):
        rows = [" ".join("x" * len(row.split())) for row in (text / f"{split}.src").read_text().splitlines()]
        rows[-1] = rows[-1].replace("x", "y")
        (text / f"{split}.case").write_text("\n".join(rows) + "\n")
    (text / "terms").write_text("c = C\n")
    both = (*overrides, "training.decode_and_evaluate=0", "training.checkpoint_interval=1")
    run(text, "run", *both, "training.max_updates=1").train()
    before = (text / file).read_text()
    # As many factors as words, but one weight, link or term a line.
    words = [len(row.split()) if "case" in file else 1 for row in before.splitlines()]
    (text / file).write_text("".join(" ".join([line] * count) + "\n" for count in words))
    longer = run(text, "run", *both, "training.max_updates=2")
    with pytest.raises(InputError, match=r"began with (other text|another vocabulary)"):
        longer.train()
    (text / file).write_text(before)
    assert longer.train().update == 2


def test_pairs_of_weight_zero_are_not_learnt(text: Path) -> None:
    (text / "train.none").write_text("0\n" * 30)
    each = run(text, "none", "data.weights=none")
    each.train()
    assert {row["train_loss"] for row in metrics(each.folder)} == {0.0}
    found = [row["valid_perplexity"] for row in metrics(each.folder)]
    assert max(found) == pytest.approx(min(found), rel=1e-6)
