"""Benchmarks of the replacements of torch.nn's layers, and the script that runs PyTorch's tests against them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import econmt_ops
from scripts.bench import drop_in, resets
from scripts.tests.conftest import Measured
from tests.conftest import ROOT, econmt_environment


def test_all_ways_to_reset_compute_the_same() -> None:
    torch.manual_seed(0)
    ours, theirs = econmt_ops.LSTM(3, 4, batch_first=True), nn.LSTM(3, 4, batch_first=True)
    theirs.load_state_dict(ours.state_dict())
    begins, inputs = torch.rand(5, 7) < 0.3, torch.randn(5, 7, 3)
    made = {name: way(inputs, begins) for name, way in resets.ways_of(ours, theirs, begins).items()}
    assert not torch.allclose(made["none"], made["resets"])
    for name in ("resets, on CPU", "padded", "packed", "stepped"):
        torch.testing.assert_close(made[name], made["resets"])
    torch.testing.assert_close(made["none"], made["torch, none"])


def test_the_table_of_resets(measured: Measured) -> None:
    sizes = "--batch 4 --steps 6 --hidden 8 --rate 0.2 --device cpu --precision ieee --turns 2"
    rows = measured("resets", *sizes.split())
    assert [row["way"] for row in rows] == [
        *("resets", "resets, on CPU", "none", "padded", "packed", "stepped", "torch, none")
    ]
    assert rows[0]["x resets"] == 1.0
    assert all(float(row["error"]) < 1e-6 for row in rows if "none" not in row["way"])


def test_the_table_of_modules(monkeypatch: pytest.MonkeyPatch, measured: Measured) -> None:
    cases = (drop_in.Case("LSTM", 2, 4, 3, 2, True), drop_in.Case("GRU", 3, 4, 5, ragged=True))
    monkeypatch.setattr(drop_in, "CASES", cases)
    first, second = measured("drop-in", "--turns", "2")
    assert next(iter(first.values())) == "LSTM 2 x 4 x 3 x 2 both ways"
    assert next(iter(second.values())) == "GRU 3 x 4 x 5 x 1 ragged"
    assert first["recompute, MB"] > 0


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
    done = subprocess.run(
        [sys.executable, "-m", "scripts.torch_tests", str(tmp_path)],
        cwd=ROOT,
        env=econmt_environment({"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}),
        capture_output=True,
        text=True,
        check=False,
    )
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
