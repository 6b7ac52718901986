"""The recipe of a student: what it takes from its teacher, its text, its own file and the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from econmt.config.recipe import Recipe, load_recipe
from econmt.errors import InputError
from econmt_distill.student import StudentChoice

TEACHER = load_recipe("multi30k", ["data.source=fr", "data.target=cs", "data.valid=v", "data.test=t"])


def load(choice: StudentChoice, teacher: Recipe | None = TEACHER, ratio: float = 1.0) -> Recipe:
    return choice.load(Path("out/model"), "text/train", teacher, {"source": "en"}, ratio)


def test_languages_and_text_are_the_teachers() -> None:
    recipe = load(StudentChoice("student", also=("more",)))
    data = recipe.pairs
    assert (data.source, data.target, data.valid, data.test) == ("fr", "cs", "v", "t")
    assert (recipe.output, data.train) == ("out/model", ["text/train", "more"])
    assert data.empty_lines == "skip"
    given = load(StudentChoice("student", ("data.target=de", "data.test=null"), valid="w")).pairs
    assert (given.source, given.target, given.valid, given.test) == ("fr", "de", "w", None)


def test_filters_are_the_users_the_recipes_or_those_of_distillation(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match=r"give data.target=LANGUAGE and --valid PREFIX$"):
        load(StudentChoice("student"), None)
    data = load(StudentChoice("student", ("data.target=es",), valid="dev"), None).pairs
    assert (data.source, data.target, data.valid, data.test) == ("en", "es", "dev", None)
    own = tmp_path / "own.yaml"
    own.write_text((Path(__file__).parents[3] / "recipes/student.yaml").read_text())
    data = load(StudentChoice(str(own)), None).pairs
    assert (data.source, data.target, data.valid) == ("en", "de", "multi30k/valid")
