"""The attentional LSTM in float16 for float32 arguments: values and gradients of the definition, whatever their size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights
from econmt_ops.attentional_lstm import narrow, reference
from econmt_ops.attentional_lstm import triton as decoder_module
from econmt_ops.attentional_lstm.options import DecoderOptions
from econmt_ops.core.repeated import UniqueRows
from tests.ops.cuda.host import use_host
from tests.ops.helpers import Make, assert_close, to, values_and_gradients

TOLERANCE = 8e-3


@pytest.fixture(autouse=True)
def narrowed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes in float16 everywhere, on a Hopper GPU and on the CPU by one launch for a block of steps."""
    if device == "cpu":
        use_host(monkeypatch, 1)
    monkeypatch.setattr(narrow, "matmul_tf32", lambda: True)
    monkeypatch.setattr(narrow, "device_of", lambda _: "cuda")
    monkeypatch.setattr(narrow, "_FEWEST_STEPS", 1)


def arguments(
    make: Make, layers: int = 1, hidden: int = 64, batch: int = 3, steps: int = 2
) -> dict[str, Any]:
    weights = AttentionalLSTMWeights(
        layers=make.layers(40 + hidden, hidden, layers),
        query=make(64, hidden, scale=0.3),
        score=make(64, scale=0.3),
        combine=make(hidden, hidden + 24, scale=0.3),
        combine_bias=make(hidden),
    )
    return {
        "inputs": make(batch, steps, 40),
        "keys": make(batch, 7, 64),
        "values": make(batch, 7, 24),
        "weights": weights,
        "state": AttentionalLSTMState(make.state(batch, hidden, layers), make(batch, hidden, scale=0.5)),
    }


def check(tensors: dict[str, Any], lengths: Tensor | None, factor: float = 1.0, **options: Any) -> None:
    """Compares with the definition in float64; gradients come in multiplied by ``factor``."""
    stash = options.pop("stash", "attention")
    given = DecoderOptions(lengths, **options)

    def scaled(outputs: Tensor, weights: Tensor, state: Any) -> Any:
        return (
            outputs * factor,
            weights * factor,
            state.output * factor,
            *(c * factor for _, c in state.layers),
        )

    def function(**tensors: Any) -> Any:
        made = decoder_module.attentional_lstm(**tensors, options=given, stash=stash)
        assert {part.dtype for part in (*made[:2], made[2].output, *made[2].layers[0])} == {torch.float32}
        return scaled(*made)

    def definition(**tensors: Any) -> Any:
        if isinstance(tensors["inputs"], UniqueRows):
            rows, places = tensors["inputs"]
            tensors["inputs"] = rows[places]
        return scaled(*reference.attentional_lstm(**tensors, options=given))

    single = to(torch.float32, tensors)
    values, gradients = values_and_gradients(function, single)
    exact_values, exact = values_and_gradients(definition, to(torch.float64, single))
    assert_close([each / factor for each in values], [each / factor for each in exact_values], TOLERANCE)
    assert {each.dtype for each in gradients} == {torch.float32}
    assert_close([each / factor for each in gradients], [each / factor for each in exact], 2 * TOLERANCE)


@pytest.mark.parametrize("factor", [pytest.param(1e-12, marks=pytest.mark.thorough), 1.0, 1e9])
def test_gradients_of_every_size(device: str, factor: float) -> None:
    check(arguments(Make(device)), torch.tensor([7, 0, 3], device=device), factor)


def test_two_layers_with_dropout_and_residual_sums(device: str) -> None:
    seed = torch.tensor(5, device=device)
    check(arguments(Make(device), 2), None, residual=True, dropout=0.4, seed=seed, stash="outputs")


@pytest.mark.parametrize("stash", ["outputs", "gates"])
def test_step_by_step(device: str, stash: str) -> None:
    """A hidden size that the kernels for blocks do not serve."""
    check(arguments(Make(device), 2, hidden=12), torch.tensor([7, 1, 3], device=device), stash=stash)


def test_layer_normalisation_and_repeated_inputs(device: str) -> None:
    make = Make(device)
    tensors = arguments(make, hidden=12)
    tensors["inputs"] = UniqueRows(make(4, 40), torch.tensor([[0, 1], [3, 3], [1, 0]], device=device))
    check(tensors, None, layer_norm=(make(64), make(64)))


def test_infinite_gradients_are_seen(device: str) -> None:
    """An overflow of the loss reaches the gradients, so that whoever scales losses can see it."""
    tensors = to(torch.float32, arguments(Make(device), hidden=12))
    tensors["inputs"].requires_grad_()
    outputs = decoder_module.attentional_lstm(**tensors, options=DecoderOptions(None))[0]
    gradient = torch.autograd.grad(outputs, tensors["inputs"], torch.full_like(outputs, torch.inf))[0]
    assert not gradient.isfinite().any()


def test_which_calls_are_narrowed(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = torch.zeros(2, 8, 4, device=device)
    monkeypatch.setattr(narrow, "_FEWEST_STEPS", 8)
    assert narrow.narrows(inputs, "triton")
    assert not narrow.narrows(inputs, "eager")
    assert not narrow.narrows(inputs[:, 1:], "triton")
    assert not narrow.narrows(inputs.double(), "triton")
    assert not narrow.narrows(inputs.bfloat16(), "triton")
    monkeypatch.setattr(narrow, "matmul_tf32", lambda: False)
    assert not narrow.narrows(inputs, "triton")
