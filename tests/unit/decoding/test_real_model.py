"""Searching with the translation model itself, in its variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.config import recipe
from econmt.data.text.vocabulary import BOS, EOS
from econmt.decoding.batches import pad_sources
from econmt.decoding.search.beam import SearchOptions, beam_search
from econmt.model import IncrementalModel, TranslationModel

SIZE = 23
SOURCES = [[5, 9, 4], [7], [4, 4, 8, 9, 10, 11, 22], [6, 5]]
VARIANTS: dict[str, dict[str, object]] = {
    "additive": {},
    "dot": {"attention": {"type": "dot"}},
    "bilinear": {"attention": {"type": "bilinear"}},
    "gnmt": {"decoder": {"size": 8, "layers": 2, "input_feeding": False}},
    "deep": {"decoder": {"size": 8, "layers": 3, "residual": True}, "encoder": {"size": 8, "layers": 2}},
    "tied": {"weight_tying": "src_trg_softmax", "embedding": 6},
    "gru-deep": {
        "decoder": {"cell": "gru", "size": 8, "layers": 3, "residual": True},
        "attention": {"type": "dot"},
    },
    "ssru": {"decoder": {"cell": "ssru", "size": 8, "layers": 2, "input_feeding": False, "residual": True}},
    "normalized-gnmt": {"decoder": {"cell": "lnlstm", "size": 8, "layers": 2, "input_feeding": False}},
    "qrnn": {"decoder": {"cell": "qrnn", "size": 8, "input_feeding": False}},
    "together": {
        "decoder": {"cell": "gru", "size": 8, "context_gating": True, "layers": 2},
        "attention": {"size": 8, "layer_norm": True, "coverage": {"type": "gru", "num_hidden": 2}},
        "layer_normalization": True,
    },
}
COVERAGES = ("none", "count", "fertility", "tanh", "sigmoid", "relu", "softrelu", "gru")


def combination(cell: int, coverage: int) -> dict[str, Any]:
    """A cell with an update of the coverage; of all of these, some have any two settings of any two options."""
    layers, attention = 1 + (cell * coverage) % 3, {"size": 7, "layer_norm": bool((cell // 2 + coverage) % 2)}
    kind, width = COVERAGES[coverage], 1 if coverage < 3 else 1 + coverage % 3
    return {
        "decoder": {
            "cell": ("lstm", "gru", "lnlstm", "lnglstm")[cell],
            "size": 8,
            "layers": layers,
            "residual": layers == 3,
            "context_gating": bool((cell + coverage) % 2),
            "state_init": ("last", "avg", "zero")[(cell + coverage) % 3],
        },
        "attention": {**attention, "coverage": {"type": kind, "num_hidden": width}},
        "layer_normalization": bool((cell + coverage // 2) % 2),
    }


COMBINATIONS = {
    f"{('lstm', 'gru', 'lnlstm', 'lnglstm')[cell]}, {COVERAGES[coverage]}": combination(cell, coverage)
    for cell in range(4)
    for coverage in range(8)
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


def make_model(variant: str, seed: int = 1, device: str = "cpu") -> TranslationModel:
    sections = {"embedding": 8, "encoder": {"size": 8}, "decoder": {"size": 8}, "attention": {"size": 8}}
    torch.manual_seed(seed)
    changes = {**VARIANTS, **COMBINATIONS}[variant]
    model = TranslationModel(recipe.Model.model_validate({**sections, **changes}), SIZE, SIZE)
    # First values make all words alike; a trained model is not indifferent. One with normalised layers is at once.
    normalised = model.config.layer_normalization or "ln" in model.config.decoder.cell
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2 if normalised else 3.0)
    return model.to(device).eval()


def teacher_forced(model: TranslationModel, source: Sequence[int], ids: Sequence[int]) -> Tensor:
    """Log-probabilities (T, V) of each next token, the sentence alone and unpadded."""
    device = model.output.weight.device
    tensor, lengths = pad_sources([source], device)
    with torch.no_grad():
        hidden = model(tensor, lengths, torch.tensor([[BOS, *ids]], device=device))
        logits = hidden[0] @ model.output.weight.T + model.output.bias
    return logits.log_softmax(dim=-1).cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_log_probabilities_are_those_of_teacher_forcing(variant: str, device: str) -> None:
    model = make_model(variant, device=device)
    source, lengths = pad_sources(SOURCES, torch.device(device))
    limits = torch.tensor([4, 9, 6, 2])
    found = beam_search(
        IncrementalModel(model), source, lengths, limits, SearchOptions(beam_size=4, nbest_size=4)
    )
    for sentence, hypotheses in enumerate(found):
        assert len(hypotheses) == 4
        for hypothesis in hypotheses:
            log_probs = teacher_forced(model, SOURCES[sentence], hypothesis.ids)
            chosen = log_probs.gather(1, torch.tensor([*hypothesis.ids, EOS])[:, None])
            assert hypothesis.log_probability == pytest.approx(float(chosen.sum()), rel=3e-5, abs=1e-4)
            assert hypothesis.attention is not None
            torch.testing.assert_close(hypothesis.attention.sum(dim=1), torch.ones(len(hypothesis.ids) + 1))


def test_coverage_is_of_the_attention_of_hypotheses() -> None:
    options = SearchOptions(beam_size=4, nbest_size=4, coverage_penalty_weight=0.3)
    model = IncrementalModel(make_model("additive"))
    limits = torch.tensor([9, 9, 1, 9])  # the longest sentence is done first
    for hypotheses in beam_search(model, *pad_sources(SOURCES, torch.device("cpu")), limits, options):
        for hypothesis in hypotheses:
            assert hypothesis.attention is not None
            seen = hypothesis.attention.double().sum(dim=0)[:-1]
            expected = hypothesis.log_probability / (len(hypothesis.ids) + 1)
            expected += 0.3 * float(seen.clamp(max=1.0).log().sum())
            assert hypothesis.score == pytest.approx(expected, abs=1e-5)
