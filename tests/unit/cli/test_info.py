from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from econmt.checkpoint import folder
from econmt.cli.info import disk_bytes
from econmt.errors import InputError
from econmt.export.model_folder import read_metrics
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.cli.test_runtime import random_model


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


def test_it_can_be_read_by_a_person(call: Call, word_model: Path) -> None:
    ended = call("info", word_model).succeeded()
    best = json.loads(call("info", word_model, "--json").out)["best"]
    assert f"training ended at update 8, best checkpoint {best}" in ended.out
    assert "1 x LSTM 8" in ended.out
    assert "12 source, 12 target entries" in ended.out
    (starred,) = (line for line in ended.lines if line.endswith("*"))
    assert starred.split()[0] == str(best)


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
    (copy / "results.json").unlink(missing_ok=True)
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
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "metrics.tsv").write_text("bleu\n1.0\n")
    with pytest.raises(InputError, match="not a table of metrics"):
        read_metrics(tmp_path / "metrics.tsv")
    assert read_metrics(tmp_path / "none.tsv") == []
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(InputError, match=r"metrics\.tsv: cannot be read: Permission denied"):
        read_metrics(tmp_path / "metrics.tsv")
