"""Encoders and decoders that walk step by step: options that no fused operation has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from econmt.config import recipe
from econmt.model import Implementations, IncrementalModel, TranslationModel
from econmt.model.layers import drawing_from
from econmt.model.unfused.attention import CoverageLayer, sparsemax
from econmt.model.unfused.decoder import UnfusedDecoder
from econmt.model.unfused.encoder import UnfusedEncoder
from econmt.model.unfused.layers import UnfusedLayer
from tests.unit.model.test_translation import PAD, make_batch, make_config, make_model, sum_of_losses

COVERAGES = ("tanh", "sigmoid", "relu", "softrelu", "gru", "fertility", "count")
OPTIONS: dict[str, dict[str, Any]] = {
    **{
        f"coverage-{kind}": {
            "attention__coverage": {"type": kind, "num_hidden": 1 if kind in ("count", "fertility") else 3},
            "attention__layer_norm": kind in ("count", "gru"),
        }
        for kind in COVERAGES
    },
    "prev-word": {"attention__use_prev_word": True},
    "prev-word-bilinear": {"attention__use_prev_word": True, "attention__type": "bilinear"},
    "mhdot": {"attention__type": "mhdot", "attention__size": 6, "attention__mhdot_heads": 2},
    "mhdot-sparse": {
        "attention__type": "mhdot",
        "attention__size": 4,
        "attention__mhdot_heads": 4,
        "attention__function": "sparsemax",
        "attention__use_prev_word": True,
    },
    "fixed": {"attention__type": "fixed"},
    "location": {"attention__type": "location", "attention__use_prev_word": True},
    "location-few": {"attention__type": "location", "attention__size": 3},
    "sparsemax": {"attention__function": "sparsemax"},
    "sparsemax-dot": {"attention__function": "sparsemax", "attention__type": "scaled_dot"},
    "gating": {"decoder__context_gating": True},
    "upper": {"decoder__attention_in_upper_layers": True, "decoder__residual": True},
    "normalized": {"layer_normalization": True},
    "normalized-zero": {"layer_normalization": True, "decoder__state_init": "zero"},
    "residual-from-bottom": {
        "embedding": 8,
        "encoder__residual": True,
        "decoder__residual": True,
        "encoder__first_residual_layer": 1,
        "decoder__first_residual_layer": 1,
    },
    "residual-from-third": {
        "encoder__residual": True,
        "encoder__layers": 4,
        "encoder__bidirectional": "all",
        "encoder__first_residual_layer": 3,
        "encoder__reverse_input": True,
    },
    "reversed": {"encoder__bidirectional": "none", "encoder__reverse_input": True, "lhuc": "encoder"},
    "dropout": {"dropout": {"states": 0.3, "recurrent": 0.2, "layers": 0.2}},
    "zoneout": {"dropout": {"zoneout_hidden": 0.2, "zoneout_cell": 0.4, "variational": True, "layers": 0.2}},
    "lhuc": {"lhuc": "all"},
    "lhuc-state": {"lhuc": "state_init"},
    "together": {
        "attention__coverage": {"type": "gru", "num_hidden": 2},
        "attention__use_prev_word": True,
        "attention__layer_norm": True,
        "decoder__context_gating": True,
        "decoder__attention_in_upper_layers": True,
        "layer_normalization": True,
        "lhuc": "all",
        "weight_tying": "trg_softmax",
        "dropout": {"states": 0.2, "zoneout_cell": 0.1, "embedding": 0.1, "output": 0.1},
    },
}
EVERY = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def drawn(options: dict[str, Any], seed: int = 1) -> TranslationModel:
    """A model whose every parameter is drawn, those that begin at 0 or 1, too."""
    model = make_model(make_config(**options), seed)
    for name, part in model.named_parameters():
        if part.dim() == 1 or "lhuc" in name or "start_" in name:
            part.data.add_(torch.randn_like(part) * 0.3)
    return model


@EVERY
def test_rows_steps_and_gradients(options: dict[str, Any]) -> None:
    """Rows do not see each other or padding, steps of a search are those of training, parameters get a gradient."""
    model = drawn(options)
    source, lengths, target_input, target_output = make_batch()
    together = model(source, lengths, target_input)
    for row, (source_length, target_length) in enumerate(
        zip(lengths, (target_output != PAD).sum(1), strict=True)
    ):
        alone = model(
            source[row : row + 1, :source_length],
            lengths[row : row + 1],
            target_input[row : row + 1, :target_length],
        )
        torch.testing.assert_close(together[row : row + 1, :target_length], alone, rtol=1e-10, atol=1e-12)

    expected = torch.log_softmax(together @ model.output.weight.T + model.output.bias, dim=-1)
    steps = IncrementalModel(model)
    state = steps.encode(source, lengths)
    for place in range(target_input.shape[1]):
        found, attention, state = steps.step(target_input[:, place], state)
        torch.testing.assert_close(found, expected[:, place], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(attention.sum(1), torch.ones(3, dtype=torch.float64))
        assert attention[1, 2:].abs().max() == 0.0, "attention past the end of a source sentence"

    model.train()
    torch.manual_seed(7)
    sum_of_losses(model).backward()
    unused = (
        {"attention.query", "attention.key", "attention.score"}
        if model.config.attention.type == "fixed"
        else set()
    )
    for name, part in model.named_parameters():
        assert part.grad is not None, f"{name} got no gradient"
        assert torch.isfinite(part.grad).all(), name
        assert part.grad.abs().max() > 0.0 or name in unused, f"the gradient of {name} is zero"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_is_computed_again_is_what_was_kept(options: dict[str, Any]) -> None:
    """Losses and gradients of both implementations; and dropout draws the same in both."""
    found = []
    for name in ("reference", "recompute"):
        model = drawn(options).train()
        model.implementations = Implementations(encoder=name, decoder=name)
        torch.manual_seed(3)
        loss = sum_of_losses(model)
        loss.backward()
        found.append((loss.detach(), {key: part.grad for key, part in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-12, atol=0.0)
    for key, gradient in found[0][1].items():
        torch.testing.assert_close(gradient, found[1][1][key], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["coverage-gru", "together", "mhdot", "location-few"])
def test_hypotheses_have_their_own_coverage(name: str) -> None:
    """Rows that share a sentence, others that have left: as if each went its way alone."""
    model = drawn(OPTIONS[name])
    source, lengths, target_input, _ = make_batch()
    steps = IncrementalModel(model)
    _, _, state = steps.step(target_input[:, 0], steps.encode(source, lengths))
    state = state.select(torch.tensor([2, 1, 2]), torch.tensor([8, 3, 6]), 3)
    _, _, state = steps.step(torch.tensor([5, 6, 7]), state)
    state = state.select(torch.tensor([0, 2, 1]), torch.tensor([7, 6, 5]), 3).keep(torch.tensor([1, 2]))
    found, attention, _ = steps.step(torch.tensor([8, 9, 4]), state)
    assert attention.shape == (3, 4)
    for row, (sentence, words) in enumerate([(2, [5, 8]), (2, [7, 9]), (1, [6, 4])]):
        target, size = torch.tensor([[2, *words]]), int(lengths[sentence])
        hidden = model(source[sentence : sentence + 1, :size], lengths[sentence : sentence + 1], target)
        expected = torch.log_softmax(hidden[0, -1] @ model.output.weight.T + model.output.bias, dim=-1)
        torch.testing.assert_close(found[row], expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("layer_norm", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_without_any_option_it_is_the_fused_model(layer_norm: bool, residual: bool) -> None:
    """With coverage that nothing reads, LHUC of 1 and gates of its own kind: outputs and gradients are the same."""
    options = {
        "attention__layer_norm": layer_norm,
        "decoder__residual": residual,
        "encoder__residual": residual,
        "encoder__layers": 3,
        "decoder__layers": 3,
    }
    plain = make_model(make_config(**options))
    walking = make_model(make_config(**options, lhuc="all", attention__coverage={"type": "count"}))
    assert isinstance(walking.encoder, UnfusedEncoder)
    assert isinstance(walking.decoder, UnfusedDecoder)
    assert not isinstance(plain.encoder, UnfusedEncoder)
    assert walking.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert walking.decoder.attention.coverage is not None
    nn.init.zeros_(walking.decoder.attention.coverage.key.weight)
    losses = [sum_of_losses(model) for model in (plain, walking)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    theirs = dict(walking.named_parameters())
    for name, part in plain.named_parameters():
        torch.testing.assert_close(part.grad, theirs[name].grad, rtol=1e-9, atol=1e-12)


def test_sparsemax_is_the_nearest_point_and_its_gradient() -> None:
    torch.manual_seed(2)
    scores = (torch.randn(40, 6, dtype=torch.float64) * 2.0).requires_grad_()
    weights = sparsemax(scores)
    torch.testing.assert_close(weights.sum(1), torch.ones(40, dtype=torch.float64))
    assert weights.min() == 0.0
    # Bisection of the threshold, the definition.
    low, high = scores.detach().min(1).values - 1.0, scores.detach().max(1).values
    for _ in range(80):
        middle = (low + high) / 2
        above = (scores.detach() - middle[:, None]).clamp(min=0.0).sum(1) > 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    torch.testing.assert_close(weights, (scores.detach() - low[:, None]).clamp(min=0.0))
    assert torch.autograd.gradcheck(sparsemax, [scores[:5].detach().requires_grad_()])
    hidden = torch.full((1, 4), torch.finfo(torch.float64).min, dtype=torch.float64)
    hidden[0, 1] = 3.0
    assert sparsemax(hidden).tolist() == [[0.0, 1.0, 0.0, 0.0]]
    assert sparsemax(torch.tensor([[0.5], [-7.0]])).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("kind", COVERAGES)
def test_coverage_is_that_of_its_formula(kind: str) -> None:
    torch.manual_seed(4)
    width = 1 if kind in ("count", "fertility") else 2
    layer = CoverageLayer(recipe.Coverage(type=kind, num_hidden=width, max_fertility=3), 5, 4, 3).double()
    values, states = torch.randn(2, 6, 4).double(), torch.randn(2, 3).double()
    coverage, weights = torch.rand(2, 6, width).double(), torch.softmax(torch.randn(2, 6).double(), 1)
    found = layer(coverage, weights, values, states)
    for row in range(2):
        for place in range(6):
            a, c = weights[row, place], coverage[row, place]
            if kind == "count":
                expected = c + a
            elif kind == "fertility":
                expected = c + a / (
                    3.0 * torch.sigmoid(layer.read.weight @ values[row, place] + layer.read.bias)
                )
            else:
                read = (
                    layer.read.weight @ torch.cat([a[None], values[row, place], states[row]])
                    + layer.read.bias
                )
                if kind == "gru":
                    cell = nn.GRUCell(8, 2).double()
                    cell.weight_ih.data, cell.weight_hh.data = layer.read.weight.data, layer.recur.weight.data
                    cell.bias_ih.data, cell.bias_hh.data = layer.read.bias.data, torch.zeros(6).double()
                    expected = cell(torch.cat([a[None], values[row, place], states[row]])[None], c[None])[0]
                else:
                    function = functional.softplus if kind == "softrelu" else getattr(torch, kind)
                    expected = function(read + layer.recur.weight @ c)
            torch.testing.assert_close(found[row, place], expected)


def test_dropout_and_zoneout_within_a_layer() -> None:
    """A layer against its formula, with the masks that it draws; and what is expected of zoneout afterwards."""
    dropout = recipe.Dropout(states=0.5, recurrent=0.4, zoneout_hidden=0.3, zoneout_cell=0.2)
    model = make_model(
        make_config(dropout=dropout.model_dump(), encoder__layers=1, encoder__bidirectional="none")
    )
    (layer,) = model.encoder.upper_layers
    assert isinstance(layer, UnfusedLayer)
    inputs, lengths = torch.randn(2, 4, 6).double(), torch.tensor([4, 4])
    for training in (True, False):
        layer.train(training)
        with drawing_from(None):
            torch.manual_seed(5)
            found, last = layer(inputs, lengths, reverse=False, recompute=False)
            torch.manual_seed(5)
            masks = layer.draw_masks(2, 4, inputs.device)
        assert (masks is None) == (not training)
        h, c = torch.zeros(2, 8).double(), torch.zeros(2, 8).double()
        for place in range(4):
            read = h if masks is None else h * masks.states[:, 0] / 0.5
            i, f, g, o = (inputs[:, place] @ layer.input.T + read @ layer.hidden.T + layer.bias).chunk(4, 1)
            g = g.tanh() if masks is None else g.tanh() * masks.recurrent[:, place] / 0.6
            new_c = f.sigmoid() * c + i.sigmoid() * g
            new_h = o.sigmoid() * new_c.tanh()
            keep_h = 0.7 if masks is None else masks.zoneout_hidden[:, place].double()
            keep_c = 0.8 if masks is None else masks.zoneout_cell[:, place].double()
            h, c = keep_h * new_h + (1 - keep_h) * h, keep_c * new_c + (1 - keep_c) * c
            torch.testing.assert_close(found[:, place], h, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(last, h, rtol=1e-4, atol=1e-6)
        if masks is not None:
            for mask, dropped in zip(masks, (0.5, 0.4, 0.3, 0.2), strict=True):
                assert mask is not None
                assert 0 < int((~mask).sum()) < mask.numel(), dropped


def test_a_gate_and_normalisation_are_those_of_their_formula() -> None:
    model = drawn({"decoder__context_gating": True, "layer_normalization": True})
    decoder: Any = model.decoder
    source, lengths, target_input, _ = make_batch()
    encoded = model.encode(source, lengths)
    state = decoder.initial_state(encoded.summary)
    start = encoded.summary @ decoder.start.weight.T + decoder.start.bias
    vectors = [functional.layer_norm(part, (8,)) for part in start.split(8, 1)]
    for number, vector in enumerate(vectors):  # h of both layers, then c
        expected = torch.tanh(vector * decoder.start_gain[number] + decoder.start_shift[number])
        torch.testing.assert_close(state.layers[number % 2][number // 2], expected, rtol=1e-8, atol=1e-8)
    words = model.target_embedding(target_input[:, 0])
    weights, after = decoder.step(words, encoded.memory, state)
    h = after.layers[-1][0]
    context = torch.einsum("bs,bse->be", weights, encoded.memory.values)
    gate = decoder.combine
    z = torch.sigmoid(torch.cat([h, context], 1) @ gate.weight.T + gate.bias)
    mixed = z * gate.of_state(h) + (1 - z) * gate.of_context(context)
    normal = functional.layer_norm(mixed, (8,)) * decoder.norm.weight + decoder.norm.bias
    torch.testing.assert_close(after.output, torch.tanh(normal), rtol=1e-8, atol=1e-8)


def test_both_matrices_behind_a_gate_are_initialized() -> None:
    init = {"weights": "uniform", "scale": 1e-6}
    gate: Any = make_model(make_config(decoder__context_gating=True, initialization=init)).decoder.combine
    for linear in (gate.of_state, gate.of_context):
        assert 0.0 < float(linear.weight.detach().abs().max()) <= 1e-6


def test_heads_are_those_of_torch() -> None:
    model = drawn({"attention__type": "mhdot", "attention__size": 8, "attention__mhdot_heads": 2})
    attention: Any = model.decoder.attention
    source, lengths, target_input, _ = make_batch()
    encoded = model.encode(source, lengths)
    words = model.target_embedding(target_input[:, 0])
    weights, after = model.decoder.step(words, encoded.memory, model.decoder.initial_state(encoded.summary))
    theirs = nn.MultiheadAttention(8, 2, bias=False, batch_first=True).double()
    theirs.in_proj_weight.data = torch.cat([attention.query, attention.key.weight, attention.value.weight])
    theirs.out_proj.weight.data = torch.eye(8).double()
    values = model.encoder(model.source_embedding(source), lengths, model.implementations)[0]
    padding = torch.arange(5)[None] >= lengths[:, None]
    context, expected = theirs(after.layers[-1][0][:, None], values, values, key_padding_mask=padding)
    torch.testing.assert_close(weights, expected[:, 0])
    combined = torch.cat([after.layers[-1][0], context[:, 0]], 1) @ model.decoder.combine.weight.T
    torch.testing.assert_close(after.output, torch.tanh(combined + model.decoder.combine.bias))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention__coverage": {"type": "count", "num_hidden": 2}}, "must be 1 for coverage of type count"),
        (
            {"attention__coverage": {"type": "gru"}, "attention__type": "dot"},
            "coverage needs type: additive, not dot",
        ),
        (
            {"attention__use_prev_word": True, "attention__type": "dot"},
            "use_prev_word is not supported by type dot",
        ),
        (
            {"attention__type": "fixed", "attention__function": "sparsemax"},
            "cannot be combined with type fixed, which has no scores",
        ),
        ({"attention__type": "mhdot", "attention__size": 5}, "size 5 must be a multiple of mhdot_heads 8"),
        (
            {"attention__type": "mhdot", "attention__size": 9, "attention__mhdot_heads": 3},
            "encoder.size 8 must be a",
        ),
        (
            {"decoder__residual": True, "decoder__first_residual_layer": 1},
            "embedding width 6 must equal decoder.size 8",
        ),
        ({"lhuc": "state_init", "decoder__state_init": "zero"}, "set decoder.state_init to last or avg"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        make_config(**options)
