"""The parts of the interface that programs which train and convert models use."""

from __future__ import annotations

from pathlib import Path

import pytest

from econmt.api import InputError, SavedModel, check_training
from econmt.api.files import locked_folder, whole_folder
from econmt.api.recipes import held_out_text, load_recipe
from tests.unit.training.tiny import write_recipe


def test_training_is_checked_before_there_is_text(word_model: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", tmp_path / "none", tmp_path / "run")
    check_training(load_recipe(recipe))
    begins = f"training.initialize_from={tmp_path / 'gone'}"
    with pytest.raises(InputError, match=r"initialize_from .*gone: no such file"):
        check_training(load_recipe(recipe, [begins]))
    check_training(load_recipe(recipe, [begins, f"output={word_model}"]))  # which has begun
    with pytest.raises(InputError, match="device"):
        check_training(load_recipe(recipe, ["training.device=cuda:77"]))


def test_a_saved_model_names_its_files_and_its_recipe(word_model: Path, text: Path, tmp_path: Path) -> None:
    saved = SavedModel(word_model)
    assert saved.parameters == word_model / "params.best.safetensors"
    names = {"recipe.yaml", "params.best.safetensors", "vocab.source.txt", "vocab.target.txt"}
    assert {path.name for path in saved.files} == names
    assert saved.is_begun
    assert saved.vocabularies.target.decode(saved.vocabularies.target.encode("A B")) == "A B"
    recipe = write_recipe(tmp_path / "recipe.yaml", text, word_model)
    same = "training.keep_last_params=3"
    assert saved.changed_keys(load_recipe(recipe, [same])) == []
    other = load_recipe(recipe, [same, "training.seed=8"])
    assert saved.changed_keys(other) == ["training.seed 7 -> 8"]
    new = SavedModel(tmp_path / "new")
    assert not new.is_begun
    with pytest.raises(InputError, match="no checkpoint 'best'"):
        _ = new.files


def test_the_held_out_text_is_that_of_the_recipe(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", tmp_path, tmp_path / "run")
    files = tmp_path / "prepared/valid.source.txt", tmp_path / "prepared/valid.target.txt"
    assert held_out_text(load_recipe(recipe)) == ("validation", f"{tmp_path}/valid", *files)
    tested = load_recipe(recipe, ["data.test=news", "data.prepared=null"])
    folder = tmp_path / "run/prepared"
    expected = ("test", "news", folder / "test.source.txt", folder / "test.target.txt")
    assert held_out_text(tested) == expected


def test_a_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    made = tmp_path / "a/made"
    with pytest.raises(InputError, match="cannot write"), whole_folder(made) as partial:
        (partial / "none/file").write_text("x")
    assert list((tmp_path / "a").iterdir()) == []
    with whole_folder(made) as partial:
        (partial / "file").write_text("x")
        assert not made.exists()
    assert (made / "file").read_text() == "x"
    with pytest.raises(InputError, match="cannot create this folder"), whole_folder(made / "file/more"):
        pass


def test_a_folder_is_locked_once(tmp_path: Path) -> None:
    with (
        locked_folder(tmp_path / "new/folder"),
        pytest.raises(InputError, match="another process"),
        locked_folder(tmp_path / "new/folder"),
    ):
        pass
    with locked_folder(tmp_path / "new/folder"):
        pass
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot create this folder"), locked_folder(tmp_path / "file"):
        pass
