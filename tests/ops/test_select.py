"""Which implementation a call gets, the limits of GPUs, and kernels that depend on them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import econmt_ops
from econmt_ops.backends import triton
from econmt_ops.backends.cuda.library import is_hopper
from econmt_ops.dispatch import traits
from econmt_ops.dispatch.device_limits import H200, limits_of
from econmt_ops.dispatch.rule import MODE, captured, rule, rules_only
from econmt_ops.dispatch.select import Problem, run
from econmt_ops.dispatch.traits import Traits
from econmt_ops.layers.op import _is_light as is_light_gru
from econmt_ops.lstm import reference
from econmt_ops.lstm.reference import is_light
from econmt_ops.lstm.triton import gru_products
from tests.conftest import PlayGPU
from tests.ops.simulated_gpu import simulated_gpu

OPS = (
    *("additive_attention", "attentional_lstm", "lstm", "bidirectional_lstm"),
    *("linear", "linear_cross_entropy", "linear_recurrence"),
)


def test_a_module_is_an_implementation() -> None:
    reference, recompute = ModuleType("made_up.reference"), ModuleType("made_up.recompute")
    reference.__dict__.update(double=lambda x: x + x)
    recompute.__dict__.update(double=lambda x, backend="eager": (x, backend), TRAITS=Traits(recomputes=True))
    triton = (lambda x: 2 * x, Traits(warms_up=True))
    found = traits.implementations("double", recompute, reference, triton=triton)
    assert list(found) == list(traits.names_of("double")) == ["reference", "recompute", "compiled", "triton"]
    assert found["reference"].function(4) == found["triton"].function(4) == 8
    assert found["compiled"].function(4) == (4, "compiled")
    assert found["compiled"].traits.fake_implementation == "recompute"


def test_every_implementation_has_traits() -> None:
    for op in OPS:
        found = traits.implementations_of(op)
        assert list(found) == sorted(found, key=traits.NAMES.index)
        assert callable(getattr(econmt_ops, op))
        assert traits.definition(op).name == "reference"
        assert not traits.definition(op).traits.recomputes
        for each in found.values():
            assert each.traits.devices <= {"cpu", "cuda"}
            assert not each.traits.fake_implementation or each.traits.fake_implementation in found


RECOMPUTES = Traits(recomputes=True)
LOOPS = Traits(recomputes=True, loops=True, takes_stash=True)
KERNELS = Traits(
    devices=frozenset({"cuda"}), recomputes=True, takes_stash=True, model_stash="cells", has_kernels=True
)


def resolved(
    implementation: str,
    available: dict[str, Traits],
    tensors: tuple[Tensor | None, ...] = (torch.ones(1),),
    stash: str = "auto",
    **options: Any,
) -> str:
    """The label of what runs, of implementations that do nothing and a reference before them."""
    found = {name: (len, each) for name, each in {"reference": Traits(), **available}.items()}
    traits.implementations("extreme", **found)
    problem = Problem("extreme", tensors, torch.float32, {}, **options)
    return run(problem, lambda it, *_: it.label, implementation, stash=stash)


VARIABLE = (torch.ones(1, requires_grad=True),)


def test_an_implementation_is_taken_by_its_name() -> None:
    available = {"triton": LOOPS}
    assert resolved("triton", available) == "triton"
    assert resolved("triton", available, stash="cells") == "triton/cells"
    assert resolved("reference", available, stash="cells") == "reference"
    for name, stash, message in (
        ("cuda", "auto", "extreme: unknown implementation 'cuda'; available: auto, reference, triton"),
        ("auto", "all", "extreme: unknown stash level 'all'; available: auto, least, outputs"),
    ):
        with pytest.raises(ValueError, match=message):
            resolved(name, available, stash=stash)


def test_what_the_machine_cannot_run_is_not_taken() -> None:
    kernels = Traits(has_kernels=True, is_available=lambda: bool(MODE.device))
    available = {"recompute": LOOPS, "triton": kernels}
    assert resolved("auto", available, VARIABLE) == "recompute/gates"
    message = "cannot run the implementation 'triton'; available: auto, reference, recomp"
    with pytest.raises(ValueError, match=message):
        resolved("triton", available)
    with rules_only("cuda"):
        assert resolved("triton", available) == "triton"
        unknown = {"triton": Traits(has_kernels=True, is_available=lambda: False)}
        assert resolved("auto", unknown) == "reference"


def test_auto_recomputes_where_a_backward_pass_will_follow() -> None:
    available = {"recompute": RECOMPUTES, "compiled": Traits(recomputes=True, warms_up=True)}
    constant, (variable,) = torch.ones(1), VARIABLE
    assert resolved("auto", available, (constant, None)) == "reference"
    assert resolved("auto", available, (constant, variable)) == "recompute"
    with torch.no_grad():
        assert resolved("auto", available, (constant, variable)) == "reference"
    assert resolved("auto", {}, VARIABLE) == "reference"


def test_a_call_alone_keeps_the_gates_and_a_model_as_little_as_its_kernels_can_do_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available = {"triton": replace(KERNELS, devices=frozenset({"cpu"}))}
    assert resolved("auto", available, VARIABLE) == "triton/gates"
    assert resolved("auto", available, VARIABLE, "outputs") == "triton/outputs"
    assert resolved("auto", available) == "triton"
    with rules_only():
        assert resolved("auto", available, VARIABLE) == "triton/cells"
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # slow products
        assert resolved("auto", available, VARIABLE) == "triton/gates"
    for op in ("lstm", "bidirectional_lstm"):
        own = inspect.signature(traits.implementations_of(op)["triton"].function).parameters["stash"].default
        assert own == "gates", "auto would not be what is named"


def test_kernels_go_before_all_others_on_their_devices() -> None:
    available = {"recompute": LOOPS, "triton": KERNELS}
    with rules_only("cuda"):
        assert resolved("auto", available, VARIABLE) == "triton/cells"
        assert resolved("auto", available) == "triton"
    assert resolved("auto", available, VARIABLE) == "recompute/gates"
    half = {"c": Traits(has_kernels=True, dtypes=frozenset({torch.bfloat16}))}
    assert resolved("auto", half) == "reference"


def test_loops_recompute_on_a_gpu_only_where_launches_cost_nothing() -> None:
    available = {"recompute": LOOPS}
    with rules_only("cuda"):
        assert resolved("auto", available, VARIABLE) == "reference"
        assert resolved("recompute", available, VARIABLE, "cells") == "recompute/cells"
        assert resolved("auto", {"recompute": RECOMPUTES}, VARIABLE) == "recompute"
        with captured():
            assert resolved("auto", available, VARIABLE) == "recompute/gates"


def test_on_a_gpu_ieee_float32_is_cudnns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(reference, "recurrent_tf32", lambda: False)
    assert is_light(128, 100, 512, torch.float32, CUDA)
    # In a graph single steps are faster where there are many units.
    with captured():
        for batch, hidden, light in ((64, 1024, 0), (128, 512, 0), (64, 128, 1), (256, 1024, 1), (1, 512, 1)):
            assert is_light(batch, 100, hidden, torch.float32, CUDA) == light
    # With TF32 allowed a launch of ours serves float32.
    monkeypatch.setattr(reference, "recurrent_tf32", lambda: True)
    # But cuDNN's is faster where layers are small, or wider than a launch has room for. In 16 bits it would keep c in them.
    for batch, hidden, light in ((128, 512, 0), (128, 64, 1), (512, 64, 0), (128, 1600, 0), (128, 1601, 1)):
        assert is_light(batch, 25, hidden, torch.float32, CUDA) == light
        assert not is_light(batch, 25, hidden, torch.bfloat16, CUDA)
    monkeypatch.setattr(reference, "recurrent_tf32", lambda: False)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: False)
    assert not is_light(128, 100, 512, torch.float32, CUDA)
    # What is light goes before kernels.
    available = {"triton": replace(LOOPS, has_kernels=True)}
    assert resolved("auto", available, VARIABLE, is_light=True) == "reference"
    with rules_only():
        assert resolved("auto", available, VARIABLE, is_light=True) == "triton/gates"


def test_a_gru_in_a_graph_is_cudnns_if_it_is_wide() -> None:
    assert is_light_gru(64, 1500, 1024, torch.bfloat16, CUDA)
    with captured():
        light = [is_light_gru(32, 187, hidden, torch.bfloat16, CUDA) for hidden in (1024, 1601)]
    assert light == [False, True]


# Whether a launch runs all steps; whether cuDNN's layer is faster outside of a graph, and in one.
GRUS = {
    (100, 512, torch.bfloat16): (True, False, False),
    (31, 512, torch.bfloat16): (True, True, False),
    (100, 128, torch.bfloat16): (True, True, False),
    (7, 512, torch.bfloat16): (False, True, False),
    (44, 1600, torch.float16): (True, False, False),
    (43, 1600, torch.float16): (False, True, True),
    (100, 1601, torch.float16): (False, True, True),
    (100, 129, torch.float32): (True, False, False),
    (100, 128, torch.float32): (True, True, True),
    (100, 64, torch.float64): (False, True, False),
    (1, 512, torch.bfloat16): (False, True, True),
}


@pytest.mark.parametrize(("size", "expected"), GRUS.items())
def test_a_launch_runs_all_steps_of_a_gru_unless_they_are_few(size: Any, expected: Any) -> None:
    with simulated_gpu(), rules_only("cuda"):
        served, light = gru_products(64, *size, CUDA) is not None, is_light_gru(64, *size, CUDA)
        with captured():
            assert (served, light, is_light_gru(64, *size, CUDA)) == expected


def test_a_light_lstm_is_the_reference() -> None:
    assert is_light(64, 25, 256, torch.float32, CPU)
    # Gates of more than 16 MiB, wide layers, many steps of a 16-bit type.
    assert not is_light(64, 100, 512, torch.float32, CPU)
    assert not is_light(1, 5, 1024, torch.float32, CPU)
    assert is_light(16, 15, 1024, torch.bfloat16, CPU)
    assert not is_light(16, 25, 256, torch.bfloat16, CPU)

    def runs(implementation: str = "auto", stash: str = "auto") -> str:
        return resolved(implementation, {"recompute": LOOPS}, VARIABLE, stash, is_light=True)

    found = runs(), runs("recompute"), runs(stash="outputs")
    assert found == ("reference", "recompute", "recompute/outputs")
    with rules_only():
        assert runs() == "recompute/gates"


def test_a_small_lstm_alone_runs_as_the_reference() -> None:
    inputs = torch.ones(2, 3, 4, requires_grad=True)
    layer = econmt_ops.LSTMWeights(torch.ones(20, 4), torch.ones(20, 5), torch.ones(20))

    def operator() -> str:
        outputs, _ = econmt_ops.lstm(inputs, (layer,))
        return str(outputs.grad_fn.next_functions[0][0]) if outputs.grad_fn else ""

    assert "econmt_ops_lstm_layer" not in operator()
    with rules_only():
        assert "econmt_ops_lstm_layer" in operator()


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_limits_are_those_of_the_gpu(play_gpu: PlayGPU) -> None:
    play_gpu("a small one", 8, 6)
    assert limits_of(CUDA) == (40, 101_376, (8, 6), 12 << 30)
    assert not is_hopper(CUDA)
    assert limits_of(CPU) == H200


def test_a_simulated_gpu_has_no_more_than_the_real_one() -> None:
    with simulated_gpu(capability=(7, 5), multiprocessors=24, memory=1 << 40):
        assert limits_of(CPU) == (24, 65_536, (7, 5), H200.memory)
        with simulated_gpu(multiprocessors=40):
            assert limits_of(CPU).multiprocessors == 24
    assert limits_of(CPU) == H200


def of_a_gpu(op: str) -> str:
    """The implementation that an estimate for a GPU assumes."""
    with rules_only("cuda"):
        return rule(op, "cuda", torch.bfloat16)


@pytest.mark.parametrize("op", [op for op in (*OPS, "gru") if op not in ("linear", "bidirectional_lstm")])
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


def test_a_gpu_has_kernels_only_where_they_run(play_gpu: PlayGPU, monkeypatch: pytest.MonkeyPatch) -> None:
    play_gpu("a small one", 8, 6)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert triton.is_available()
    assert triton.runs_on(CUDA)
    with simulated_gpu(capability=(7, 5)):
        assert not triton.is_available()
        assert not triton.runs_on(CUDA)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not triton.runs_on(CUDA)
