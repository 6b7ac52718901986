"""What a verb that trains or translates on a CPU does not need, it does not load: each of these takes tens of MB."""

from __future__ import annotations

import pytest

from tests.conftest import run_python


def test_verbs_leave_triton_the_compiler_and_matplotlib_alone() -> None:
    code = """
import sys
import econmt.cli.train, econmt.cli.translate, econmt.cli.score
print("loaded", *({"triton", "torch._dynamo", "torch._inductor", "matplotlib", "tensorboard"} & set(sys.modules)))
"""
    assert run_python(code).stdout.split() == ["loaded"]


@pytest.mark.slow
def test_measuring_a_step_leaves_the_compiler_alone() -> None:
    code = """
import sys, torch
from econmt_memory.measure.tracker import Tracker
weight = torch.ones(4, 4, requires_grad=True)
tracker = Tracker(torch.device("cpu"))
with tracker.recording():
    tracker.begin("forward")
    (weight @ weight).sum().backward()
print(tracker.flops.total() > 0, *({"sympy", "torch._dynamo", "triton"} & set(sys.modules)))
"""
    assert run_python(code).stdout.split() == ["True"]
