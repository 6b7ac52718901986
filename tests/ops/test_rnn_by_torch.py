"""PyTorch's own tests against econmt_ops: its list of modules, and the program that runs the others."""

from __future__ import annotations

import functools
import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import econmt_ops
from tests.conftest import run_python

pytest.importorskip("expecttest", reason="PyTorch's test tools need expecttest")
each_entry = pytest.mark.parametrize("name", ["LSTM", "GRU"])


@functools.cache
def entry_of(name: str) -> Any:
    """Returns the entry of a module; imported here, since PyTorch's tools import triton, whose interpreter others need."""
    with pytest.MonkeyPatch.context() as patched:
        # PyTorch's tools forbid the whole process to change settings such as allow_tf32, which other tests here do.
        patched.setattr(torch.backends, "disable_global_flags", lambda: None)
        common: Any = importlib.import_module("torch.testing._internal.common_modules")
    return next(each for each in common.module_db if each.module_cls.__name__ == name)


def made(kind: Any, arguments: Any) -> Any:
    torch.manual_seed(2)
    return kind(*arguments.args, **arguments.kwargs)


@each_entry
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_results_on_torchs_inputs(name: str, training: bool, dtype: torch.dtype, device: str) -> None:
    entry, ours = entry_of(name), getattr(econmt_ops, name)
    inputs = entry.module_inputs_func(
        entry, device=device, dtype=dtype, requires_grad=True, training=training
    )
    assert len(inputs) >= 8
    for each in inputs:
        torchs, module = (
            made(kind, each.constructor_input).to(device, dtype) for kind in (entry.module_cls, ours)
        )
        module.load_state_dict(torchs.state_dict())
        module.train(training)
        torchs.train(training)
        given = each.forward_input
        results = []
        for kind in (torchs, module):
            outcome = kind(*given.args, **given.kwargs)
            values = [part for part in tree_leaves(outcome) if isinstance(part, torch.Tensor)]
            total = torch.stack([part.sum() for part in values if part.is_floating_point()]).sum()
            # In eval mode cuDNN's layers, torch's, have no backward pass.
            known = training or device == "cpu"
            results.append((outcome, torch.autograd.grad(total, list(kind.parameters())) if known else ()))
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
        torch.testing.assert_close(results[1], results[0], **tolerance)
        if each.reference_fn is not None:
            expected = each.reference_fn(module, *given.args, **given.kwargs)
            torch.testing.assert_close(module(*given.args, **given.kwargs), expected, **tolerance)


@each_entry
def test_torchs_errors(name: str) -> None:
    entry, ours = entry_of(name), getattr(econmt_ops, name)
    wrong = entry.module_error_inputs_func(
        entry, device="cpu", dtype=torch.float32, requires_grad=False, training=True
    )
    assert len(wrong) >= 2
    for each in wrong:
        arguments = each.module_error_input

        def run(arguments: Any = arguments) -> None:
            module = made(ours, arguments.constructor_input)
            if arguments.forward_input is not None:
                module(*arguments.forward_input.args, **arguments.forward_input.kwargs)

        with pytest.raises(each.error_type, match=each.error_regex):
            run()


@pytest.mark.slow
@pytest.mark.skipif(
    "ECONMT_TORCH_TESTS" not in os.environ, reason="needs PyTorch's folder test in ECONMT_TORCH_TESTS"
)
def test_torchs_own_tests() -> None:
    folder = os.environ["ECONMT_TORCH_TESTS"]
    run = run_python("-W", "ignore", "-m", "tests.ops.torch_tests", folder, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


TESTS = """
import unittest
import torch
from torch import nn
from torch.testing._internal.common_utils import TestCase, no_such_decorator


class TestNN(TestCase):
    @no_such_decorator("reason")
    def test_sizes(self):
        self.assertEqual(nn.LSTM(3, 4)(torch.ones(2, 5, 3))[0].shape, (2, 5, 4))

    def test_both_fail(self):
        self.assertEqual(nn.GRU(3, 4).hidden_size, 5)

    def test_skipped(self):
        self.skipTest("nn.GRU on no device")

    @unittest.skipIf(False, "")
    def test_class(self):
        self.assertEqual(nn.GRU.__module__.partition(".")[0], "PACKAGE")

    def test_something_else(self):
        self.assertEqual(nn.Linear(3, 4).bias, None)
"""


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("package", "status"), [("torch", 1), ("econmt_ops", 0)])
def test_pytorchs_tests_run_with_both_modules(package: str, status: int, tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    (tmp_path / "test_nn.py").write_text(TESTS.replace("PACKAGE", package), encoding="utf-8")
    done = run_python("-m", "tests.ops.torch_tests", tmp_path, check=False)
    lines = {line.split()[2]: line.split()[:2] for line in done.stdout.splitlines()[:-2]}
    outcomes = ["passed", "failed"] if package == "econmt_ops" else ["failed", "passed"]
    assert lines == {
        "TestNN.test_both_fail": ["failed", "failed"],
        "TestNN.test_class": outcomes,
        "TestNN.test_sizes": ["passed", "passed"],
        "TestNN.test_skipped": ["skipped", "skipped"],
    }
    assert done.stdout.splitlines()[-1] == f"{status} of the failed tests pass with torch.nn"
    assert done.returncode == status
