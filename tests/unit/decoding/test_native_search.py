"""Beam search in one call of the C library against that of tensors, and against steps in C."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest
import torch

from econmt.data.text.vocabulary import EOS
from econmt.decoding.batches import pad_sources
from econmt.decoding.constraints.batch import ConstrainedContinuations, DecodingConstraints
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.native import has_native_search, native_search
from econmt.decoding.search.shortlist import Restricted
from econmt.model import IncrementalModel, TranslationModel
from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import MOST_PLACES
from tests.unit.decoding.test_real_model import COMBINATIONS, SIZE, SOURCES, VARIANTS, make_model
from tests.unit.decoding.toy import assert_same

KNOWN = sorted(VARIANTS.keys() - {"qrnn"})
LIMITS = torch.tensor([4, 9, 12, 2])
OPTIONS = [
    {"beam_size": 4, "nbest_size": 4},
    {"beam_size": 1},
    {"beam_size": 5, "nbest_size": 2, "length_penalty_alpha": 0.0},
    {"beam_size": 30, "nbest_size": 3, "attention": False},
]
BATCH = *pad_sources(SOURCES, torch.device("cpu")), LIMITS


def unconstrained(options: SearchOptions) -> ConstrainedContinuations:
    """What steers a search of the sources to nothing."""
    joins = torch.zeros(SIZE, dtype=torch.bool)
    return ConstrainedContinuations([DecodingConstraints()] * len(SOURCES), joins, options)


agree = partial(assert_same, whole=10.0)


def by_tensors(
    model: TranslationModel, options: SearchOptions, precision: torch.dtype = torch.float32
) -> list[list[Hypothesis]]:
    with native.without():
        return beam_search(IncrementalModel(model, precision), *BATCH, options)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("given", OPTIONS, ids=str)
@pytest.mark.parametrize("variant", KNOWN)
def test_it_finds_what_the_search_of_tensors_finds(variant: str, given: dict[str, Any]) -> None:
    model, options = make_model(variant), SearchOptions(**given)
    assert has_native_search(IncrementalModel(model), options)
    agree(native_search(IncrementalModel(model), *BATCH, options), by_tensors(model, options), 1e-4)


@pytest.mark.parametrize("precision", [torch.float32, torch.int8])
@pytest.mark.parametrize("variant", COMBINATIONS)
def test_options_of_decoders_in_pairs(variant: str, precision: torch.dtype) -> None:
    """As in the search of tensors, with beams of 1, 2 and 5; in 8 bits, as steps in C, to the last bit."""
    for beam_size in (1, 2, 5):
        model = IncrementalModel(make_model(variant), precision)
        options = SearchOptions(beam_size=beam_size, nbest_size=beam_size)
        found = native_search(model, *BATCH, options)
        assert_same(beam_search(model, *BATCH, options.changed(beam_prune=100.0)), found)
        if precision == torch.float32:
            agree(found, by_tensors(model.model, options), 1e-4)


@pytest.mark.parametrize(
    ("certainty", "limits", "alpha", "nbest"), [(1.0, [2, 4, 6, 3], 3.0, 1), (4.0, [8, 12, 6, 9], 1.0, 6)]
)
def test_it_ends_not_early_nor_late(certainty: float, limits: list[int], alpha: float, nbest: int) -> None:
    """Translations that end in the last steps before the limit are better than earlier ones, in some of many models."""
    batch = *BATCH[:2], torch.tensor(limits)
    options = SearchOptions(beam_size=max(4, nbest), nbest_size=nbest, length_penalty_alpha=alpha)
    for seed in range(12):
        model = make_model("additive", seed)
        with torch.no_grad():
            model.output.weight.mul_(certainty)
            model.output.bias[EOS] += 1.0
        with native.without():
            wanted = beam_search(IncrementalModel(model), *batch, options)
        agree(native_search(IncrementalModel(model), *batch, options), wanted, 1e-3)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.int8])
def test_every_instruction_set_and_precision_finds_it(precision: torch.dtype) -> None:
    """In few bits hypotheses near each other may change places; the best ones here are not near."""
    model, options = make_model("additive"), SearchOptions(beam_size=3)
    tolerance = 1e-4 if precision == torch.float32 else 0.05
    found = native_search(IncrementalModel(model, precision), *BATCH, options)
    agree(found, by_tensors(model, options, precision), tolerance)


def test_attention_over_long_sources_has_memory_of_its_own() -> None:
    """Weights of all rows and positions are many more than rows and positions, or than the logits behind them."""
    model, options = make_model("additive"), SearchOptions(beam_size=4, nbest_size=4)
    draw = torch.Generator().manual_seed(3)
    sources = [torch.randint(4, SIZE, (length,), generator=draw).tolist() for length in (100, 60, 97, 100)]
    batch = *pad_sources(sources, torch.device("cpu")), torch.tensor([6, 9, 12, 8])
    with native.without():
        wanted = beam_search(IncrementalModel(model), *batch, options)
    agree(native_search(IncrementalModel(model), *batch, options), wanted, 1e-4)


@pytest.mark.usefixtures("level")
@pytest.mark.sampled(14)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("given", OPTIONS, ids=str)
@pytest.mark.parametrize("variant", KNOWN)
def test_searches_agree_to_the_last_bit(variant: str, given: dict[str, Any], precision: torch.dtype) -> None:
    """In C, as PyTorch has it with pruning that prunes nothing, and with wishes that rule nothing out."""
    model, options = IncrementalModel(make_model(variant), precision), SearchOptions(**given)
    wanted = native_search(model, *BATCH, options)
    assert_same(beam_search(model, *BATCH, options.changed(beam_prune=100.0)), wanted)
    assert_same(beam_search(model, *BATCH, options, chooser=unconstrained(options)), wanted)


@pytest.mark.parametrize(
    ("precision", "beam_size"), [(torch.float32, 7), (torch.bfloat16, 2), (torch.int8, 7), (torch.int8, 1)]
)
def test_words_with_equal_probabilities_keep_their_order(precision: torch.dtype, beam_size: int) -> None:
    model = make_model("additive")
    with torch.no_grad():
        # Three kinds of words, of which those of a kind are as probable as each other.
        kinds = torch.arange(SIZE) % 3
        model.output.weight.copy_(model.output.weight[kinds])
        model.output.bias.copy_(model.output.bias[kinds])
        model.target_embedding.weight.copy_(model.target_embedding.weight[kinds])
    searched = IncrementalModel(model, precision)
    options = SearchOptions(beam_size=beam_size, nbest_size=beam_size, length_penalty_alpha=0.7)
    wanted = native_search(searched, *BATCH, options)
    scores = [each.score for best in wanted for each in best]
    assert beam_size < 7 or len({*scores}) < len(scores)
    assert_same(beam_search(searched, *BATCH, options.changed(beam_prune=100.0)), wanted)
    assert_same(beam_search(searched, *BATCH, options, chooser=unconstrained(options)), wanted)


@pytest.mark.parametrize("precision", [torch.float32, torch.int8])
def test_shortlists_are_those_of_the_search_of_tensors(precision: torch.dtype) -> None:
    torch.manual_seed(4)
    model = IncrementalModel(make_model("tied"), precision)
    options = SearchOptions(beam_size=5, nbest_size=3)
    allowed = torch.rand(len(SOURCES), SIZE) < 0.4
    allowed[:, :4] = True
    restricted = Restricted(model, allowed, torch.device("cpu"), whole=False)
    wanted = [
        [each._replace(ids=restricted.ids(each.ids)) for each in best]
        for best in beam_search(restricted, *BATCH, options)
    ]
    found = native_search(model, *BATCH, options, allowed=allowed)
    assert_same(found, wanted)
    for row, best in enumerate(found):
        assert all(bool(allowed[row, each.ids].all()) for each in best)


def test_threads_share_the_sentences_and_what_watches_ends_it() -> None:
    model, options = IncrementalModel(make_model("additive")), SearchOptions(beam_size=3)
    alone = native_search(model, *BATCH, options)
    torch.set_num_threads(3)
    agree(native_search(IncrementalModel(make_model("additive")), *BATCH, options), alone, 0.0)
    looks: list[None] = []

    def poll() -> None:
        looks.append(None)
        if len(looks) == 2:
            raise KeyboardInterrupt

    model = IncrementalModel(make_model("additive"))
    with pytest.raises(KeyboardInterrupt):
        native_search(model, *BATCH, SearchOptions(beam_size=4), poll)
    assert len(looks) == 2


def test_words_that_have_no_table_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    options = SearchOptions(beam_size=3)
    wanted = native_search(IncrementalModel(make_model("additive")), *BATCH, options)
    monkeypatch.setattr("econmt.model.inference.native.TABLE_BYTES", 0)
    agree(native_search(IncrementalModel(make_model("additive")), *BATCH, options), wanted, 0.0)


def test_a_signal_while_it_computes_is_handled_where_it_may_raise() -> None:
    """Delivered as a callback begins, and between the last of them and the end."""
    model, looks = IncrementalModel(make_model("additive")), list[None]()

    def interrupted() -> None:
        looks.append(None)
        signal.raise_signal(signal.SIGINT)  # Python runs the handler at the next callback, or after the call

    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    with pytest.raises(KeyboardInterrupt):
        native_search(model, *BATCH, SearchOptions(beam_size=4), interrupted)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert len(looks) <= 2
    handled: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: handled.append(number))
    found = native_search(model, *BATCH, SearchOptions(beam_size=4), interrupted)
    assert handled
    agree(found, native_search(model, *BATCH, SearchOptions(beam_size=4)), 0.0)


def test_no_sentence_is_no_search() -> None:
    model = IncrementalModel(make_model("additive"))
    source, lengths, limits = BATCH
    assert native_search(model, source[:0], lengths[:0], limits[:0], SearchOptions()) == []


def test_numbers_that_are_not_finite_give_no_translation() -> None:
    model = make_model("additive")
    with torch.no_grad():
        model.output.bias[9] = torch.nan
    assert native_search(IncrementalModel(model), *BATCH, SearchOptions()) == [[]] * len(SOURCES)


def test_other_models_are_not_its() -> None:
    assert not has_native_search(IncrementalModel(make_model("qrnn")), SearchOptions())
    model = make_model("additive")
    assert not has_native_search(IncrementalModel(model.double()), SearchOptions())
    with native.without():
        assert not has_native_search(IncrementalModel(model.float()), SearchOptions())


@pytest.mark.parametrize(
    "given",
    [
        {"beam_size": MOST_PLACES + 1},
        {"beam_prune": 1.0},
        {"beam_search_stop": "first"},
        {"block_ngram_repeat": 2},
        {"sample": 0},
        {"min_output_length": 1},
        {"ban_unk": True},
        {"unk_penalty": 0.1},
        {"word_penalty": 0.1},
        {"repetition_penalty": 1.1},
    ],
    ids=str,
)
def test_other_searches_are_not_its(given: dict[str, Any]) -> None:
    model = IncrementalModel(make_model("additive"))
    assert not has_native_search(model, SearchOptions(**given))
    assert has_native_search(model, SearchOptions(beam_size=MOST_PLACES))
