"""Searching with models that copy."""

from __future__ import annotations

from functools import partial
from itertools import product

import pytest
import torch

from econmt.config import recipe
from econmt.data.text.vocabulary import BOS, EOS, UNK, Vocabularies, WordVocabulary
from econmt.decoding.batches import pad_sources
from econmt.decoding.requests import Request
from econmt.decoding.search import continuous
from econmt.decoding.search.beam import SearchOptions, beam_search
from econmt.decoding.search.continuous import ContinuousSearch, Sentence
from econmt.decoding.search.shortlist import Shortlists
from econmt.decoding.translator import Translator
from econmt.evaluation.scoring import Scorer
from econmt.model import IncrementalModel, TranslationModel
from econmt.model.inference.grid import Grid
from tests.unit.decoding.test_continuous import check

LETTERS = WordVocabulary(["<pad>", "<unk>", "<s>", "</s>", *"abcdefghij"])
BOTH = Vocabularies(LETTERS, LETTERS)
LINES = ["c a b a", "h h h", "j i", "x d x", "e", "g f a a b c"]
VARIANTS: dict[str, dict[str, object]] = {
    "fed": {},
    "gnmt": {"decoder": {"size": 8, "layers": 2, "input_feeding": False, "copy_attention": True}},
    "covered": {"attention": {"size": 8, "coverage": {"type": "tanh", "num_hidden": 2}}},
}
CPU = torch.device("cpu")


def copying_model(variant: str = "fed", seed: int = 1, size: int = LETTERS.size) -> TranslationModel:
    sections = {
        "embedding": 8,
        "encoder": {"size": 8},
        "decoder": {"size": 8, "copy_attention": True},
        "attention": {"size": 8},
    }
    torch.manual_seed(seed)
    model = TranslationModel(recipe.Model.model_validate({**sections, **VARIANTS[variant]}), size, size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_wide_beam_finds_the_best_of_all_translations(variant: str) -> None:
    """Their scores are those of training's loss, which is computed by another way."""
    model, limit, words = copying_model(variant, size=6), 3, (UNK, 4, 5)
    sentences = [[4, 5, 4], [UNK, 5]]
    options = SearchOptions(beam_size=4**limit * 2, nbest_size=9)
    found = beam_search(
        IncrementalModel(model), *pad_sources(sentences, CPU), torch.full((2,), limit), options
    )
    everything = [list(ids) for length in range(limit + 1) for ids in product(words, repeat=length)]
    for sentence, hypotheses in zip(sentences, found, strict=True):
        source, lengths = pad_sources([sentence], CPU)
        scored = []
        for ids in everything:
            with torch.no_grad():
                target = torch.tensor([[BOS, *ids, EOS]])
                loss = float(model.loss(source, lengths, target[:, :-1], target[:, 1:]))
            scored.append((-loss / (len(ids) + 1), ids))
        best = sorted(scored, reverse=True)[:9]
        assert [each.ids for each in hypotheses] == [ids for _, ids in best]
        assert [each.score for each in hypotheses] == pytest.approx([score for score, _ in best], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "mode"),
    [({"sample": 0, "nbest_size": 2, "seed": 3}, ""), ({}, "linear"), ({"beam_size": 1}, "log_linear")],
)
def test_scores_of_translations_are_those_of_their_tokens(options: dict[str, object], mode: str) -> None:
    models = [copying_model("fed"), copying_model("gnmt", 2)] if mode else [copying_model("fed")]
    averaged = {"ensemble_mode": mode} if mode else {}
    given = SearchOptions(**{"beam_size": 4, "batch_size": 4, **options, **averaged})  # type: ignore[arg-type]
    translator = Translator([IncrementalModel(model) for model in models], BOTH, given)
    found = list(translator.translate(LINES))
    scorer = Scorer(models, BOTH, mode=mode or "linear")  # type: ignore[arg-type]
    scored = scorer.score_ids(LINES, [each.hypotheses[0].ids for each in found])
    for one, other in zip(found, scored, strict=True):
        assert other.log_probability == pytest.approx(one.log_probability, abs=1e-4)


@pytest.mark.parametrize("models", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_words_of_the_source_are_on_every_shortlist(models: int) -> None:
    """A list of all words changes nothing; with a few, columns of the output layer are others than words."""
    made = [IncrementalModel(copying_model("fed", seed)) for seed in range(1, models + 1)]
    options = SearchOptions(beam_size=4, nbest_size=4, batch_size=4)
    size = LETTERS.size
    everything = Shortlists(torch.arange(size).int().repeat(size, 1), size, size, joint=True)
    plain, listed = (
        list(Translator(made, BOTH, options, shortlists=short).translate(LINES))
        for short in (None, everything)
    )
    for one, other in zip(plain, listed, strict=True):
        assert one.tokens == other.tokens
        assert one.score == pytest.approx(other.score, abs=1e-5)
    few = Shortlists(torch.full((size, 1), 12).int(), size, 1, joint=True)
    for line, (alone,), together in zip(
        LINES,
        (list(Translator(made, BOTH, options, shortlists=few).translate([line])) for line in LINES),
        Translator(made, BOTH, options, shortlists=few).translate(LINES),
        strict=True,
    ):
        assert together.tokens == alone.tokens
        assert together.score == pytest.approx(alone.score, abs=1e-5)
        allowed = {*LETTERS.encode(line), 12, UNK}
        assert all({*each.ids} <= allowed for each in together.hypotheses)


def test_wishes_are_kept_and_unknown_words_written_as_the_source_has_them() -> None:
    model = copying_model("fed")
    model.output.bias.data[UNK] = 4.0
    options = SearchOptions(beam_size=4, replace_unk=True)
    translator = Translator([IncrementalModel(model)], BOTH, options)
    wished, plain = translator.translate(
        [Request("a b", constraints=("j",), avoid=("a",)), Request("c xyz d", target_prefix="b")]
    )
    assert {13} <= {*wished.hypotheses[0].ids} <= {1, *range(5, LETTERS.size)}
    assert plain.tokens[0] == "b"
    assert UNK in plain.hypotheses[0].ids
    assert {*plain.tokens} <= {*LETTERS.tokens(range(4, LETTERS.size)), "xyz"}


@pytest.mark.parametrize("variant", ["fed", pytest.param("gnmt", marks=pytest.mark.thorough)])
def test_slots_at_fixed_places_give_the_hypotheses_of_beam_search(
    variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots are taken again by sentences of other lengths, whose words must not be those of the ones before."""
    monkeypatch.setattr(continuous, "SHORTEST", 4)
    monkeypatch.setattr(continuous, "ENCODED", 2)
    model = IncrementalModel(copying_model(variant))
    draw = torch.Generator().manual_seed(1)
    lengths = [3, 1, 7, 2, 5, 1, 4, 7, 2, 6, 3]
    sources = [torch.randint(4, LETTERS.size, (length,), generator=draw).tolist() for length in lengths]
    limits = [2 * length + 2 for length in lengths]
    options = SearchOptions(beam_size=4, nbest_size=4)
    expected = beam_search(model, *pad_sources(sources, CPU), torch.tensor(limits), options)
    search = ContinuousSearch(partial(Grid, model), options, CPU, 3, 1000)
    for _ in range(2):
        check(search.search([Sentence(*each) for each in zip(sources, limits, strict=True)]), expected, 1e-4)
