"""What the stages of a distillation are made from: records of inputs, recipes of students, forms of students."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from econmt.config.recipe import Recipe, load_recipe
from econmt.errors import InputError
from econmt_distill import inputs, packing
from econmt_distill.inputs import StageInputs, differences, read_inputs, take_inputs, write_record
from econmt_distill.packing import PackedStudent, pack
from econmt_distill.student import StudentChoice


def take(folder: Path, recorded: StageInputs | None = None, **settings: str) -> StageInputs:
    files = {"--source": folder / "a", "--target": folder / "b"}
    return take_inputs(settings, {name: path for name, path in files.items() if path.exists()}, recorded)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "ab":
        (tmp_path / name).write_text(f"text of {name}\n")
    return tmp_path


def test_files_are_described_by_their_content(folder: Path) -> None:
    made = take(folder, size="3")
    assert made.settings == {"size": "3"}
    assert list(made.files) == ["--source", "--target"]
    for file, name in zip(made.files.values(), "ab", strict=True):
        digest = hashlib.sha256(f"text of {name}\n".encode()).hexdigest()
        assert (file.path, file.size, file.sha256) == (str(folder / name), 10, digest)
    write_record(folder / "record", made)
    assert read_inputs(folder / "record", folder) == made
    assert read_inputs(folder / "nothing", folder) is None
    (folder / "record").write_text("{}")
    with pytest.raises(InputError, match=r"record: .*; remove .* and run the command again"):
        read_inputs(folder / "record", folder)


def test_unchanged_files_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    describe = inputs.describe
    monkeypatch.setattr(inputs, "describe", lambda path: read.append(path) or describe(path))
    recorded = take(folder)
    assert read == [folder / "a", folder / "b"]
    assert take(folder, recorded) == recorded
    (folder / "b").write_text("other of b\n"[:10])
    again = take(folder, recorded)
    assert read == [folder / "a", folder / "b", folder / "b"], "the changed one alone"
    assert again.files["--source"] == recorded.files["--source"]
    assert differences(recorded, again) == [f"--target {folder}/b has changed"]
    moved = take_inputs({}, {"--source": (folder / "a").rename(folder / "c")}, recorded)
    assert len(read) == 3
    assert moved.files["--source"].path == str(folder / "c"), "where it is now, for messages"
    assert moved.files["--source"].time == recorded.files["--source"].time


def test_differences_are_told_in_words(folder: Path) -> None:
    first = take(folder, size="3", kind="x")
    assert differences(first, first) == []
    (folder / "b").unlink()
    second = take(folder, kind="y", more="z")
    changed = ["size 3 -> not given", "kind x -> y", "more not given -> z", "--target is not given any more"]
    assert differences(first, second) == changed
    assert differences(second, first)[-1] == f"--target {folder}/b was not given before"
    (folder / "c").write_text("text of c\n")
    other = take_inputs({}, {"--source": folder / "c"}, None)
    moved = StageInputs(settings={}, files=second.files)
    assert differences(moved, other) == [f"--source {folder}/a -> {folder}/c"]


def test_the_digest_is_of_settings_and_content_only(folder: Path) -> None:
    first = take(folder, size="3")
    (folder / "copy").write_text("text of a\n")
    copied = take_inputs({"size": "3"}, {"--source": folder / "copy", "--target": folder / "b"}, None)
    assert copied != first
    assert copied.digest == first.digest
    assert differences(first, copied) == []
    digests = {first.digest, take(folder, size="4").digest, take(folder).digest}
    (folder / "a").write_text("other\n")
    assert len({*digests, take(folder, size="3").digest}) == 4


TEACHER = load_recipe("multi30k", ["data.source=fr", "data.target=cs", "data.valid=v", "data.test=t"])


def load(choice: StudentChoice, teacher: Recipe | None = TEACHER, ratio: float = 1.0) -> Recipe:
    return choice.load(Path("out/model"), "text/train", teacher, {"source": "en"}, ratio)


def test_where_languages_text_and_filters_come_from(tmp_path: Path) -> None:
    recipe = load(StudentChoice("student", also=("more",)))
    data = recipe.pairs
    assert (data.source, data.target, data.valid, data.test) == ("fr", "cs", "v", "t")
    assert (recipe.output, data.train) == ("out/model", ["text/train", "more"])
    assert data.empty_lines == "skip"
    given = load(StudentChoice("student", ("data.target=de", "data.test=null"), valid="w")).pairs
    assert (given.source, given.target, given.valid, given.test) == ("fr", "de", "w", None)
    filters = load(StudentChoice("student")).pairs.filters
    assert (filters.identical, filters.duplicates, filters.max_repeats) == ("drop", "pairs", 3)
    shipped = Path("recipes/student.yaml")
    text = (Path(__file__).parents[3] / shipped).read_text()
    own = tmp_path / "own.yaml"
    own.write_text(text.replace("data:  ", "data:\n  filters: {max_repeats: 7, duplicates: source}\n#", 1))
    filters = load(StudentChoice(str(own))).pairs.filters
    assert (filters.identical, filters.duplicates, filters.max_repeats) == ("drop", "source", 7)
    changes = "data.filters.identical=keep", "data.filters.max_repeats=null"
    filters = load(StudentChoice(str(own), changes)).pairs.filters
    assert (filters.identical, filters.duplicates, filters.max_repeats) == ("keep", "source", None)


@pytest.mark.parametrize(("ratio", "longest"), [(1.0, 3.0), (1.2, 3.6), (0.25, 12.0), (0.0, 100.0)])
def test_lengths_are_compared_with_those_of_the_text(ratio: float, longest: float) -> None:
    assert load(StudentChoice("student"), ratio=ratio).pairs.filters.max_length_ratio == longest


def test_a_shipped_recipe_needs_the_text_of_other_teachers(tmp_path: Path) -> None:
    data = load(StudentChoice("student", ("data.target=es",), valid="dev"), None).pairs
    assert (data.source, data.target, data.valid, data.test) == ("en", "es", "dev", None)
    own = tmp_path / "own.yaml"
    own.write_text((Path(__file__).parents[3] / "recipes/student.yaml").read_text())
    data = load(StudentChoice(str(own)), None).pairs
    assert (data.source, data.target, data.valid) == ("en", "de", "multi30k/valid")


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
