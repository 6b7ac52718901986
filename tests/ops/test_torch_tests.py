"""The program that runs PyTorch's own tests against econmt_ops, on tests of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import run_python

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
