"""Commands whose parameters are groups of options, and options that follow the recipe's schema."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field

from econmt.config import limits
from econmt.decoding.search.options import SearchOptions
from econmt.options.option_groups import (
    RECIPE_FIELDS,
    RecipeKeys,
    argument,
    option,
    recipe_option,
    with_option_groups,
)
from econmt.options.search_options import (
    DrawingKeys,
    HypothesisKeys,
    LineKeys,
    Sampling,
    SearchedModels,
    SearchKeys,
)

USAGE = typer.BadParameter.__bases__[0]


@dataclass(frozen=True)
class Group:
    count: int = option(..., "--count", "-n", help="A number.", min=1, max=9)
    kind: Literal["a", "b"] = option("a", help="A letter.")
    share: Annotated[float, Field(gt=0.0, le=2.0)] = option(1.0)
    seed: limits.Seed = option(1)
    quick: bool = option(False)
    computed: int = field(init=False, default=7)


@with_option_groups
def command(
    context: typer.Context,
    *,
    text: str = argument(...),
    group: Group,
    search: Annotated[
        dict[str, Any],
        RecipeKeys("decoding", ["beam_size", "beam_search_stop", "length_penalty_beta"], {"beam_size": "-b"}),
    ],
    types: list[Literal["x", "y"]] = option(["x", "y"], "--type"),
    plain: Annotated[int, typer.Option(min=0, max=3)] = 2,
    batch: int | None = recipe_option("decoding.batch_size"),
) -> None:
    """Says something."""
    assert plain == 2
    context.obj.append((text, group, search, types, batch))


def run(line: str) -> Any:
    app, said = typer.Typer(add_completion=False), list[Any]()
    app.command()(command)
    app(["words", *line.split()], standalone_mode=False, obj=said)
    return said[0]


def test_a_group_is_made_of_its_options() -> None:
    text, group, search, types, batch = run("-n 3")
    assert (text, group, search, types, batch) == ("words", Group(3), {}, ["x", "y"], None)
    assert type(group.kind) is str
    assert run("-n 3 --quick")[1] == Group(3, quick=True)
    with pytest.raises(USAGE, match="--no-quick"):
        run("-n 3 --no-quick")
    _, group, search, types, batch = run(
        "-n 9 --kind b --share 2 --type y -b 4 --beam-search-stop first --batch 5"
    )
    assert group == Group(9, "b", 2.0)
    assert search == {"beam_size": 4, "beam_search_stop": "first"}
    assert type(search["beam_search_stop"]) is str
    assert (types, batch) == (["y"], 5)
    for name, most in {
        "-n": 9,
        "--seed": limits.SEED,
        "-b": limits.BEAM,
        "--batch": limits.TRANSLATED,
    }.items():
        run(f"-n 1 {name} {most}")
        with pytest.raises(USAGE):
            run(f"-n 1 {name} {most + 1}")


def test_bounds_and_choices() -> None:
    for line, message in (
        ("-n 10", "Invalid value for '--count'"),
        ("-n 1 --kind c", "'c' is not one of 'a', 'b'"),
        ("-n 1 --share 0", "must be more than 0 and at most 2, found 0"),
        ("-n 1 --share nan", "must be more than 0 and at most 2, found nan"),
        ("-n 1 --seed -1", "Invalid value for '--seed'"),
        ("-n 1 -b 0", "Invalid value for '--beam-size'"),
        ("-n 1 --length-penalty-beta inf", "must be at least 0 and at most 1000, found inf"),
        ("-n 1 --batch 0", "Invalid value for '--batch'"),
        ("-n 1 --computed 1", "No such option"),
        ("", "--count"),
    ):
        with pytest.raises(USAGE) as refused:
            run(line)
        assert message in refused.value.format_message()


def test_help_is_that_of_the_recipe() -> None:
    def help_of(declared: Any) -> str:
        return str(declared.metadata["typer"].help)

    assert help_of(recipe_option("decoding.batch_size")) == "Number of sentences translated together."
    assert help_of(recipe_option("decoding.length_penalty_beta")) == "Beta in --length-penalty-alpha."
    assert "at the first finished one" in help_of(recipe_option("decoding.beam_search_stop"))
    assert help_of(recipe_option("decoding.batch_size", help="Lines.")) == "Lines."


def test_every_key_of_the_search_is_an_option_of_translate() -> None:
    groups = (SearchKeys, HypothesisKeys, DrawingKeys, LineKeys)
    keys, *others = (set(group.__metadata__[0].names) for group in groups)  # type: ignore[attr-defined]
    named = {field.name for kind in (Sampling, SearchedModels) for field in fields(kind)}
    elsewhere = {"attention", "avoid", "continuous", "glossary_mode", "split_sentences"}
    assert {f"decoding.{name}" for name in keys} == {
        key for key in RECIPE_FIELDS if key.startswith("decoding.")
    } - {"decoding.batch_size", "decoding.max_input_length"}
    assert keys.union(*others, elsewhere, named - {"models", "checkpoint", "language_model"}) == set(
        SearchOptions.model_fields
    ) | {"top_k"}
