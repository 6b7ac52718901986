"""Shapes of batches from lengths, layers on paper, and what the seed's four cards are predicted to gain."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from econmt.bench import parallel_simulation
from econmt.bench.parallel_hardware import GTX_750, H200, HARDWARE, paper_profile
from econmt.bench.parallel_lengths import PENN_TREEBANK, batches_of_text, counts_of_figures, counts_of_texts
from econmt.bench.rows import Row
from econmt.config.recipe import load_recipe
from econmt.errors import InputError


def test_lengths_of_the_penn_treebank_are_those_published() -> None:
    counts = counts_of_figures(PENN_TREEBANK)
    assert counts.shape == (2, 84), "one source position; 82 words and an end"
    assert counts[0].sum() == counts[1, :2].sum() == 0
    assert counts.sum() == 42_068
    assert counts[1, :47].sum() == pytest.approx(40_677, abs=2)
    words = (counts[1] * (np.arange(84) - 1)).sum()
    assert words == pytest.approx(929_589 - 42_068, rel=1e-3)
    assert counts[1, -1] > 0


def test_lengths_of_files(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_text("a b c\nd\n\n" + "w " * 60 + "\n")
    target.write_text("x\ny z\nq\nr\n")
    counts = counts_of_texts([source, target], load_recipe("gnmt", []))
    assert counts.sum() == 2, "an empty side and one of more words than data.max_length are left out"
    assert counts[4, 2] == counts[2, 3] == 1
    single = counts_of_texts([source], load_recipe("ptb", []))
    assert single.shape == (2, 62)
    assert single.sum() == 3


@pytest.mark.parametrize(
    ("recipe", "texts", "words"),
    [
        ("gnmt", ["a"], "needs two files, source and target, found 1"),
        ("ptb", ["a", "a"], "needs one file, found 2"),
        ("gnmt", ["a", "c"], "2 lines"),
        ("ptb", ["missing"], "no such file"),
        ("ptb", ["c"], "no line that training would use"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, recipe: str, texts: list[str], words: str) -> None:
    (tmp_path / "a").write_text("a b\nc d\n")
    (tmp_path / "c").write_text("\n")
    with pytest.raises(InputError, match=words):
        counts_of_texts([tmp_path / name for name in texts], load_recipe(recipe, []))


def test_without_buckets_every_pair_is_as_long_as_the_longest() -> None:
    counts = np.zeros((5, 9), dtype=np.int64)
    counts[2, 3], counts[4, 2], counts[1, 8] = 640, 64, 1
    recipe = load_recipe("iwslt", ["training.bucket_width=null"])
    (found,) = batches_of_text(recipe, counts, 100, "none")
    tokens = (640 * 3 + 64 * 2 + 8) / 705 * 128
    assert found[:3] == (128, 4, 8)
    assert found[3:] == pytest.approx((tokens, 705 / 128))
    derived = batches_of_text(recipe, counts, 100, "derived")
    assert sum(each.share for each in derived) == pytest.approx(705 / 128)
    assert sum(each.share * each.tokens for each in derived) == pytest.approx(tokens * 705 / 128)
    assert (2, 3) in {(each.source, each.target) for each in derived}


def test_a_profile_on_paper_knows_what_travels_and_the_state_of_the_optimizer() -> None:
    for overrides, bytes_of in (
        ((), (4, 8)),
        (("parallel.reduction=bfloat16", "training.optimizer.name=adamw"), (2, 8)),
        (("training.optimizer={name: sgd, learning_rate: 1.0, momentum: 0.9}",), (4, 4)),
        (("training.optimizer={name: sgd, learning_rate: 1.0}",), (4, 0)),
    ):
        recipe = load_recipe("iwslt", list(overrides))
        found = paper_profile(recipe, (100, 100), H200, 4, 10)
        assert (found.gradient_bytes, found.state_bytes) == bytes_of


@pytest.mark.parametrize(
    ("name", "tying", "tables"),
    [
        ("multi30k", "none", []),
        ("multi30k", "src_trg", []),
        ("multi30k", "trg_softmax", ["target embedding"]),
        ("multi30k", "src_trg_softmax", ["source embedding", "target embedding"]),
        ("wikitext2", "none", []),
        ("wikitext2", "softmax", ["target embedding"]),
    ],
)
def test_which_tables_read_the_matrix_of_the_output_layer(name: str, tying: str, tables: list[str]) -> None:
    recipe = load_recipe(name, [f"model.weight_tying={tying}"])
    found = paper_profile(recipe, (100, 100), H200, 4, 10)
    assert [layer.name for layer in found.readers_of_tied] == tables


def test_words_of_a_batch_are_padded_ones() -> None:
    counts = np.zeros((2, 12), dtype=np.int64)
    counts[1, 4] = counts[1, 11] = 50
    recipe = load_recipe("iwslt", ["training.batch.type=word", "training.batch.size=44"])
    rows = {each.target: each.rows for each in batches_of_text(recipe, counts, 100, "derived")}
    assert rows == {4: 11, 11: 4}


def test_a_layer_on_paper_by_hand() -> None:
    profile = paper_profile(parallel_simulation.seed_recipe(), [10_000], GTX_750, 4, 0)
    second = next(layer for layer in profile.layers if layer.name == "layer 2")
    assert second.parameters == 4 * 400 * 801
    rows = 16.0
    matrix = (
        4 * (4 * 400 * 400 + rows * 5 * 400) / 80e9
    )  # read anew each step; longer than 2 x 16 x 640,000 operations
    pointwise = 4 * rows * 11 * 400 / 80e9
    bulk = 2 * rows * 1600 * 400 / 1.044e12
    assert dict(second.forward)[rows] == pytest.approx(matrix + pointwise + bulk + 2 * 5e-6)
    read = 4 * 1600 * 400 / 80e9 + 5e-6
    assert second.call == pytest.approx((read, read))
    assert dict(second.gather)[rows] == pytest.approx(2 * rows * 1600 * 800 / 1.044e12)
    assert second.once == pytest.approx(16 * second.parameters / 80e9 + 2 * 5e-6)
    assert profile.output.parameters == 400 * 10_000
    assert sum(layer.parameters for layer in profile.layers) == pytest.approx(
        10_000 * 200 + 1600 * (200 + 400 + 1) + 7 * 1600 * 801 + 400 * 10_000
    )
    assert profile.most_stages() == 8


@pytest.mark.parametrize(
    ("name", "stages", "recurrent"),
    [("iwslt", 2, 3), ("gnmt", 4, 8), ("wikitext2", 2, 2), ("groundhog", 1, 2)],
)
def test_recipes_on_paper(name: str, stages: int, recurrent: int) -> None:
    profile = paper_profile(load_recipe(name, []), [9000, 9000], H200, 2, 50)
    assert profile.most_stages() == stages
    assert sum(layer.unit == "steps" for layer in profile.body) == recurrent
    assert profile.output.name == "output"
    assert all(value > 0 for layer in profile.layers for _, value in (*layer.forward, *layer.backward))


def seed_rows() -> list[Row]:
    recipe = parallel_simulation.seed_recipe()
    counts = counts_of_figures(PENN_TREEBANK)
    batches = {buckets: batches_of_text(recipe, counts, 10_000, buckets) for buckets in ("derived", "none")}
    profile = paper_profile(recipe, [10_000], GTX_750, 4, 0)
    return list(
        parallel_simulation.rows(profile, HARDWARE["seed"].machine, batches, [1, 4], ["data", "pipeline"])
    )


def test_four_cards_of_the_seed_with_derived_buckets() -> None:
    """The must: 5.3 times one card without either."""
    found = seed_rows()
    gains = {(row["buckets"], row["division"]): float(row["scaling"]) for row in found}
    assert gains["none", "alone"] == pytest.approx(1.0)
    assert gains["derived", "4 stages"] >= parallel_simulation.MUST
    assert 2.0 < gains["none", "4 stages"] < 4.0
    assert gains["derived", "alone"] == pytest.approx(3.3, rel=0.1), "what is published of buckets alone"
    assert gains["derived", "4 stages"] > parallel_simulation.AIM, "weights' gradients are made once"
    assert "beyond the aim of 8.0x" in parallel_simulation.seed_verdict(found)


def row(ranks: int, kind: str, scaling: float) -> Row:
    return {
        "ranks": ranks,
        "kind": kind,
        "scaling": scaling,
        "division": f"{ranks} of {kind}",
        "buckets": "none",
    }


def test_the_fastest_division_is_named_for_each_run_of_ranks() -> None:
    found = [row(1, "data", 1.0), row(2, "data", 1.9), row(2, "pipeline", 1.5), row(4, "data", 3.0)]
    found += [row(8, "data", 4.0), row(8, "both", 6.0), row(16, "data", 9.0), row(16, "both", 8.0)]
    assert parallel_simulation.fastest(found) == [
        "fastest for 2 to 4 ranks: data, 1.9x to 3x; there 4 of data",
        "fastest for 8 ranks: both, 6x; there 8 of both",
        "fastest for 16 ranks: data, 9x; there 16 of data",
    ]


@pytest.mark.parametrize(
    ("both", "words"), [(5.2, "misses the 5.3x"), (5.3, "reaches the 5.3x"), (8.1, "beyond the aim of 8.0x")]
)
def test_the_verdict_on_the_seed(both: float, words: str) -> None:
    rows = [row(1, "data", 1.0), row(4, "pipeline", 2.5), row(4, "data", 99.0)]
    rows += [
        {**row(1, "data", 3.0), "buckets": "derived"},
        {**row(4, "pipeline", both), "buckets": "derived"},
    ]
    assert parallel_simulation.seed_verdict(rows).endswith(words)


def test_the_picture(tmp_path: Path) -> None:
    found = [row(1, "data", 1.0), row(2, "data", 1.9), {**row(2, "pipeline", 1.5), "buckets": "derived"}]
    parallel_simulation.draw(found, tmp_path / "p.png", "title")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
