"""Interface for programs: that train and convert models, or hold saved models, requests and commands of their own."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import econmt
import econmt_runtime
from econmt.api import InputError, SavedModel, check_training, commands
from econmt.api.files import locked_folder
from econmt.api.recipes import held_out_text, load_recipe
from econmt.api.requests import Glossary, Request, constraint_tokens
from econmt.decoding.search.options import SearchOptions
from econmt.decoding.translator import Translator
from econmt_runtime.errors import RuntimeInputError
from tests.unit.training.tiny import write_recipe


def test_a_saved_model_is_described_without_loading_it(copy: Path) -> None:
    saved, model = SavedModel(copy), econmt.load(copy)
    assert saved.languages == model.languages == ("src", "trg")
    assert saved.recipe.name == model.recipe.name
    assert saved.size == (copy / "params.best.safetensors").stat().st_size
    assert saved.metrics["update"] > 0
    assert saved.metrics["bleu"] >= 0.0
    rows, name = (copy / "metrics.tsv").read_text().splitlines(), "seconds"
    again = dict(zip(rows[0].split("\t"), rows[-1].split("\t"), strict=True)) | {name: "7777.0"}
    found = saved.metrics["update"]
    again["update"] = str(found)
    (copy / "metrics.tsv").write_text("\n".join([*rows, "\t".join(again.values())]) + "\n")
    assert (saved.metrics["update"], saved.metrics[name]) == (found, 7777.0)
    before = saved.version
    assert before == SavedModel(copy).version
    shutil.copyfile(copy / "params.best.safetensors", copy / "other")
    (copy / "other").replace(copy / "params.best.safetensors")
    assert saved.version != before
    (copy / "metrics.tsv").unlink()
    assert set(saved.metrics) == {"update"}
    (copy / "params.best.safetensors").unlink()
    assert saved.version is None
    with pytest.raises(InputError, match=r"params\.best|no checkpoint"):
        _ = saved.size


def test_a_folder_without_a_recipe_has_no_languages(tmp_path: Path) -> None:
    saved = SavedModel(str(tmp_path))
    assert (saved.folder, saved.recipe, saved.languages) == (tmp_path, None, None)
    for load in (SavedModel, econmt_runtime.load):
        with pytest.raises((InputError, RuntimeInputError), match="name has a NUL character; remove it"):
            load("a\0b")


def test_tokens_of_constraints_are_counted(word_model: Path) -> None:
    model = econmt.load(word_model)
    translator = model.translator({}, avoid=["H"])
    request = Request("a b", constraints=["A B"], target_prefix="C")
    count, most = constraint_tokens(translator, request)
    assert (count, constraint_tokens(translator, Request("a"))) == (3, (0, most))
    longest = model.recipe.pairs.max_length
    assert constraint_tokens(translator, Request("a " * (2 * longest)))[1] > most > 0
    with pytest.raises(InputError, match=r"q: .*avoided phrase"):
        constraint_tokens(translator, Request("a", constraints=["H"]), "q")


def test_terms_are_checked_and_lines_divided_by_a_given_function(word_model: Path) -> None:
    assert Glossary.checked({" a b\t": "C D "}, "glossary").terms == {"a b": "C D"}
    model = econmt.load(word_model)
    inner = model.translator({})
    parts = inner.models, model.vocabularies
    divided = Translator(
        *parts,
        SearchOptions(),
        divide=lambda line, _: (line.split(";"), lambda found: found[-1]._replace(text=str(len(found)))),
    )
    first, second = divided.translate(["a;b c", "d"])
    assert (first.text, second.text) == ("2", "1")
    assert first.score == pytest.approx(next(iter(inner.translate(["b c"]))).score, rel=1e-5)
    with pytest.raises(InputError, match="need a function that divides lines"):
        Translator(*parts, SearchOptions(split_sentences=True))


def test_the_example_of_a_command_runs(word_model: Path) -> None:
    example = re.search(r"it::\n\n(.*?)\n\n``", str(commands.__doc__), re.DOTALL)
    code, _, last = textwrap.dedent(example[1]).rpartition("\n")
    assert last == "typer.run(with_option_groups(shout))"
    names = {**vars(commands), "Path": Path}
    exec(compile(code, "example", "exec", dont_inherit=True), names)
    app = typer.Typer()
    app.command()(commands.with_option_groups(names["shout"]))
    done = CliRunner().invoke(app, ["a b", "-m", str(word_model), "--device", "cpu"])
    assert done.exit_code == 0
    assert econmt.load(word_model).translate(["a b"])[0].text.upper() in done.output


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
