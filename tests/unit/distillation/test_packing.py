"""The forms of a student are made once, and again whenever any of them may not belong to its parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from econmt_distill import packing
from econmt_distill.packing import PackedStudent, pack

Pack = Callable[[int], PackedStudent]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Forms that are written as the shortlist and the parameters; names of those that were made, in order."""
    done: list[str] = []

    def lexicon(folder: Path, path: Path, *_: object, top_k: int, **__: object) -> None:
        path.write_text(f"{top_k} {(folder / 'params.best.safetensors').read_text()}")
        done.append("lexicon")

    def quantize(folder: Path, path: Path, **_: object) -> None:
        path.mkdir()  # it refuses a folder that exists
        (path / "params").write_text((folder / "params.best.safetensors").read_text())
        done.append("int8")

    def export(int8: Path, path: Path, kind: str, words: Path) -> None:
        path.mkdir()
        (path / "model").write_text(f"{kind} {(int8 / 'params').read_text()} {words.read_text()}")
        done.append("runtime")

    monkeypatch.setattr(packing, "make_lexicon", lexicon)
    monkeypatch.setattr(packing, "quantize_model", quantize)
    monkeypatch.setattr(packing, "export_runtime", export)
    return done


@pytest.fixture
def packed(tmp_path: Path) -> Pack:
    """Packs the student in ``tmp_path`` with a shortlist."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/params.best.safetensors").write_text("first")
    pairs = SimpleNamespace(train=[], source="en", target="de")
    recipe: Any = SimpleNamespace(output=str(tmp_path / "model"), pairs=pairs)
    return lambda shortlist: pack(tmp_path, recipe, [], shortlist, lambda _: None)


ALL = ["lexicon", "int8", "runtime"]


def test_forms_are_made_once(packed: Pack, made: list[str], tmp_path: Path) -> None:
    assert packed(3) == (tmp_path / "lexicon", tmp_path / "int8", tmp_path / "runtime")
    assert (tmp_path / "runtime/model").read_text() == "int8 first 3 first"
    packed(3)
    assert made == ALL
    packed(4)
    assert (made, (tmp_path / "runtime/model").read_text()) == (2 * ALL, "int8 first 4 first")
    (tmp_path / "model/params.best.safetensors").write_text("second")
    packed(4)
    assert (made, (tmp_path / "runtime/model").read_text()) == (3 * ALL, "int8 second 4 second")
    packed(4)
    assert made == 3 * ALL


@pytest.mark.parametrize("form", ALL)
def test_a_missing_form_is_made_again(form: str, packed: Pack, made: list[str], tmp_path: Path) -> None:
    packed(3)
    (tmp_path / form).rename(tmp_path / "elsewhere")
    packed(3)
    assert made == 2 * ALL, "all of them, which belong together"


@pytest.mark.parametrize("stage", ["make_lexicon", "quantize_model", "export_runtime"])
def test_forms_of_a_call_that_failed_are_not_taken_for_those_before(
    stage: str, packed: Pack, made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made with 3, stopped with 4 in some stage after it has begun to write, and called with 3 again."""
    packed(3)
    whole = getattr(packing, stage)

    def stopped(*arguments: Any, **more: Any) -> None:
        whole(*arguments, **more)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(packing, stage, stopped)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                packed(4)
    made.clear()
    packed(3)
    assert made == ALL
    assert (tmp_path / "runtime/model").read_text() == "int8 first 3 first"
    assert (tmp_path / "lexicon").read_text() == "3 first"
