"""A batch of nothing gives results and gradients without values, or of zeros; no kernel needs a row."""

from __future__ import annotations

import pytest

from econmt_ops.core.chunks import STASHES
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.lstm import triton as lstm
from tests.ops.empty import check_empty_rows, check_nothing, thorough
from tests.ops.layouts import problems, variants

PROBLEMS = dict(problems("cpu"))
NAMES = [name for name, each in variants() if each == "triton"]


def options_of(problem: str) -> list[dict[str, str]]:
    """Returns the options of every way in which the kernels run."""
    traits = implementations_of(PROBLEMS[problem].function.__name__)["triton"].traits
    return [{"stash": stash} for stash in STASHES] if traits.takes_stash else [{}]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("problem", [thorough(name) for name in NAMES])
def test_nothing_is_computed_of_nothing(problem: str, device: str) -> None:
    for options in options_of(problem):
        check_nothing(problem, "triton", device, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "problem",
    [thorough(name) for name in NAMES if name.startswith(("lstm", "bidirectional_lstm"))],
)
def test_nothing_is_computed_of_nothing_step_by_step(
    problem: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU in IEEE float32, which no launch for a layer serves."""
    monkeypatch.setattr(lstm, "products_of", lambda *_: None)
    for options in options_of(problem):
        check_nothing(problem, "triton", device, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "problem", [name for name in NAMES if PROBLEMS[name].arguments.get("lengths") is not None]
)
def test_rows_of_length_0(problem: str, device: str) -> None:
    for options in options_of(problem)[:2]:
        check_empty_rows(problem, "triton", device, **options)
