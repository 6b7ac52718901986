"""A batch of nothing gives results and gradients without values, or of zeros; no implementation needs a row."""

from __future__ import annotations

import pytest

from econmt_ops.core.chunks import STASHES
from econmt_ops.dispatch.traits import implementations_of
from tests.ops.empty import check_empty_rows, check_nothing, thorough
from tests.ops.layouts import problems, variants

PROBLEMS = problems("cpu")
each_variant = pytest.mark.parametrize(
    ("problem", "implementation"),
    [thorough(*each) for each in variants() if each[1] not in ("triton", "compiled")],
)


def options_of(problem: str, implementation: str, device: str) -> list[dict[str, str]]:
    """Returns the options of every way in which an implementation runs; skips a test of one that cannot run."""
    traits = implementations_of(PROBLEMS[problem].function.__name__)[implementation].traits
    if device not in traits.devices or not traits.is_available():
        pytest.skip(f"{implementation} does not run on this {device}")
    return [{"stash": stash} for stash in STASHES] if traits.takes_stash else [{}]


@each_variant
def test_nothing_is_computed_of_nothing(problem: str, implementation: str, device: str) -> None:
    for options in options_of(problem, implementation, device):
        check_nothing(problem, implementation, device, **options)


@pytest.mark.sampled(20)
@each_variant
def test_rows_of_length_0(problem: str, implementation: str, device: str) -> None:
    if PROBLEMS[problem].arguments.get("lengths") is None:
        pytest.skip("takes no lengths")
    for options in options_of(problem, implementation, device):
        check_empty_rows(problem, implementation, device, **options)
