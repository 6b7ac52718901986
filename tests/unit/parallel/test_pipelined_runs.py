"""Pipelines compute, learn, validate and save what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest

from econmt.config.recipe import load_recipe
from econmt.engine.communicator import Communicator
from econmt.errors import InputError
from tests.unit.parallel import jobs, pipeline_checks
from tests.unit.parallel.group import Group
from tests.unit.parallel.test_data_parallel import assert_like_one, recipe_in

TEXT = ("model.layers=4", "training.averaging={start: non-monotone, non_monotone_interval: 1}")
PAIRS = (
    "model.decoder={layers: 3, size: 8, input_feeding: false}",
    "model.encoder={layers: 3, size: 8, bidirectional: bottom}",
    "training.schedule={name: plateau-reduce, reduce_num_not_improved: 1}",
)


def train(group: Group, ranks: int, path: Path, text: Path, *overrides: str, name: str = "run") -> Path:
    """Trains with so many ranks, layers divided evenly; with one in this process."""
    output = path.parent / name
    given = [*overrides, f"output={output}"]
    if ranks == 1:
        said = [jobs.run(Communicator(), path, text, given)]
    else:
        said = group.run(ranks, pipeline_checks.run_evenly, path, text, given)
        assert "pipeline: " in said[0]
    assert "training ended" in said[0], said[0]
    return output


@pytest.mark.slow
def test_a_language_model_goes_on_with_a_pipeline_and_without(
    group: Group, lines: Path, tmp_path: Path
) -> None:
    path = recipe_in(tmp_path, lines, language_model=True)
    one = train(group, 1, path, lines, *TEXT, "training.max_updates=8", name="one")
    for parts in ((2, 1), (1, 3)):
        for number, ranks in enumerate(parts, 1):
            stop = f"training.max_updates={4 * number}"
            name = "-".join(map(str, parts))
            folder = train(group, ranks, path, lines, *TEXT, stop, f"parallel.pipeline={ranks}", name=name)
        assert_like_one(folder, one)


@pytest.mark.slow
def test_pipelines_share_the_rows_of_a_batch(group: Group, text: Path, lines: Path, tmp_path: Path) -> None:
    both = "parallel.pipeline=2"
    path = recipe_in(tmp_path, text)
    one = train(group, 1, path, text, *PAIRS, name="one")
    assert_like_one(train(group, 4, path, text, *PAIRS, both, name="four"), one)
    path = recipe_in(tmp_path, lines, language_model=True)
    alone = train(group, 1, path, lines, *TEXT, name="alone")
    assert_like_one(train(group, 4, path, lines, *TEXT, both, name="shared"), alone)


def test_which_ranks_make_pipelines_of_how_many_stages(group: Group, text: Path, tmp_path: Path) -> None:
    path = recipe_in(tmp_path, text)
    given = [*PAIRS, "parallel.pipeline=2"]
    alone = jobs.run(Communicator(), path, text, given)
    assert "parallel.pipeline 2: 1 process cannot be divided into pipelines of 2" in alone
    said = group.run(3, pipeline_checks.run_evenly, path, text, given)
    assert all("parallel.pipeline 2: 3 processes cannot be divided" in each for each in said)
    given = [*PAIRS, "model.encoder.layers=1", "parallel.pipeline=3"]
    assert load_recipe("quickstart", given).parallel.pipeline == 3
    with pytest.raises(InputError, match=r"model\.decoder\.layers: 3"):
        load_recipe("quickstart", [*given[:-1], "parallel.pipeline=4"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(pipeline_checks.language_model, marks=pytest.mark.slow),
        pipeline_checks.decoder_without_input_feeding,
        pipeline_checks.decoder_with_input_feeding,
        pipeline_checks.bfloat16,
        pipeline_checks.float16,
    ],
)
def test_a_pipeline_computes_what_one_process_does(
    ranks: int, check: pipeline_checks.Check, group: Group
) -> None:
    group.run(ranks, check)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_a_table_is_looked_up_in_where_its_rows_are(ranks: int, group: Group) -> None:
    group.run(ranks, pipeline_checks.divided_table)
    group.run(ranks, pipeline_checks.tied_tables)
