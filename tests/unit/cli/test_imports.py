"""What a verb that trains or translates on a CPU does not need, it does not load: each of these takes tens of MB."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import econmt_environment


def test_verbs_leave_triton_the_compiler_and_matplotlib_alone() -> None:
    code = """
import sys
import econmt.cli.train, econmt.cli.translate, econmt.cli.score
print(*({"triton", "torch._dynamo", "torch._inductor", "matplotlib", "tensorboard"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=econmt_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


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
    done = subprocess.run(
        [sys.executable, "-c", code], env=econmt_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"]
