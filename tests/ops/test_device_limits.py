"""Limits of GPUs, and smaller cards that are played."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import econmt_ops  # noqa: F401  which adds the ops
from econmt_ops.backends import triton
from econmt_ops.backends.cuda.library import is_hopper
from econmt_ops.dispatch import device_limits
from econmt_ops.dispatch.device_limits import H200, VARIABLE, limits_of, parse, played_text, playing
from econmt_ops.dispatch.rule import rule, rules_only

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def _environment() -> Iterator[None]:
    device_limits._of_environment.cache_clear()
    yield
    device_limits._of_environment.cache_clear()


@pytest.fixture
def _small_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A card of 40 multiprocessors and compute capability 8.6."""
    properties = SimpleNamespace(
        multi_processor_count=40,
        shared_memory_per_block_optin=101_376,
        major=8,
        minor=6,
        total_memory=12 << 30,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _index: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device_limits._of_gpu.cache_clear()
    yield
    device_limits._of_gpu.cache_clear()


def test_limits_are_read() -> None:
    assert parse("") == {}
    assert parse(" multiprocessors=24, shared=99KiB ,memory=8GiB,") == {
        "multiprocessors": 24,
        "shared": 101_376,
        "memory": 8 << 30,
    }
    assert parse("capability=8.9") == {"capability": (8, 9), "shared": 101_376}
    assert parse("capability=8.9,shared=64MiB") == {"capability": (8, 9), "shared": 64 << 20}


@pytest.mark.parametrize(
    "wrong",
    [
        "24",
        "processors=24",
        "multiprocessors=0",
        "multiprocessors=24KiB",
        "shared=",
        "memory=8GB",
        "capability=8",
    ],
)
def test_wrong_limits_are_told(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{VARIABLE}: '{wrong}' is no limit; give some of capability=8.6, "):
        parse(f"shared=1KiB,{wrong}")


@pytest.mark.usefixtures("_environment")
def test_a_card_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_of(CPU) == H200
    with playing("multiprocessors=24,memory=8GiB"):
        assert limits_of(CPU) == H200._replace(multiprocessors=24, memory=8 << 30)
        assert played_text() == f"memory={8 << 30},multiprocessors=24"
        with playing(""):
            assert limits_of(CPU) == H200
        assert limits_of(CPU).multiprocessors == 24
    assert played_text() == ""
    monkeypatch.setenv(VARIABLE, "capability=7.5")
    device_limits._of_environment.cache_clear()
    assert limits_of(CPU)[1:3] == (65_536, (7, 5))
    assert parse(played_text()) == parse("capability=7.5")


@pytest.mark.usefixtures("_small_gpu")
def test_a_card_that_is_played_has_no_more_than_the_real_one() -> None:
    assert limits_of(CUDA) == (40, 101_376, (8, 6), 12 << 30)
    with playing("capability=9.0,multiprocessors=24,memory=80GiB"):
        assert limits_of(CUDA) == (24, 101_376, (9, 0), 12 << 30)
        assert not is_hopper(CUDA)


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
    with playing("capability=7.5"):
        assert triton.why_unused() == "they need compute capability 8.0, and this GPU has 7.5"
        assert of_a_gpu(op) in ("reference", "recompute", "chunk")
    with playing("capability=8.6"):
        assert triton.why_unused() == ""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert triton.why_unused() == "they are made for NVIDIA's GPUs and are not tested with ROCm"
    assert of_a_gpu(op) in ("reference", "recompute", "chunk")


@pytest.mark.usefixtures("_small_gpu")
def test_a_gpu_has_kernels_only_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton.is_available()
    assert triton.runs_on(CUDA)
    with playing("capability=7.5"):
        assert not triton.is_available()
        assert not triton.runs_on(CUDA)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not triton.runs_on(CUDA)
