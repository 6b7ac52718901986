"""Shipped recipes, groups of options that follow the recipe's schema, and screens that fit 80 columns."""

from __future__ import annotations

import os
import pty
import re
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import pytest
import typer
from pydantic import Field

from econmt.cli.main import COMMANDS
from econmt.config import limits
from econmt.config.recipe import load_recipe, parse_recipe, shipped_recipes
from econmt.data.files import notice
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
from econmt.parallel.rank_environment import RankEnvironment
from tests.golden import assert_golden
from tests.unit.cli.conftest import Call, Ended
from tests.unit.cli.test_refusals import refused
from tests.unit.training.tiny import write_recipe

NAMES = {"quickstart", "iwslt", "multi30k", "tatoeba", "laws-en-fr", "groundhog", "best", "gnmt", "student"}
NAMES |= {"ptb", "wikitext2", "wikitext2-awd", "docs-ten"}


def test_list_has_a_row_for_each_recipe(call: Call) -> None:
    rows = call("recipes", "list").out.splitlines()
    assert {row.split()[0] for row in rows if not row.startswith(" ")} == NAMES
    place = next(number for number, row in enumerate(rows) if row.startswith("multi30k"))
    assert rows[place].endswith("en-de multi30k/train")
    assert "image captions" in rows[place + 1]


def test_show_resolves_overrides(call: Call) -> None:
    done = call("recipes", "show", "iwslt", "training.batch.size=256")
    recipe = parse_recipe(done.out, "shown")
    assert recipe == load_recipe("iwslt", ["training.batch.size=256"])
    assert "threads: null" in done.out
    changed = call("recipes", "show", "iwslt", "training.batch.size=256", "--changed-only").out
    assert parse_recipe(changed, "shown") == recipe
    assert "threads" not in changed
    assert len(changed.splitlines()) < len(done.out.splitlines())


