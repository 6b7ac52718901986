"""Results do not depend on how the arguments and the incoming gradients lie in memory."""

from __future__ import annotations

import pytest
from torch.utils._pytree import tree_leaves

from econmt_ops.dispatch.traits import implementations_of
from tests.ops.layouts import LAYOUTS, check_layouts, ops, problems, tensor_parameters, variants


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
    found = implementations_of(problems("cpu")[problem].function.__name__)[implementation]
    if device not in found.traits.devices or not found.traits.is_available():
        pytest.skip(f"{implementation} does not run on this {device}")
    check_layouts(problem, implementation, shift, device)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("problem", [name for name, each in variants() if each == "compiled"])
def test_layouts_change_no_result_of_compiled_steps(problem: str, device: str) -> None:
    check_layouts(problem, "compiled", 0, device)
