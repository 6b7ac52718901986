"""What ``econmt info`` says of folders; folders that commands make, averages among them, appear whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from econmt.checkpoint import folder
from econmt.cli.info import describe, disk_bytes
from econmt.data.text.corpus import Corpus
from econmt.errors import InputError
from econmt.export.lexicon import make_lexicon
from econmt.export.model_folder import read_metrics
from tests.conftest import fails_with
from tests.golden import assert_golden
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.cli.test_runtime import random_model
from tests.unit.cli.test_translate import failure
from tests.unit.training.test_checkpoints import failing


def test_everything_is_told(call: Call, word_model: Path) -> None:
    found = json.loads(call("info", word_model, "--json").out)
    tensors = load_file(word_model / "params.best.safetensors")
    assert found["name"] == "reverse"
    assert (found["source"], found["target"]) == ("src", "trg")
    assert found["model"]["decoder"]["size"] == 8
    assert found["parameters"]["total"] == sum(tensor.size for tensor in tensors.values())
    embeddings = sum(tensor.size for name, tensor in tensors.items() if "embedding" in name)
    assert found["parameters"]["layers"]["embedding"] == embeddings
    assert sum(found["parameters"]["layers"].values()) == found["parameters"]["total"]
    assert found["vocabulary"]["files"] == ["vocab.source.txt", "vocab.target.txt"]
    assert found["vocabulary"]["source_size"] == 12
    assert [row["update"] for row in found["checkpoints"]] == [2, 4, 6, 8]
    best = min(found["checkpoints"], key=lambda row: row["metrics"]["valid_perplexity"])
    assert found["best"] == best["update"]
    assert found["finished"] is True
    assert found["bytes"]["total"] > found["bytes"]["parameters"] > 4 * found["parameters"]["total"]
    assert found["bytes"]["training_state"] > 0


def test_cells_are_named(call: Call, word_model: Path, tmp_path: Path) -> None:
    said = call("info", random_model(word_model, tmp_path / "model", "student")).out
    assert "3 x GRU 6, both directions: bottom" in said
    assert "2 x SSRU 7, no input feeding" in said


def test_an_export_is_told_from_a_run(call: Call, word_model: Path, tmp_path: Path) -> None:
    lean = tmp_path / "lean"
    assert call("export", word_model, lean).lines == [str(lean)]
    found = json.loads(call("info", lean, "--json").out)
    assert (found["finished"], found["checkpoints"], found["bytes"]["training_state"]) == (None, [], 0)
    assert found["best"] == json.loads(call("info", word_model, "--json").out)["best"]
    assert f"export of checkpoint {found['best']}" in call("info", lean).out


def test_an_unfinished_run_can_be_resumed(call: Call, copy: Path) -> None:
    results = json.loads((copy / "results.json").read_text())
    (copy / "results.json").write_text(json.dumps(results | {"update": 4}))
    assert json.loads(call("info", copy, "--json").out)["finished"] is False, "its former end was at 4"
    (copy / "results.json").unlink()
    assert "training has not ended at update 8" in call("info", copy).out
    assert "can be resumed" in " ".join(call("info", copy).out.split())


BROKEN = [
    ("", None, "no such folder"),
    ("recipe.yaml", None, "not a model folder"),
    ("vocab.source.txt", None, "no vocabulary"),
    ("vocab.target.txt", b"<pad>\n<unk>\n<s>\n</s>\nA\n", "another vocabulary"),
    ("params.best.safetensors", b"\x80\x04junk", "pickle"),
    ("recipe.yaml", b"name: \xff\n", "recipe.yaml:1: not valid UTF-8"),
    ("recipe.yaml", b"name: a\nn", "recipe.yaml"),
    ("results.json", b"[]", "results.json: broken, not a JSON object"),
    ("results.json", b'{"update": "8"}', "results.json: update: expected a whole"),
    ("results.json", b"\xff", "results.json: broken, not valid UTF-8"),
    ("results.json", b"[" * 100000, "results.json: broken, not valid JSON"),
    ("metrics.tsv", b"update\tbleu\n3\tmany\n", "metrics.tsv: not a table of metrics"),
    ("metrics.tsv", b"update\tbleu\ninf\t1\n", "metrics.tsv: not a table of metrics"),
]
"""A file of a model folder, what it holds instead (None: it is gone), and words of the line that says so."""


@pytest.mark.parametrize(("name", "content", "words"), BROKEN)
def test_a_foreign_or_broken_folder_is_one_clear_line(
    call: Call, copy: Path, name: str, content: bytes | None, words: str
) -> None:
    if content is not None:
        (copy / name).write_bytes(content)
    elif name:
        (copy / name).unlink()
    else:
        shutil.rmtree(copy)
    ended = call("info", copy)
    refused(ended, str(copy), words)
    assert ended.out == ""


def test_bytes_on_disk_count_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "one").write_bytes(b"123")
    (tmp_path / "other").write_bytes(b"12345")
    (tmp_path / "linked").hardlink_to(tmp_path / "other")
    (tmp_path / "symbolic").symlink_to(tmp_path / "one")
    for names, size in (("", 0), ("folder", 0), ("gone one", 3), ("other linked", 5)):
        assert disk_bytes([tmp_path / name for name in names.split()]) == size
    assert disk_bytes(tmp_path.iterdir()) == 8


def test_rows_of_metrics_without_an_update_are_passed_over(tmp_path: Path) -> None:
    for first in ("9" * 5000, "²", ""):
        (tmp_path / "metrics.tsv").write_text(f"update\tbleu\n{first}\t1.0\n7\t1.0\n", encoding="utf-8")
        assert folder._updates(tmp_path / "metrics.tsv") == {7}


def test_metrics_without_an_update_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.tsv").write_text("bleu\n1.0\n")
    with pytest.raises(InputError, match="not a table of metrics"):
        read_metrics(tmp_path / "metrics.tsv")
    assert read_metrics(tmp_path / "none.tsv") == []
    monkeypatch.setattr(Path, "open", fails_with(PermissionError(13, "Permission denied")))
    with pytest.raises(InputError, match=r"metrics\.tsv: cannot be read: Permission denied"):
        read_metrics(tmp_path / "metrics.tsv")


COMMANDS = {
    "export": ("export", "{model}", "{made}"),
    "average": ("average", "-m", "{model}", "-n", "2", "-o", "{made}"),
    "quantize": ("quantize", "-m", "{model}", "-o", "{made}"),
}


def words(verb: str, model: Path, made: Path) -> Sequence[str]:
    return [word.format(model=model, made=made) for word in COMMANDS[verb]]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("number", [1, 3, 6])
def test_a_full_disk_leaves_nothing(
    call: Call, word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, number: int
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    operations = (os, "fsync"), (shutil, "copyfile")
    with failing(number, OSError(28, "No space left on device"), monkeypatch, operations):
        ended = call(*words(verb, word_model, place / "made"))
    assert ended.code == 2
    assert ended.out.splitlines()[-1:] != [str(place / "made")]
    assert f"econmt: error: {place / 'made'}: the disk is full; free some space" in ended.err
    assert list(place.iterdir()) == []
    assert call(*words(verb, word_model, place / "made")).code == 0
    assert [path.name for path in place.iterdir()] == ["made"]
    assert call("translate", "-m", place / "made", text="a b\n").code == 0


@pytest.mark.parametrize("verb", COMMANDS)
def test_only_new_or_empty_folders_are_used(call: Call, word_model: Path, tmp_path: Path, verb: str) -> None:
    made = tmp_path / "made"
    made.mkdir()
    (made / "thesis.txt").write_text("years of work")
    refused(call(*words(verb, word_model, made)), f"{made}: exists already; use a new folder")
    assert [path.name for path in made.iterdir()] == ["thesis.txt"]
    (made / "thesis.txt").unlink()
    assert call(*words(verb, word_model, made)).code == 0


@pytest.mark.parametrize("verb", COMMANDS)
def test_damaged_parameters_are_refused_by_every_command_that_reads_them(
    call: Call, copy: Path, tmp_path: Path, verb: str
) -> None:
    for path in copy.glob("params.*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-1] ^= 0x40
        path.write_bytes(content)
    for arguments in (words(verb, copy, tmp_path / "made"), ("translate", "-m", str(copy))):
        ended = call(*arguments, text="a b\n")
        assert (ended.code, ended.out) == (2, "")
        assert "safetensors: damaged (its checksum is wrong)" in ended.err
    assert not (tmp_path / "made").exists()


def test_the_mean_of_the_last_checkpoints(call: Call, word_model: Path, tmp_path: Path) -> None:
    made = tmp_path / "average"
    ended = call("average", "-m", word_model, "-n", 2, "--strategy", "last", "-o", made)
    assert ended.lines == [str(made)]
    assert (ended.err.count("averag"), "averaged the checkpoints of updates 6, 8" in ended.err) == (1, True)
    found = load_file(made / "params.best.safetensors")
    parts = [load_file(word_model / f"params.{update:05d}.safetensors") for update in (6, 8)]
    assert set(found) == set(parts[0])
    for name, values in found.items():
        expected = np.mean([part[name].astype(np.float64) for part in parts], axis=0).astype(np.float32)
        np.testing.assert_array_equal(values, expected)


def test_the_description_on_a_terminal_is_whole(call: Call, copy: Path) -> None:
    contents = json.loads(call("info", copy, "--json").out)
    sizes = {"parameters": 12_345, "training_state": 2_000_000, "prepared": 0, "total": 2_500_000}
    versions = {"format": "econmt-1", "econmt": "1.2", "torch": "2.13"}
    names = ("target_tokens", "seconds", "train_loss", "valid_perplexity", "bleu")
    for number, checkpoint in enumerate(contents["checkpoints"]):
        checkpoint["metrics"] = dict(
            zip(names, (1234.0 * number, 99.5 + number, 1.25, 12.5, None), strict=True)
        )
    contents |= {"bytes": sizes, "versions": versions, "best": 6, "quantized": "bfloat16"}
    assert_golden("info", "\n".join(describe(contents)))


def test_a_lexicon_is_learnt_from_pairs_that_the_model_takes(call: Call, copy: Path, tmp_path: Path) -> None:
    recipe = (copy / "recipe.yaml").read_text()
    (copy / "recipe.yaml").write_text(re.sub("max_length: [0-9]+", "max_length: 3", recipe))
    (tmp_path / "text.src").write_text("a b\n\na\na b a\na b a b\n b \n")
    (tmp_path / "text.trg").write_text("B A\nA\n \nA B A\nA\nA B A B\n")
    ended = call("lexicon -m", copy, "-o", tmp_path / "lexicon", "--corpus", tmp_path / "text").succeeded()
    assert "learnt the translations of 2 words from 2 pairs" in ended.err
    said, pairs = list[str](), Corpus(tmp_path / "text.src", tmp_path / "text.trg")
    make_lexicon(copy, tmp_path / "lexicon", [pairs], top_k=2, iterations=7, say=said.append)
    assert said[-1] == "learning from 2 pairs, pass 7 of 7"


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


def test_what_cannot_be_averaged_is_one_clear_line(
    call: Call, word_model: Path, copy: Path, tmp_path: Path
) -> None:
    lean, new = (tmp_path / name for name in ("lean", "new"))
    call("export", word_model, lean)
    with (copy / "vocab.source.txt").open("a") as words:
        words.write("extra\n")
    for model, message in ((lean, "no checkpoint with metrics"), (copy, "belongs to another vocabulary")):
        failure(call("average", "-m", model, "-o", new), message)
    assert not new.exists()
