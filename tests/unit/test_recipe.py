from __future__ import annotations

import itertools
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceTrainer

from econmt.config import recipe as recipes
from econmt.config.migration import REMOVED_KEYS, remove_keys
from econmt.config.model import largest_rank
from econmt.config.yaml_reader import dump_yaml
from econmt.errors import InputError

MINIMAL = """\
name: small
output: runs/small
data:
  source: en
  target: no
  train: [text/train]
  valid: text/valid
training:
  max_updates: 10
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def complaints(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        recipes.load_recipe(write(folder, text), overrides)
    return str(caught.value).replace(str(folder) + "/", "").splitlines()


def test_overrides_are_yaml_and_the_last_one_counts(tmp_path: Path) -> None:
    overrides = """training.batch.size=2 training.batch.size=32 training.max_updates=null training.max_epochs=3
    training.optimizer.learning_rate=3e-4 'data.train=[a/one, b/two]' 'model.attention={type: dot}' name=with=sign"""
    recipe = recipes.load_recipe(write(tmp_path, MINIMAL), shlex.split(overrides))
    assert recipe.training.optimizer.learning_rate == 0.0003
    assert recipe.training.batch.size == 32
    assert recipe.data.train == ["a/one", "b/two"]
    assert recipe.model.attention.type == "dot"
    assert (recipe.training.max_updates, recipe.training.max_epochs) == (None, 3)
    assert recipe.name == "with=sign"


def test_subwords_and_dropout_take_either_form(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL)
    words = recipes.load_recipe(file, ["data.subwords={type: words, source: 9}"]).data.subwords
    assert isinstance(words, recipes.WordSubwords)
    assert (words.source, words.target) == (9, 50000)
    number = recipes.load_recipe(file, ["model.dropout=0.25"]).model
    assert number.dropouts == recipes.Dropout(embedding=0.25, layers=0.25, output=0.25)
    section = recipes.load_recipe(file, ["model.dropout.layers=0.5"]).model
    assert section.dropouts == recipes.Dropout(layers=0.5)


PLACES = {
    ("  valid: text", "  max_lenght: 9\n  valid: text"): "7: data.max_lenght: unknown key; did you mean data.max_length?",
    ("  valid: text/valid\n", ""): "3: data.valid: missing; prefix of the validation text",
    ("[text/train]", "text/train"): "6: data.train: expected a list, found the text 'text/train'",
    ("[text/train]", "[text/train, 3]"): "6: data.train[1]: expected text, found 3",
    ("[text/train]", "[]"): "6: data.train: must not be empty, found an empty list",
    ("source: en", "source: ''"): "4: data.source: must not be empty, found the text ''",
    ("source: en", "source: 1.5"): "4: data.source: expected text, found 1.5",
    ("updates: 10", "updates: 0"): "9: training.max_updates: must be at least 1, found 0",
    ("updates: 10", "updates: 1.5"): "9: training.max_updates: expected a whole number, found 1.5",
    ("updates: 10", "updates: 1_000"): "9: training.max_updates: expected a whole number, found the text '1_000'",
    (":\n  max_updates: 10", ": 3"): "8: training: expected a section (keys and values), found 3",
    ("name: small", "nmae: small\nname: x"): "1: nmae: unknown key; did you mean name?",
    ("name", "learning_rate: 1\nname"): "1: learning_rate: unknown key; did you mean training.optimizer.learning_rate?",
    ("name", "zzz: 1\nname"): "1: zzz: unknown key; valid keys here: name, task, output, data, model, ops, training, "
    "parallel, decoding",
    ("  max_up", "  batch: {type: token}\n  max_up"):
        "9: training.batch.type: must be one of sentence, word, found the text 'token'",
    ("  max_up", "  batch:\n    qqq: 1\n  max_up"):
        "10: training.batch.qqq: unknown key; valid keys in training.batch: type, size",
    ("name: small", "name: small\nname: x"): "2: name: given twice; first at mine.yaml:1",
    ("  max_up", "  precision: bfloat\n  max_up"): "9: training.precision: must be one of auto, float32, tf32, bfloat16, "
    "float16, found the text 'bfloat'; did you mean bfloat16?",
}  # fmt: skip
"""A change of the recipe, and the line and the words with which it is refused."""


@pytest.mark.parametrize(("change", "expected"), PLACES.items())
def test_one_line_names_place_key_and_remedy(tmp_path: Path, change: tuple[str, str], expected: str) -> None:
    assert change[0] in MINIMAL
    assert complaints(tmp_path, MINIMAL.replace(*change)) == [f"mine.yaml:{expected}"]


OVERRIDES = {
    "model.embeding=1": ": unknown key; did you mean model.embedding?",
    "modle.embedding=1": "modle: unknown key; did you mean model?",
    "model.encoder.size=abc": ": expected a whole number, found the text 'abc'",
    "model.encoder.size=7": "model.encoder: size 7 must be even: a bidirectional layer has half of it in each "
    "direction",
    "model.encoder={size: 7, bidirectional: all}": "model.encoder: size 7 must be even: a bidirectional layer has half "
    "of it in each direction",
    "model.encoder.residual=yes": ": expected true or false, found the text 'yes'",
    "model.embedding=true": ": expected a whole number, found true",
    "model.dropout=1": ": must be less than 1.0, found 1",
    "ops.encoder=recomputed": ": must be one of auto, reference, recompute, compiled, triton, found the text 'recomputed'; did you mean recompute?",
    "model.dropout={embeding: 0.1}": ".embeding: unknown key; did you mean model.dropout.embedding?",
    "model.dropout=high": ": expected a number, found the text 'high'",
    "training.optimizer.learning_rate=.inf": ": expected a finite number, found inf",
    "training.optimizer.learning_rate=-1": ": must be more than 0.0, found -1",
    "training.optimizer.betas=[0.9, 1.0]": "training.optimizer: betas [0.9, 1.0] must be at least 0 and less than 1",
    "training.optimizer.betas=0.9": ": expected a list, found 0.9",
    "training.schedule.name=inverse-sqrt": "training.schedule.name: inverse-sqrt cannot be combined with "
    "training.schedule.warmup: 0 (it needs at least 1 update); change one of them",
    "data.subwords.type=bp": ": must be one of bpe, unigram, words, codes, found the text 'bp'; did you mean bpe?",
    "data.subwords={type: words, size: 3}": ".size: unknown key; valid keys in data.subwords: type, source, "
    "target, joint, min_count, lists",
    "data.subwords=[bpe]": ": expected a section (keys and values), found a list",
}
"""The words with which an override is refused; they begin with the key unless they name another one."""


@pytest.mark.parametrize(("override", "expected"), OVERRIDES.items())
def test_an_override_is_named_in_its_errors(tmp_path: Path, override: str, expected: str) -> None:
    expected = expected if expected[0].isalpha() else override.partition("=")[0] + expected
    assert complaints(tmp_path, MINIMAL, override) == [f"override {override!r}: {expected}"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.batch.size", "expected key=value, for example training.batch.size=32"),
        ("=3", "expected key=value, for example training.batch.size=32"),
        ("training..size=3", "expected key=value, for example training.batch.size=32"),
        ("data.train.first=3", "data.train is a list in mine.yaml:6, not a section; replace it"),
        ("training.batch={size: 3", "not valid YAML"),
    ],
)
def test_an_override_that_cannot_be_read(tmp_path: Path, override: str, expected: str) -> None:
    (line,) = complaints(tmp_path, MINIMAL, override)
    assert line.startswith(f"override {override!r}:")
    assert expected in line


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    lines = complaints(
        tmp_path, MINIMAL.replace("source: en", "sorce: en"), "model.embedding=0", "training.seed=-1"
    )
    assert sorted(lines) == [
        "mine.yaml:3: data.source: missing; source language, the suffix of its files",
        "mine.yaml:4: data.sorce: unknown key; did you mean data.source?",
        "override 'model.embedding=0': model.embedding: must be at least 1, found 0",
        "override 'training.seed=-1': training.seed: must be at least 0, found -1",
    ]


def test_an_override_of_a_whole_section_takes_its_place_in_errors(tmp_path: Path) -> None:
    text = MINIMAL + "  batch:\n    size: 4\n"
    override = "training.batch={size: 0}"
    assert complaints(tmp_path, text, override) == [
        f"override {override!r}: training.batch.size: must be at least 1, found 0"
    ]


TOGETHER = {
    "training.max_updates=null training.early_stopping.max_num_checkpoint_not_improved=null": "never end",
    "'training.memory_budget=4 elephants'": "expected a size like 4GiB, 512MiB, 2GB or a number of bytes",
    "training.memory_budget=1": "memory_budget 1 means bytes, too few for any model; add a unit, as in 4GiB",
    "model.attention.type=dot model.encoder.size=8": "needs encoder.size (8) equal to decoder.size (512)",
    "model.encoder.rank=205": "encoder.rank 205 must be at most 204: the hidden matrix of layer 1 is 1024 x 256",
    "model.decoder.rank=410": "decoder.rank 410 must be at most 409: the hidden matrix of layer 1 is 2048 x 512",
    "model.embedding=8 model.encoder.rank=9": "must be at most 7: the input matrix of layer 1 is 1024 x 8",
    "'model.encoder={size: 1, rank: 1, bidirectional: none}'": "at most 0: the hidden matrix of layer 1 is 4 x 1",
}
"""Overrides, and the words with which they are refused."""


@pytest.mark.parametrize(("changes", "expected"), TOGETHER.items())
def test_values_that_do_not_go_together(tmp_path: Path, changes: str, expected: str) -> None:
    (line,) = complaints(tmp_path, MINIMAL, *shlex.split(changes))
    assert expected in line


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"name: x\noutput: \xe9\n")
    with pytest.raises(InputError, match=r"latin\.yaml:2: not valid UTF-8"):
        recipes.load_recipe(latin)
    with pytest.raises(InputError, match=r"mine\.yaml: no such recipe; shipped recipes: best, .*tatoeba"):
        recipes.load_recipe(tmp_path / "mine.yaml")
    with pytest.raises(InputError, match=r"no such recipe; did you mean the shipped recipe multi30k\?"):
        recipes.load_recipe("recipes/multi30.yaml")
    with pytest.raises(InputError, match="is a folder; give a recipe, which is a YAML file"):
        recipes.load_recipe(tmp_path)
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(100_000_000)
    with pytest.raises(InputError, match=r"large\.yaml: 100\.0 MB is too large for a recipe"):
        recipes.load_recipe(tmp_path / "large.yaml")
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(InputError, match=r"pipe\.yaml: not a regular file"):
        recipes.load_recipe(tmp_path / "pipe.yaml")


def test_find_recipe_prefers_a_file_to_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes.find_recipe("iwslt") == recipes.shipped_recipes()["iwslt"]
    (tmp_path / "best").mkdir()
    assert recipes.find_recipe("best") == recipes.shipped_recipes()["best"]
    (tmp_path / "iwslt").write_text(MINIMAL)
    assert recipes.find_recipe("iwslt") == Path("iwslt")


def test_shipped_recipes_from_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "econmt"
    (installed / "_recipes").mkdir(parents=True)
    (installed / "_recipes" / "only.yaml").write_text(MINIMAL)
    monkeypatch.setattr("econmt.config.recipe.__file__", str(installed / "config" / "recipe.py"))
    assert recipes.shipped_recipes() == {"only": installed / "_recipes" / "only.yaml"}


@pytest.mark.parametrize("name", sorted(recipes.shipped_recipes()))
def test_text_of_a_recipe_reads_back(name: str) -> None:
    recipe = recipes.load_recipe(name)
    for changed_only in (False, True):
        text = recipes.recipe_text(recipe, changed_only=changed_only)
        assert recipes.parse_recipe(text, "again") == recipe
    assert "max_updates" in recipes.recipe_text(recipe)


def test_changed_only_leaves_out_the_defaults(tmp_path: Path) -> None:
    recipe = recipes.load_recipe(
        write(tmp_path, MINIMAL), ["training.optimizer.betas=[0.9, 0.98]", "model.encoder.size=512"]
    )
    assert recipes.recipe_text(recipe, changed_only=True) == MINIMAL.replace(
        "  target: no\n  train: [text/train]", "  target: no\n  train:\n    - text/train"
    ).replace("  max_updates: 10", "  optimizer:\n    betas:\n      - 0.9\n      - 0.98\n  max_updates: 10")


def test_differing_keys_are_dotted_and_complete(tmp_path: Path) -> None:
    file = write(tmp_path, MINIMAL)
    old = recipes.load_recipe(file)
    assert recipes.differing_keys(old, recipes.load_recipe(file)) == []
    new = recipes.load_recipe(
        file, ["training.seed=2", "model.dropout={output: 0.5}", "data.subwords={type: words, source: 9}"]
    )
    changed = {key: (before, after) for key, before, after in recipes.differing_keys(old, new)}
    assert changed["training.seed"] == (1, 2)
    assert changed["model.dropout"] == (0.0, None)
    assert changed["model.dropout.output"] == (None, 0.5)
    assert changed["data.subwords.type"] == ("bpe", "words")
    assert changed["data.subwords.size"] == (8000, None)
    assert changed["data.subwords.source"] == (None, 9)
    assert not any(key.startswith("training.optimizer") for key in changed)


CHARACTERS = st.characters(exclude_categories=["Cs", "Cc", "Cf", "Zl", "Zp"], exclude_characters="/\\~.")
TEXT = st.text(CHARACTERS, min_size=1, max_size=8)
"""What can be printed and is a path without the language suffix."""


@given(
    name=TEXT, source=st.sampled_from(["no", "1e3", "0x1F", "null", "~", "true", "1:30", "010", "2001-01-01"])
)
def test_text_that_looks_like_something_else_reads_back(name: str, source: str) -> None:
    data = {"source": source, "target": name, "train": [name], "valid": source}
    recipe = recipes.Recipe.model_validate({"name": name, "output": source, "data": data, "training": {}})
    assert recipes.parse_recipe(dump_yaml(recipe.model_dump(mode="json")), "again") == recipe


@pytest.mark.parametrize("size", ["4GiB", "auto", "512 MiB", "1.5GB", "123456"])
def test_memory_budget_is_kept_as_it_was_written(size: str) -> None:
    recipe = recipes.load_recipe("quickstart", [f"training.memory_budget={size}"])
    assert recipe.training.memory_budget == size
    assert recipes.parse_recipe(recipes.recipe_text(recipe), "again") == recipe


def test_the_largest_rank_is_the_last_that_saves() -> None:
    for rows, columns in itertools.product(range(1, 9), range(1, 9)):
        best = largest_rank(rows, columns)
        assert best == 0 or best * (rows + columns) < rows * columns
        assert (best + 1) * (rows + columns) >= rows * columns
    assert largest_rank(1024, 256) == 204


def test_ranks_up_to_the_largest_are_taken(tmp_path: Path) -> None:
    loaded = recipes.load_recipe(
        write(tmp_path, MINIMAL),
        ["model.encoder.rank=204", "model.encoder.bidirectional=none", "model.encoder.size=256"],
    )
    assert (loaded.model.encoder.rank, loaded.model.decoder.rank) == (204, None)


def test_of_very_many_errors_some_are_told(tmp_path: Path) -> None:
    path = tmp_path / "many.yaml"
    path.write_text("".join(f"unknown{number}: 1\n" for number in range(5_000)))
    with pytest.raises(InputError) as caught:
        recipes.load_recipe(path)
    lines = caught.value.lines
    assert len(lines) == 51
    assert lines[-1].endswith(" more")
    assert all(str(path) in line for line in lines)


@pytest.mark.parametrize(("coverage", "fits"), [(0.979, False), (0.98, True), (0.9995, True), (1.0, True)])
def test_characters_are_covered_as_sentencepiece_can(tmp_path: Path, coverage: float, fits: bool) -> None:
    change = [f"data.subwords={{type: bpe, size: 60, character_coverage: {coverage}}}"]
    if fits:
        recipes.load_recipe("quickstart", change)
        text = ["abc abd xyz xyy", "cba dba zyx"] * 20
        SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_prefix=str(tmp_path / "subwords"),
            vocab_size=12,
            character_coverage=coverage,
            minloglevel=9,
        )
        return
    with pytest.raises(InputError, match=r"character_coverage: must be at least 0\.98"):
        recipes.load_recipe("quickstart", change)


def test_keys_of_former_options_count_with_their_defaults_only(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    text = recipes.find_recipe("iwslt").read_text()
    old = text.replace("    type: additive ", "    use_prev_word: false\n    type: additive ", 1)
    old = old.replace("  attention: ", "  lhuc: none\n  attention: ", 1)
    assert old != text
    file.write_text(old)
    assert recipes.load_recipe(file) == recipes.load_recipe("iwslt")
    file.write_text(old.replace("use_prev_word: false", "use_prev_word: true"))
    line = old.split("\n").index("    use_prev_word: false") + 1
    with pytest.raises(InputError) as caught:
        recipes.load_recipe(file, ["model.dropout={states: 0.1}"])
    assert str(caught.value).split("\n") == [
        f"{file}:{line}: model.attention.use_prev_word is no longer supported; remove it, and train models that have it "
        "anew",
        "override 'model.dropout={states: 0.1}': model.dropout.states is no longer supported; remove it, and train models "
        "that have it anew",
    ]
    told = r"optimizer.name nag is no longer supported; train with sgd or nadam;"
    with pytest.raises(InputError, match=told):
        recipes.load_recipe("iwslt", ["training.optimizer.name=nag"])
    with pytest.raises(InputError, match=r"attention.type mhdot is no longer supported; use additive"):
        recipes.load_recipe("iwslt", ["model.attention.type=mhdot"])


@pytest.mark.parametrize("key", REMOVED_KEYS)
def test_keys_that_left_are_read_at_their_defaults_and_told_otherwise(key: str) -> None:
    default, advice = REMOVED_KEYS[key]
    for value in (default, "other"):
        tree: dict[str, Any] = {}
        section = tree
        *sections, name = key.split(".")
        for part in sections:
            section = section.setdefault(part, {})
        section |= {name: value, "kept": 1}
        told = remove_keys(tree)
        assert told == ({} if value == default else {key: f"is no longer supported; {advice}"})
        assert section == ({"kept": 1} if value == default else {name: value, "kept": 1})
