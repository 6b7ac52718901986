"""Pipelines of two and three processes compute what one process does."""

from __future__ import annotations

import pytest

from tests.unit.parallel import pipeline_checks
from tests.unit.parallel.group import Group


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "check",
    [
        pipeline_checks.language_model,
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
