"""Searching with the translation model itself, in its variants, ensembles and averages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.cli.average import average_tensors, choose_checkpoints
from econmt.config import recipe
from econmt.data.text.vocabulary import BOS, EOS
from econmt.decoding.batches import pad_sources
from econmt.decoding.search.beam import SearchOptions, beam_search
from econmt.decoding.search.ensemble import Ensemble, EnsembleMode, as_one
from econmt.errors import InputError
from econmt.model import IncrementalModel, TranslationModel
from tests.unit.decoding.toy import ToyModel, assert_best, search

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


def test_averages_are_summed_in_float64_and_leave_their_inputs() -> None:
    # In float32 the small number is lost beside the large one, and in bfloat16 almost everything is.
    values = [1e8, 1.0, -1e8, 1.0]
    found = average_tensors([(str(i), {"a": torch.tensor([v])}) for i, v in enumerate(values)])
    assert found["a"].tolist() == [0.5]
    lean = average_tensors(
        [(str(i), {"a": torch.tensor([v], dtype=torch.bfloat16)}) for i, v in enumerate(values)]
    )
    assert lean["a"].tolist() == [0.5]
    assert lean["a"].dtype == torch.bfloat16
    tensor = torch.ones(2, dtype=torch.float64)
    average_tensors([("f", {"a": tensor}), ("g", {"a": tensor * 3})])
    assert tensor.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("mode", ["linear", "log_linear"])
def test_search_finds_the_best_of_the_average(mode: EnsembleMode) -> None:
    class Average(ToyModel):
        """The ensemble worked out by hand, token by token."""

        def table(self, sentence: int, prefix: int) -> torch.Tensor:
            first, second = (ToyModel(seed).table(sentence, prefix).double() for seed in (1, 2))
            if mode == "linear":
                return ((first.exp() + second.exp()) / 2).log()
            return ((first + second) / 2).log_softmax(dim=0)

    ensemble = Ensemble([ToyModel(1), ToyModel(2)], mode)
    options = {"beam_size": 200, "length_penalty_alpha": 0.5}
    assert_best(search(ensemble, range(4), **options), Average(), **options)


def test_attention_is_averaged_and_one_model_needs_no_ensemble() -> None:
    class Steady(ToyModel):
        def __init__(self, weights: list[float]) -> None:
            super().__init__(0)
            self.weights = torch.tensor(weights)

        def step(self, tokens, state):  # type: ignore[no-untyped-def]
            log_probs, _, state = super().step(tokens, state)
            return log_probs, self.weights.expand(len(tokens), -1), state

    ((best,),) = search(Ensemble([Steady([0.9, 0.1]), Steady([0.5, 0.5])], "linear"), [0], beam_size=1)
    assert best.attention is not None
    assert best.attention[0].tolist() == pytest.approx([0.7, 0.3])
    model = ToyModel()
    assert as_one([model], "linear") is model


def test_other_shapes_or_names_are_refused_by_name() -> None:
    first = ("f", {"a": torch.zeros(2)})
    with pytest.raises(InputError, match=r"g: parameter 'a' has shape \(3,\), in f it has \(2,\)"):
        average_tensors([first, ("g", {"a": torch.zeros(3)})])
    with pytest.raises(InputError, match="g: parameter 'b' is not in both this file and f"):
        average_tensors([first, ("g", {"a": torch.zeros(2), "b": torch.zeros(1)})])
    with pytest.raises(InputError, match="g: parameter 'a' is not in both"):
        average_tensors([first, ("g", {})])


def test_the_best_checkpoints_are_chosen_by_score() -> None:
    scores = {1: 3.0, 2: 9.0, 3: float("nan"), 4: 5.0, 5: 9.0}
    assert choose_checkpoints([1, 2, 3, 4, 5, 6], scores, 2) == [2, 5]
    assert choose_checkpoints([5, 4, 2], scores, 1) == [2], "the first of equal ones"
    assert choose_checkpoints([1, 2, 3, 4, 5, 6], scores, 3) == [2, 4, 5]
    assert choose_checkpoints([6, 3], scores, 3) == []
    assert choose_checkpoints([1, 2], scores, 9) == [1, 2]
