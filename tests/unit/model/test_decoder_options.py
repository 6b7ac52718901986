"""The decoder with input feeding: every cell and option against a definition step by step, and in searches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from econmt.model import Implementations, TranslationModel
from econmt_ops import linear_cross_entropy
from tests.ops import definitions
from tests.ops.definitions import recurrent
from tests.unit.model import test_translation

CELLS = ("lstm", "gru", "lnlstm", "lnglstm")
TOGETHER: dict[str, Any] = {
    "attention__coverage": {"type": "gru", "num_hidden": 2},
    "attention__layer_norm": True,
    "decoder__context_gating": True,
    "decoder__residual": True,
    "layer_normalization": True,
    "weight_tying": "trg_softmax",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"encoder__layers": 1, "encoder__bidirectional": "none", "decoder__layers": 1},
    **{
        f"coverage-{kind}": {
            "attention__coverage": {"type": kind, "num_hidden": 1 if kind in ("count", "fertility") else 3},
            "attention__layer_norm": kind in ("count", "gru"),
        }
        for kind in ("tanh", "sigmoid", "relu", "softrelu", "gru", "fertility", "count")
    },
    "gating": {"decoder__context_gating": True},
    "gating-dot": {"decoder__context_gating": True, "attention__type": "dot"},
    "normalized": {"layer_normalization": True, "decoder__state_init": "avg"},
    "normalized-zero": {
        "layer_normalization": True,
        "decoder__state_init": "zero",
        "attention__type": "bilinear",
    },
    "factorized": {"layer_normalization": True, "decoder__context_gating": True, "decoder__rank": 2},
    **{
        f"{cell}-alone": {"decoder__cell": cell, "decoder__layers": 1, "decoder__state_init": "zero"}
        for cell in CELLS[1:]
    },
    **{
        f"{cell}-{kind}": {"decoder__cell": cell, "decoder__layers": 3, "attention__type": kind}
        for cell, kind in zip(CELLS[1:], ("scaled_dot", "bilinear", "dot"), strict=True)
    },
    **{f"{cell}-together": {"decoder__cell": cell, **TOGETHER} for cell in CELLS},
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def drawn(options: dict[str, Any], seed: int = 1) -> TranslationModel:
    """A model whose every parameter is drawn, also those that begin at 0 or 1."""
    model = test_translation.make_model(test_translation.make_config(**options), seed)
    for name, part in model.named_parameters():
        if part.dim() == 1 or "start_" in name:
            part.data.add_(torch.randn_like(part) * 0.3)
    return model


def naive_coverage(layer: Any, before: Tensor, attention: Tensor, value: Tensor, h: Tensor) -> Tensor:
    """Coverage (C,) of one position after a step."""
    if layer.kind == "count":
        return before + attention
    if layer.kind == "fertility":
        return before + attention / (2.0 * (layer.read.weight @ value + layer.read.bias).sigmoid())
    read = layer.read.weight @ torch.cat([attention[None], value, h]) + layer.read.bias
    recurrent = layer.recur.weight @ before
    if layer.kind == "gru":
        return definitions.gated(read, recurrent, before)
    function = functional.softplus if layer.kind == "softrelu" else getattr(torch, layer.kind)
    made: Tensor = function(read + recurrent)
    return made


def naive_row(model: Any, values: Tensor, summary: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (T, H) and attention (T, S) of one sentence with the encoder's outputs (S, E) and words (T, I)."""
    decoder, attention = model.decoder, model.decoder.attention
    size, layers = decoder.config.size, definitions.whole([layer.weights for layer in decoder.layers])
    count, kinds = len(layers), 1 if decoder.config.cell == "gru" else 2
    start = torch.zeros(kinds * count, size).double()
    if decoder.start is not None:
        start = (decoder.start.weight @ summary + decoder.start.bias).view(-1, size)
        if decoder.norm is not None:
            start = definitions.normalise(start, decoder.start_gain, decoder.start_shift)
        start = start.tanh()
    states = [tuple(start[kind * count + layer] for kind in range(kinds)) for layer in range(count)]
    keys = values if attention.key is None else attention.key(values)
    output, outputs, weights = torch.zeros(size).double(), [], []
    covered = None
    if attention.coverage is not None:
        covered = torch.zeros(len(values), attention.coverage.key.in_features).double()
    for word in words:
        step, read = definitions.DECODER_STEPS[type(layers[0])], torch.cat([word, output])
        top = definitions.stack_step(step, read, layers, states, decoder.config.residual, [None] * count)
        if attention.score is None:
            scores = keys @ top * attention.scale
        else:
            sums = keys + attention.query @ top
            sums = sums if covered is None else sums + attention.coverage.key(covered)
            scores = definitions.additive_scores(sums, attention.score, attention.layer_norm)
        alpha = scores.softmax(0)
        context, combine = alpha @ values, decoder.combine
        if covered is not None:
            parts = zip(covered, alpha, values, strict=True)
            covered = torch.stack([naive_coverage(attention.coverage, *part, top) for part in parts])
        x = combine.weight @ torch.cat([top, context]) + combine.bias
        if decoder.config.context_gating:
            z = x.sigmoid()
            x = z * combine.of_state(top) + (1 - z) * combine.of_context(context)
        x = x if decoder.norm is None else definitions.normalise(x, decoder.norm.weight, decoder.norm.bias)
        output = x.tanh()
        outputs.append(output)
        weights.append(alpha)
    return torch.stack(outputs), torch.stack(weights)


