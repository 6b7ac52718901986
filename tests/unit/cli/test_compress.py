from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.unit.cli.conftest import Call

PARAMETERS = "params.best.safetensors"


def test_the_factors_stand_for_the_matrices(call: Call, word_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "small"
    ended = call("compress", "-m", word_model, "--encoder-rank", 2, "--decoder-rank", 5, "-o", made)
    assert ended.code == 0, ended.err
    assert ended.lines[-1] == str(made)
    before, after = load_file(word_model / PARAMETERS), load_file(made / PARAMETERS)
    left, right = (after[f"decoder.layers.0.input.{end}"] for end in ("left", "right"))
    whole = before["decoder.layers.0.input"].astype(np.float64)
    lost = np.linalg.svd(whole, compute_uv=False)[5:]
    assert np.square(whole - left.astype(np.float64) @ right).sum() == pytest.approx(
        np.square(lost).sum(), rel=1e-3
    )
    np.testing.assert_array_equal(after["output.weight"], before["output.weight"])
    (row,) = (line for line in ended.lines if "decoder.layers.0.input" in line)
    share = 1.0 - np.square(lost).sum() / np.square(whole).sum()
    assert row.split()[1:8] == ["32", "x", "14", "5", f"{share:.2%}", "448", "230"]
    assert max(map(len, ended.lines[:-1])) <= 80
    counts = [sum(part.size for part in parts.values()) for parts in (before, after)]
    (total,) = (line for line in ended.lines if "the whole model" in line)
    assert f"{counts[0]:,}" in total
    assert f"{counts[1]:,}" in total


def test_the_result_is_a_model_folder_like_any_other(call: Call, word_model: Path, tmp_path: Path) -> None:
    made, lean = tmp_path / "small", tmp_path / "lean"
    call("compress", "-m", word_model, "--rank", 3, "-o", made)
    assert sorted(path.name for path in made.iterdir()) == [
        PARAMETERS, "recipe.yaml", "vocab.source.txt", "vocab.target.txt",
    ]  # fmt: skip
    said = call("info", made).out
    assert "1 x LSTM 8 of rank 3, both directions: bottom" in said
    assert "its LSTM matrices compressed to low-rank factors" in said
    found = json.loads(call("info", made, "--json").out)
    assert found["compressed"] == {"encoder": "3", "decoder": "3"}
    assert found["model"]["decoder"]["rank"] == 3
    assert call("export", made, lean).code == 0
    text = "a b c\nh g\n"
    outputs = [call("translate", "-m", folder, text=text) for folder in (made, lean)]
    assert [ended.code for ended in outputs] == [0, 0]
    assert outputs[0].out == outputs[1].out
    assert len(outputs[0].lines) == 2


def test_scores_are_those_of_translating(call: Call, word_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "small"
    call("compress", "-m", word_model, "--decoder-rank", 4, "-o", made)
    sources = ["a b c", "h g", "d d d e"]
    translated = call(
        "translate", "-m", made, "--output-type", "json", text="".join(f"{line}\n" for line in sources)
    )
    rows = [json.loads(line) for line in translated.lines]
    pairs = zip(sources, rows, strict=True)
    text = "".join(f"{source}\t{' '.join(row['tokens'])}\n" for source, row in pairs)
    scored = call("score", "-m", made, "--target-tokens", "--score-type", "logprob", text=text)
    assert scored.code == 0, scored.err
    expected = [row["log_probability"] for row in rows]
    assert [float(line) for line in scored.lines] == pytest.approx(expected, abs=1e-4)


def test_a_share_chooses_the_ranks(call: Call, word_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "small"
    ended = call("compress", "-m", word_model, "--energy", 0.3, "--decoder-rank", 6, "-o", made)
    assert ended.code == 0, ended.err
    before = load_file(word_model / PARAMETERS)
    needed = 1
    for name in [name for name in before if name.startswith("encoder.") and before[name].ndim == 2]:
        squares = np.square(np.linalg.svd(before[name].astype(np.float64), compute_uv=False))
        needed = max(needed, int(np.searchsorted(np.cumsum(squares) / squares.sum(), 0.3) + 1))
    found = json.loads(call("info", made, "--json").out)["model"]
    assert (found["encoder"]["rank"], found["decoder"]["rank"]) == (needed, 6)


@pytest.mark.slow
def test_training_goes_on_from_it(call: Call, word_model: Path, text: Path, tmp_path: Path) -> None:
    made, tuned = tmp_path / "small", tmp_path / "tuned"
    call("compress", "-m", word_model, "--rank", 2, "-o", made)
    changes = [f"training.initialize_from={made}", f"output={tuned}", "training.max_updates=2"]
    ended = call("train", made / "recipe.yaml", *changes, "--data-dir", text)
    assert ended.code == 0, ended.err
    assert "initial parameters: update " in ended.err
    assert load_file(tuned / PARAMETERS).keys() == load_file(made / PARAMETERS).keys()


def test_what_cannot_be_compressed_is_one_clear_line(call: Call, word_model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    call("compress", "-m", word_model, "--decoder-rank", 2, "-o", small)
    new = tmp_path / "new"
    cases = [
        (("-m", word_model, "-o", new), "give --rank, --encoder-rank, --decoder-rank or --energy"),
        (("-m", word_model, "-o", small, "--rank", 2), f"{small}: exists already; use a new folder"),
        (("-m", tmp_path / "none", "-o", new, "--rank", 2), "no such folder"),
        (
            ("-m", word_model, "-o", new, "--encoder-rank", 4),
            "--encoder-rank 4 must be at most 3 for the encoder: the hidden matrix of layer 1 is 16 x 4, and factors",
        ),
        (("-m", word_model, "-o", new, "--rank", 4), "econmt: error: --rank 4 must be at most 3"),
        (("-m", word_model, "-o", new, "--energy", 1.5), "--energy 1.5: give a share above 0 and at most 1"),
        (("-m", word_model, "-o", new, "--energy", 1.0), "--energy 1.0: nothing would become smaller"),
        (("-m", small, "-o", new, "--rank", 2), "the decoder already has rank 2"),
        (("-m", word_model, "-o", new, "--rank", 2, "-c", 99), "no checkpoint '99'"),
    ]
    for arguments, message in cases:
        ended = call("compress", *arguments)
        assert ended.code == 2, arguments
        assert message in ended.err
        assert "Traceback" not in ended.err
    assert not new.exists()
    # What is whole may still be compressed.
    assert call("compress", "-m", small, "-o", new, "--encoder-rank", 2).code == 0


def test_a_part_without_gain_stays_whole(call: Call, word_model: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    ended = call("compress", "-m", word_model, "-o", new, "--energy", 1.0, "--decoder-rank", 2)
    assert ended.code == 0
    assert "the encoder stays as it is: --energy 1.0 needs rank" in ended.err
    made, before = (load_file(folder / "params.best.safetensors") for folder in (new, word_model))
    whole = [name for name in before if name.startswith("encoder.")]
    assert whole
    assert all(np.array_equal(made[name], before[name]) for name in whole)
    assert "decoder.layers.0.hidden" not in made
