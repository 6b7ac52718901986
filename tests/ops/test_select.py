from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import econmt_ops
from econmt_ops.dispatch.select import Candidate, Problem, implementations, rule, rules_only, run
from econmt_ops.lstm.reference import is_light

OPS = {
    "additive_attention": "econmt_ops.additive_attention",
    "attentional_lstm": "econmt_ops.attentional_lstm",
    "lstm": "econmt_ops.lstm",
    "bidirectional_lstm": "econmt_ops.lstm",
    "linear": "econmt_ops.linear",
    "linear_cross_entropy": "econmt_ops.linear_cross_entropy",
    "linear_recurrence": "econmt_ops.linear_recurrence",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package named `made_up` in which implementations can be put."""
    folder = tmp_path / "made_up"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "made_up"]:
        monkeypatch.delitem(sys.modules, name)
    return folder


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_reference(op: str) -> None:
    assert "reference" in implementations(OPS[op], op)
    assert callable(getattr(econmt_ops, op))


def test_a_file_is_an_implementation(package: Path) -> None:
    (package / "reference.py").write_text("def double(x):\n    return x + x\n")
    (package / "triton.py").write_text("def double(x):\n    return 2 * x\n")
    (package / "something_else.py").write_text("def double(x):\n    return 0\n")
    found = implementations("made_up", "double")
    assert list(found) == ["reference", "triton"]
    assert found["triton"](4) == 8


def test_a_module_may_do_without_an_op_or_be_unavailable(package: Path) -> None:
    (package / "reference.py").write_text("def double(x):\n    return x + x\n")
    (package / "recompute.py").write_text("def halve(x):\n    return x / 2\n")
    (package / "triton.py").write_text(
        "def is_available():\n    return False\n\n\ndef double(x):\n    return 2 * x\n"
    )
    assert list(implementations("made_up", "double")) == ["reference"]


def resolved(
    op: str,
    implementation: str,
    available: dict[str, Callable[..., Any]],
    tensors: tuple[Tensor | None, ...] = (torch.ones(1),),
    stash: str = "auto",
) -> Candidate:
    """What runs."""
    return run(
        Problem(op, tensors, torch.float32, {}), lambda it, *_: it, available, implementation, stash=stash
    )


def test_by_name() -> None:
    available = {"reference": min, "triton": max}
    assert resolved("extreme", "triton", available) == ("triton", max, {})
    assert resolved("extreme", "triton", available, stash="cells") == ("triton", max, {"stash": "cells"})
    assert resolved("extreme", "reference", available, stash="cells") == ("reference", min, {})
    with pytest.raises(
        ValueError, match="extreme: unknown implementation 'cuda'; available: auto, reference, triton"
    ):
        resolved("extreme", "cuda", available)
    with pytest.raises(ValueError, match="extreme: unknown stash level 'all'; available: auto, outputs"):
        resolved("extreme", "auto", available, stash="all")


def test_auto_recomputes_where_a_backward_pass_will_follow() -> None:
    available = {"reference": min, "recompute": max, "compiled": sum}
    constant, variable = torch.ones(1), torch.ones(1, requires_grad=True)
    assert resolved("extreme", "auto", available, (constant, None)) == ("reference", min, {})
    assert resolved("extreme", "auto", available, (constant, variable)) == ("recompute", max, {})
    with torch.no_grad():
        assert resolved("extreme", "auto", available, (constant, variable)) == ("reference", min, {})
    assert resolved("extreme", "auto", {"reference": min}, (variable,)) == ("reference", min, {})


def test_auto_keeps_the_gates_of_recurrent_ops() -> None:
    available = {"reference": min, "recompute": max}
    variable = (torch.ones(1, requires_grad=True),)
    assert resolved("lstm", "auto", available, variable).options == {"stash": "gates"}
    assert resolved("lstm", "auto", available, variable, "outputs").options == {"stash": "outputs"}
    assert resolved("lstm", "recompute", available, variable).options == {}
    assert resolved("lstm", "auto", available).options == {}


@pytest.mark.parametrize("op", ["lstm", "bidirectional_lstm", "attentional_lstm"])
def test_auto_recomputes_no_recurrent_op_on_a_gpu(op: str) -> None:
    available = {"reference": min, "recompute": max}
    variable = (torch.ones(1, requires_grad=True),)
    with rules_only("cuda"):
        assert resolved(op, "auto", available, variable) == ("reference", min, {})
        assert resolved(op, "recompute", available, variable, "cells") == (
            "recompute",
            max,
            {"stash": "cells"},
        )
        assert resolved("additive_attention", "auto", available, variable).name == "recompute"
        assert resolved("linear_cross_entropy", "auto", available, variable).name == "recompute"
    assert resolved(op, "auto", available, variable).name == "recompute"
    assert (rule(op, "cuda"), rule(op, "cpu")) == ("reference", "recompute")


def test_a_light_lstm_is_the_reference() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert is_light(64, 25, 256, torch.float32, cpu)
    # Gates of more than 16 MiB, wide layers, many steps of a 16-bit type.
    assert not is_light(64, 100, 512, torch.float32, cpu)
    assert not is_light(1, 5, 1024, torch.float32, cpu)
    assert is_light(16, 15, 1024, torch.bfloat16, cpu)
    assert not is_light(16, 25, 256, torch.bfloat16, cpu)
    assert not is_light(1, 1, 1, torch.float32, cuda)
    available = {"reference": min, "recompute": max}
    variable = torch.ones(1, requires_grad=True)

    def runs(implementation: str = "auto", stash: str = "auto") -> str:
        light = Problem("lstm", (variable,), torch.float32, {}, is_light=True)
        return run(light, lambda it, *_: it, available, implementation, stash=stash).label

    assert (runs(), runs("recompute"), runs(stash="outputs")) == (
        "reference",
        "recompute",
        "recompute/outputs",
    )
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


def test_ops_refuse_unknown_implementations() -> None:
    with pytest.raises(ValueError, match="linear: unknown implementation 'fast'; available: auto, reference"):
        econmt_ops.linear(torch.ones(1, 2), torch.ones(3, 2), implementation="fast")