def naive_loss(model: TranslationModel) -> Tensor:
    """The loss of ``make_batch``, sentence by sentence."""
    source, lengths, target_input, target_output = test_translation.make_batch()
    total = torch.zeros(()).double()
    for row, length in enumerate(lengths.tolist()):
        steps = int((target_output[row] != test_translation.PAD).sum())
        one = lengths[row : row + 1]
        values, last = model.encoder(
            model.source_embedding(source[row : row + 1, :length]), one, model.implementations
        )
        summary = values.mean(1) if model.config.decoder.state_init == "avg" else last
        words = model.target_embedding(target_input[row, :steps])
        outputs, _ = naive_row(model, values[0], summary[0], words)
        given = model.read_out(outputs[None])[0], model.output.weight, target_output[row, :steps]
        total = total + linear_cross_entropy(*given, bias=model.output.bias, reduction="sum")
    return total


def test_encoders_of_one_layer_and_matrices_of_gates() -> None:
    model = drawn(OPTIONS["plain"])
    source, lengths, _, _ = test_translation.make_batch()
    zero, weights = torch.zeros(3, 8).double(), model.encoder.upper_layers[0].weights
    words = model.source_embedding(source)
    values, ((last, _),) = recurrent(definitions.lstm_step, words, (weights,), ((zero, zero),), lengths)
    found = model.encode(source, lengths)
    torch.testing.assert_close(found.memory.values, values, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(found.summary, last, rtol=1e-9, atol=1e-11)
    init = {"weights": "uniform", "scale": 1e-6}
    gate: Any = test_translation.make_model(
        test_translation.make_config(decoder__context_gating=True, initialization=init)
    ).decoder.combine
    for linear in (gate.of_state, gate.of_context):
        assert 0.0 < float(linear.weight.detach().abs().max()) <= 1e-6


@pytest.mark.parametrize("name", [pytest.param("reference", marks=pytest.mark.thorough), "recompute"])
@EVERY
def test_loss_and_gradients_are_those_of_the_definition(options: dict[str, Any], name: str) -> None:
    expected, model = drawn(options), drawn(options)
    model.implementations = Implementations(encoder="reference", decoder=name)
    losses = naive_loss(expected), test_translation.sum_of_losses(model)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0.0)
    wanted = dict(expected.named_parameters())
    for key, part in model.named_parameters():
        assert part.grad is not None, f"{key} got no gradient"
        assert part.grad.abs().max() > 0.0, f"the gradient of {key} is zero"
        torch.testing.assert_close(part.grad, wanted[key].grad, rtol=1e-9, atol=1e-12, msg=key)


@EVERY
def test_rows_and_steps(options: dict[str, Any]) -> None:
    """Rows do not see each other or padding, and steps of a search are those of training."""
    test_translation.check_rows_and_steps(drawn(options))


@pytest.mark.parametrize("variational", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_dropout_draws_the_same(cell: str, variational: bool) -> None:
    """Masks do not depend on the implementation, nor on the cell's; without dropout the loss is another."""
    losses = []
    for implementation in ("reference", "recompute"):
        model = drawn(
            {**TOGETHER, "decoder__cell": cell, "dropout": {"layers": 0.4, "variational": variational}}
        )
        model.implementations = Implementations(encoder=implementation, decoder=implementation)
        still = test_translation.sum_of_losses(model)
        torch.manual_seed(7)
        losses.append(test_translation.sum_of_losses(model.train()))
        assert not torch.isclose(losses[-1], still)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0.0)
