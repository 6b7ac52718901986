"""Limits of GPUs, and kernels that depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import econmt_ops  # noqa: F401  which adds the ops
from econmt_ops.backends import triton
from econmt_ops.backends.cuda.library import is_hopper
from econmt_ops.dispatch import device_limits
from econmt_ops.dispatch.device_limits import H200, limits_of
from econmt_ops.dispatch.rule import rule, rules_only
from tests.ops.simulated_gpu import simulated_gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def _small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card of 40 multiprocessors and compute capability 8.6."""
    sizes = {"shared_memory_per_block_optin": 101_376, "total_memory": 12 << 30}
    properties = SimpleNamespace(multi_processor_count=40, major=8, minor=6, **sizes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device_limits._of_gpu.cache_clear()
    yield
    device_limits._of_gpu.cache_clear()


@pytest.mark.usefixtures("_small_gpu")
def test_limits_are_those_of_the_gpu() -> None:
    assert limits_of(CUDA) == (40, 101_376, (8, 6), 12 << 30)
    assert not is_hopper(CUDA)
    assert limits_of(CPU) == H200


def test_a_simulated_gpu_has_no_more_than_the_real_one() -> None:
    with simulated_gpu(capability=(7, 5), multiprocessors=24, memory=1 << 40):
        assert limits_of(CPU) == (24, 65_536, (7, 5), H200.memory)
        with simulated_gpu(multiprocessors=40):
            assert limits_of(CPU).multiprocessors == 24
    assert limits_of(CPU) == H200


OPS = ("lstm", "attentional_lstm", "linear_cross_entropy", "additive_attention", "linear_recurrence", "gru")


def of_a_gpu(op: str) -> str:
    """The implementation that an estimate for a GPU assumes."""
    with rules_only("cuda"):
        return rule(op, "cuda", torch.bfloat16)


@pytest.mark.parametrize("op", OPS)
def test_cards_before_ampere_and_of_amd_run_pytorchs_operations(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert of_a_gpu(op) == "triton"
    with simulated_gpu(capability=(7, 5)):
        assert triton.why_unused() == "they need compute capability 8.0, and this GPU has 7.5"
        assert of_a_gpu(op) in ("reference", "recompute", "chunk")
    with simulated_gpu(capability=(8, 6)):
        assert triton.why_unused() == ""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert triton.why_unused() == "they are made for NVIDIA's GPUs and are not tested with ROCm"
    assert of_a_gpu(op) in ("reference", "recompute", "chunk")


@pytest.mark.usefixtures("_small_gpu")
def test_a_gpu_has_kernels_only_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton.is_available()
    assert triton.runs_on(CUDA)
    with simulated_gpu(capability=(7, 5)):
        assert not triton.is_available()
        assert not triton.runs_on(CUDA)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not triton.runs_on(CUDA)