def test_copy_keeps_what_is_there(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("recipes", "copy", "tatoeba").out == "tatoeba.yaml\n"
    assert (tmp_path / "tatoeba.yaml").read_bytes() == shipped_recipes()["tatoeba"].read_bytes()

    (tmp_path / "mine.yaml").write_text("precious")
    refused(call("recipes copy tatoeba mine.yaml"), "mine.yaml: exists already")
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    assert call("recipes", "copy", "tatoeba", "mine.yaml", "--force").code == 0
    assert (tmp_path / "mine.yaml").read_bytes() == shipped_recipes()["tatoeba"].read_bytes()

    (tmp_path / "folder").mkdir()
    assert call("recipes", "copy", "best", "folder").out == "folder/best.yaml\n"


def test_validate_tells_all_complaints(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("name: 3\noutput: x\n")
    done = call("recipes", "validate", "best", "bad.yaml", "groundhog")
    assert done.code == 2
    assert done.lines == ["best: ok (iwslt15-en-vi-best)", "groundhog: ok (iwslt15-en-vi-groundhog)"]
    assert done.err.splitlines() == [
        "econmt: error: bad.yaml:1: name: expected text, found 3",
        "econmt: error: bad.yaml:1: data: missing; text, subwords and filters",
        "econmt: error: bad.yaml:1: training: missing; optimisation, batches and checkpoints",
    ]
    assert call("recipes", "validate", *shipped_recipes().values()).code == 0


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_key_of_a_shipped_recipe_has_a_comment(name: str) -> None:
    lines = shipped_recipes()[name].read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert f"#   econmt train {name}" in lines
    bare = [line for line in lines if re.match(r" *[a-z_]+:", line) and not re.search(r" # \S", line)]
    assert bare == []
    sections = {"name", "output", "data", "model", "training"}
    sections |= {"decoding"} if load_recipe(name).task == "translation" else set()
    assert sections <= {line.partition(":")[0] for line in lines}


def test_the_iwslt_recipe_is_the_model_of_the_paper() -> None:
    recipe = load_recipe("iwslt")
    model, training = recipe.model, recipe.training
    assert (model.embedding, model.attention.type, model.attention.size) == (512, "additive", 512)
    assert (model.encoder.layers, model.encoder.size, model.encoder.bidirectional) == (2, 512, "bottom")
    assert (model.decoder.layers, model.decoder.size, model.decoder.input_feeding) == (2, 512, True)
    assert (training.batch.type, training.batch.size, training.bucket_width) == ("sentence", 128, 10)
    assert (training.optimizer.name, training.optimizer.learning_rate) == ("adam", 3e-4)
    assert training.early_stopping.metric == "bleu"
    assert training.early_stopping.max_num_checkpoint_not_improved == 5
    subwords = recipe.data.subwords.model_dump(exclude_defaults=True)
    assert subwords == {"type": "words", "source": 17191, "target": 7709}


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
    largest = {"-n": 9, "--seed": limits.SEED, "-b": limits.BEAM, "--batch": limits.TRANSLATED}
    for name, most in largest.items():
        run(f"-n 1 {name} {most}")
        with pytest.raises(USAGE):
            run(f"-n 1 {name} {most + 1}")


def test_values_beyond_bounds_and_unknown_choices_are_refused() -> None:
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


HELP = [
    *([name] for name in COMMANDS),
    *(["bench", name] for name in ("select", "training")),
    *(["recipes", name] for name in ("list", "copy", "show", "validate")),
]


def too_long(text: str) -> list[str]:
    """Lines of more than 80 cells; colours take none."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return [line for line in re.split("[\r\n]", plain) if len(line) > 80]


def check(ended: Ended) -> None:
    """A command has succeeded, and bars and tables fit; of its talk each message is a line, which a terminal breaks."""
    assert ended.code == 0, ended.err
    assert not too_long(ended.out)
    assert not too_long(re.sub("econmt: .*", "", ended.err))


@pytest.fixture(params=["pipe", "terminal"])
def screen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tables and bars take for a terminal of 80 columns, or a pipe."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if request.param == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")


@pytest.mark.parametrize("words", [[], *HELP], ids=" ".join)
def test_help(call: Call, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = call(*words, "--help")
    assert (ended.code, ended.err) == (0, "")
    assert not too_long(ended.out)
    assert "..." not in ended.out.partition("Commands:")[2], "summaries of commands are too long"
    if words not in ([], ["recipes"]):
        assert any(line.strip().startswith(f"econmt {words[0]} ") for line in ended.lines), "no example"


@pytest.mark.usefixtures("screen")
def test_tables_of_models(
    call: Call, text: Path, word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").symlink_to(text)
    (tmp_path / "model").symlink_to(word_model)
    recipe = write_recipe(Path("reverse.yaml"), Path("text"), Path("run"))
    source, target = "text/test.src", "text/test.trg"
    for words in (
        ("prepare", recipe, "data.prepared=store"),
        ("train", recipe, "data.prepared=store", "--dry-run"),
        ("info", "model"),
        ("translate", "-m", "model", "-i", source, "-o", "translated"),
        ("score", "-m", "model", "-s", source, "-t", target, "-o", "scores"),
        ("average", "-m", "model", "-n", 2, "-o", "averaged"),
        ("export", "model", "exported"),
        ("recipes", "list"),
    ):
        ended = call(*words)
        check(ended)
        assert words[-1] not in ("averaged", "exported") or ended.lines[-1] == words[-1]


def test_the_whole_description_of_a_dry_run(
    call: Call, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECONMT_CACHE", "cache")
    (tmp_path / "text").symlink_to(text)
    recipe = write_recipe(Path("reverse.yaml"), Path("text"), Path("run"))
    options = "--dry-run data.max_length=5 training.max_epochs=3 data.test=text/test"
    told = call("train", recipe, *options.split()).succeeded().out
    assert "InputFeedingDecoder" in told
    assert_golden("dry-run", re.sub(r"^TranslationModel.*?^\)\n", "", told, flags=re.DOTALL | re.MULTILINE))
    assert os.environ["ECONMT_CACHE"] == "cache"


@pytest.mark.parametrize("restarts", [0, 1])
def test_options_of_training_reach_those_whom_they_concern(
    call: Call, word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """A dry run plans for all processes, one process may be restarted, and restarted ones begin no new run."""
    planned, launched, given = list[int](), list[tuple[str, int, int]](), list[dict[str, Any]]()
    for name, fake in (
        ("cli.train.first_plan", lambda *arguments: planned.append(arguments[-1].size)),
        ("cli.train.run_recipe", lambda *_, **named: given.append(named)),
        ("cli.train.communicator_of", lambda *_: nullcontext(SimpleNamespace(is_rank_zero=False))),
        ("parallel.launch.launch", lambda words, *numbers: launched.append((words[0], *numbers)) or 7),
    ):
        monkeypatch.setattr(f"econmt.{name}", fake)
    monkeypatch.setattr("econmt.errors.quiet", False)  # which -q changes
    recipe = word_model / "recipe.yaml", f"output={tmp_path / 'run'}"
    train = "-q train --overwrite-output --verify", *recipe
    assert call(*train, "--processes", 2, "--dry-run").code == 0
    assert call(*train, "--processes", 1, "--max-restarts", 2).code == 7
    environment = RankEnvironment(0, 1, 0, 1, restarts)
    monkeypatch.setattr("econmt.cli.train.rank_environment", lambda: environment)
    call(*train).succeeded()
    assert (planned, launched) == ([2], [("-q", 1, 2)])
    assert [(each["overwrite_output"], each["verify"]) for each in given] == [(restarts == 0, True)]
    call("train --resume-with-changes", *recipe).succeeded()
    assert [each["resume_with_changes"] for each in given] == [False, True]


def test_talk_is_broken_on_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "a warning that goes on and on " * 5
    notice(line)
    assert capsys.readouterr().err == f"econmt: {line}\n"
    reading, writing = pty.openpty()
    with os.fdopen(writing, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        notice(line + "/a/" + 100 * "b")
        shown = b""
        while b"b\r\n" not in shown:  # a terminal hands over what it has by now, which may be a part
            shown += os.read(reading, 10_000)
    os.close(reading)
    *broken, name = shown.decode().split("\r\n")[:-1]
    assert len(broken) > 1
    assert max(map(len, broken)) <= 80
    assert name.strip() == "/a/" + 100 * "b"
