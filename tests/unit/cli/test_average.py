from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.unit.cli.conftest import Call
from tests.unit.cli.test_translate import failure


def test_the_mean_of_the_last_checkpoints(call: Call, word_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "average"
    ended = call("average", "-m", word_model, "-n", 2, "--strategy", "last", "-o", made)
    assert ended.lines == [str(made)]
    found = load_file(made / "params.best.safetensors")
    parts = [load_file(word_model / f"params.{update:05d}.safetensors") for update in (6, 8)]
    assert set(found) == set(parts[0])
    for name, values in found.items():
        expected = np.mean([part[name].astype(np.float64) for part in parts], axis=0).astype(np.float32)
        np.testing.assert_array_equal(values, expected)


def test_the_best_are_those_of_early_stopping(
    call: Call, word_model: Path, copy: Path, tmp_path: Path
) -> None:
    rows = json.loads(call("info", word_model, "--json").out)["checkpoints"]
    held = [row for row in rows if row["file"]]
    best = sorted(held, key=lambda row: row["metrics"]["valid_perplexity"])[:2]
    assert len(held) == 3
    made = tmp_path / "average"
    call("average", "-m", word_model, "-n", 2, "-o", made)
    with safe_open(made / "params.best.safetensors", framework="np") as file:
        averaged = file.metadata()["averaged"]
    assert sorted(row["update"] for row in best) == [int(update) for update in averaged.split()]

    # The same folder judged by BLEU, which here falls where perplexity says the opposite.
    recipe = (copy / "recipe.yaml").read_text()
    assert "metric: perplexity" in recipe
    (copy / "recipe.yaml").write_text(recipe.replace("metric: perplexity", "metric: bleu"))
    header, *lines = (copy / "metrics.tsv").read_text().splitlines()
    column = header.split("\t").index("bleu")
    cells = [line.split("\t") for line in lines]
    for cell in cells:
        cell[column] = {"4": "9.0", "6": "5.0", "8": "7.0"}.get(cell[0], "1.0")
    (copy / "metrics.tsv").write_text("\n".join([header, *("\t".join(cell) for cell in cells)]) + "\n")
    call("average", "-m", copy, "-n", 2, "-o", tmp_path / "by-bleu")
    assert json.loads(call("info", tmp_path / "by-bleu", "--json").out)["averaged"] == [4, 8]


def test_the_result_translates_and_says_what_it_is(call: Call, word_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "average"
    ended = call("average", "-m", word_model, "-n", 9, "-o", made)
    assert "averaging 3 checkpoints, all that" in ended.err
    assert "training.keep_last_params (now 3)" in ended.err
    assert "average of checkpoints 4, 6, 8" in call("info", made).out
    assert call("translate", "-m", made, text="a b\n").code == 0
    names = {"params.best.safetensors", "recipe.yaml", "vocab.source.txt", "vocab.target.txt"}
    assert {path.name for path in made.iterdir()} == names
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]


def test_what_cannot_be_averaged_is_one_clear_line(
    call: Call, word_model: Path, copy: Path, tmp_path: Path
) -> None:
    lean, new = (tmp_path / name for name in ("lean", "new"))
    call("export", word_model, lean)
    with (copy / "vocab.source.txt").open("a") as words:
        words.write("extra\n")
    for model, made, message in (
        (lean, new, "no checkpoint with metrics"),
        (word_model, lean, "exists already"),
        (copy, new, "belongs to another vocabulary"),
    ):
        failure(call("average", "-m", model, "-o", made), message)
    assert not new.exists()
