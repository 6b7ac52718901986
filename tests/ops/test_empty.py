"""Arguments without values, and arguments in any memory layout, give the results and gradients of every op."""

from __future__ import annotations

import pytest
from torch.utils._pytree import tree_leaves

from econmt_ops.core.chunks import STASHES
from econmt_ops.dispatch.traits import implementations_of
from tests.ops.empty import check_empty_rows, check_nothing, thorough
from tests.ops.layouts import LAYOUTS, check_layouts, ops, problems, tensor_parameters, variants

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


@pytest.mark.parametrize("op", ops())
def test_every_op_is_called_with_every_tensor_that_it_takes(op: str) -> None:
    function = ops()[op]
    given = {
        name
        for call in problems("cpu").values()
        if call.function is function
        for name, value in call.arguments.items()
        if any(hasattr(leaf, "stride") for leaf in tree_leaves(value))
    }
    missing = tensor_parameters(function) - given
    assert not missing, f"add a call of {op} with {sorted(missing)} to tests/ops/every_op.py"


@pytest.mark.sampled(20)
@pytest.mark.parametrize("shift", range(len(LAYOUTS)))
@pytest.mark.parametrize(
    ("problem", "implementation"), [each for each in variants() if each[1] not in ("triton", "compiled")]
)
def test_layouts_change_no_result(problem: str, implementation: str, shift: int, device: str) -> None:
    options_of(problem, implementation, device)  # skips what cannot run
    check_layouts(problem, implementation, shift, device)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("problem", [name for name, each in variants() if each == "compiled"])
def test_layouts_change_no_result_of_compiled_steps(problem: str, device: str) -> None:
    check_layouts(problem, "compiled", 0, device)
