"""The decoder's loop and the attention of all its steps with our kernels: values and gradients of the definitions."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights, UniqueRows
from econmt_ops.additive_attention.reference import AttentionArguments
from econmt_ops.attentional_lstm import reference
from econmt_ops.attentional_lstm.options import DecoderOptions
from econmt_ops.dispatch.traits import implementations_of
from tests.ops.helpers import Make, assert_same_function, naive_additive_attention

additive_attention, attentional_lstm = (
    implementations_of(op)["triton"].function for op in ("additive_attention", "attentional_lstm")
)

BATCH, STEPS, POSITIONS, WIDTH, HIDDEN, SIZE, VALUES = 3, 3, 5, 4, 6, 7, 5
LENGTHS = torch.tensor([5, 0, 2])


def run(function: Any, options: DecoderOptions, **given: Any) -> Any:
    """Calls an implementation with tensors by name, among them those of the normalisation."""
    options = options._replace(layer_norm=given.pop("layer_norm"))
    return function(**given, options=options)


def arguments(make: Make, kind: str, layers: int, feeding: bool = True) -> dict[str, Any]:
    size = HIDDEN if kind == "dot" else SIZE
    additive = kind in ("additive", "norm")
    weights = AttentionalLSTMWeights(
        layers=make.layers(WIDTH + HIDDEN if feeding else WIDTH, HIDDEN, layers),
        query=None if kind == "dot" else make(SIZE, HIDDEN),
        score=make(SIZE) if additive else None,
        combine=make(HIDDEN, HIDDEN + VALUES, scale=0.5),
        combine_bias=make(HIDDEN) if additive else None,
    )
    return {
        "inputs": make(BATCH, STEPS, WIDTH),
        "keys": make(BATCH, POSITIONS, size),
        "values": make(BATCH, POSITIONS, VALUES),
        "weights": weights,
        "state": AttentionalLSTMState(make.state(BATCH, HIDDEN, layers), make(BATCH, HIDDEN, scale=0.5)),
        "layer_norm": (make(SIZE), make(SIZE)) if kind == "norm" else None,
    }


def check(tensors: dict[str, Any], device: str, stash: str, feeding: bool = True, **given: Any) -> None:
    """Against the reference in float64, on the same numbers."""
    options = DecoderOptions(LENGTHS.to(device), feeding, **given)

    def function(**tensors: Any) -> Any:
        return run(functools.partial(attentional_lstm, stash=stash), options, **tensors)

    def definition(**tensors: Any) -> Any:
        return run(reference.attentional_lstm, options, **tensors)

    assert_same_function(function, definition, tensors, torch.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "layers", "stash"),
    [
        ("additive", 2, "outputs"),
        ("additive", 1, "gates"),
        ("norm", 2, "attention"),
        ("dot", 1, "outputs"),
        ("general", 2, "cells"),
    ],
)
def test_decoder(kind: str, layers: int, stash: str, device: str) -> None:
    check(arguments(Make(device, torch.float32), kind, layers), device, stash)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("residual", [False, True])
def test_decoder_with_dropout_and_residual_sums(residual: bool, device: str) -> None:
    seed = torch.tensor(5, device=device)
    options = {"residual": residual, "dropout": 0.4, "seed": seed}
    check(arguments(Make(device, torch.float32), "additive", 3), device, "attention", **options)


def test_decoder_without_input_feeding(device: str) -> None:
    tensors = arguments(Make(device, torch.float32), "additive", 1, feeding=False)
    check(tensors, device, "attention", feeding=False)


def test_decoder_of_repeated_rows(device: str) -> None:
    make = Make(device, torch.float32)
    tensors = arguments(make, "additive", 2)
    places = torch.tensor([[0, 1, 1], [3, 0, 2], [1, 1, 4]], device=device)
    rows = make(5, WIDTH)
    options = DecoderOptions(LENGTHS.to(device))
    del tensors["inputs"]

    def function(rows: Any, **tensors: Any) -> Any:
        return run(attentional_lstm, options, inputs=UniqueRows(rows, places), **tensors)

    def definition(rows: Any, **tensors: Any) -> Any:
        return run(reference.attentional_lstm, options, inputs=rows[places], **tensors)

    assert_same_function(function, definition, {"rows": rows, **tensors}, torch.float32)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_decoder_in_16_bits(dtype: torch.dtype, device: str) -> None:
    options = DecoderOptions(LENGTHS.to(device))

    def function(**tensors: Any) -> Any:
        outputs, weights, state = run(attentional_lstm, options, **tensors)
        assert outputs.dtype == weights.dtype == dtype
        assert [c.dtype for _, c in state.layers] == [torch.float32] * 2
        return outputs, weights, state

    def definition(**tensors: Any) -> Any:
        return run(reference.attentional_lstm, options, **tensors)

    assert_same_function(function, definition, arguments(Make(device), "additive", 2), dtype)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norm"])
def test_attention_of_all_steps(normed: bool, device: str) -> None:
    make = Make(device, torch.float32)
    tensors = {
        "query": make(BATCH, STEPS, SIZE),
        "keys": make(BATCH, POSITIONS, SIZE),
        "values": make(BATCH, POSITIONS, VALUES),
        "score_weight": make(SIZE),
        "layer_norm": (make(SIZE), make(SIZE)) if normed else None,
    }

    def function(**tensors: Any) -> Any:
        gain, shift = tensors.pop("layer_norm") or (None, None)
        call = AttentionArguments(**tensors, gain=gain, shift=shift, lengths=LENGTHS.to(device))
        return additive_attention(call)

    def definition(**tensors: Any) -> Any:
        return naive_additive_attention(**tensors, lengths=LENGTHS)

    assert_same_function(function, definition, tensors, torch.float32)
