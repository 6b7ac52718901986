"""Search in slots against beam search, on the same models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from econmt.data.text.vocabulary import EOS
from econmt.decoding.batches import pad_sources
from econmt.decoding.search import continuous
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.continuous import ContinuousSearch, Sentence, runner
from econmt.model import IncrementalModel
from econmt.model.inference.grid import Grid
from tests.unit.decoding.test_real_model import DEVICES, SIZE, VARIANTS, make_model
from tests.unit.decoding.toy import ToyModel, assert_same
from tests.unit.engine.fake_cuda import use_fake_cuda


class ToyGrid:
    """:class:`SearchGrid` of the toy model."""

    def __init__(self, model: ToyModel, slots: int, width: int, positions: int) -> None:
        self.model, self.width, self.positions = model, width, positions
        self.waiting = self.waiting_lengths = torch.zeros(slots, dtype=torch.int64)
        self.sentences = torch.zeros(slots, dtype=torch.int64)
        self.lengths = torch.ones(slots, dtype=torch.int64)
        self.prefixes = torch.zeros(slots * width, dtype=torch.int64)
        self.put_into: list[int] = []

    def encode(self, source: Tensor, lengths: Tensor) -> None:
        self.waiting, self.waiting_lengths = source[:, 0].clone(), lengths.clone()

    def put(self, slots: Tensor, places: Tensor) -> None:
        self.put_into += sorted({*slots.tolist()})
        self.sentences[slots] = self.waiting[places]
        self.lengths[slots] = self.waiting_lengths[places]
        self.prefixes[slots * self.width] = 0

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        owners = torch.arange(len(tokens)) // self.width
        self.prefixes = self.prefixes * 7 + tokens + 1
        pairs = zip(self.sentences[owners].tolist(), self.prefixes.tolist(), strict=True)
        log_probs = torch.stack([self.model.table(*pair) for pair in pairs])
        positions = torch.arange(self.positions)
        seen = (self.prefixes[:, None] % (positions + 2) + 1.0) * (positions < self.lengths[owners, None])
        return log_probs, seen / seen.sum(dim=1, keepdim=True)

    def select(self, rows: Tensor) -> None:
        owners = torch.arange(len(rows)) // self.width
        assert torch.equal(rows // self.width, owners), "a row changes its slot"
        self.prefixes = self.prefixes[rows]


@pytest.fixture(autouse=True)
def _short_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "SHORTEST", 4)
    monkeypatch.setattr(continuous, "ENCODED", 2)


def toy_sentences(limits: Sequence[int]) -> list[Sentence]:
    """As :func:`toy.sources` makes them: sentence n has n % 3 + 1 tokens."""
    return [Sentence([number] * (number % 3 + 1), limit) for number, limit in enumerate(limits)]


def search_one_by_one(
    model: ToyModel, sentences: list[Sentence], options: SearchOptions
) -> list[list[Hypothesis]]:
    found = []
    for sentence in sentences:
        source, lengths = pad_sources([sentence.ids], torch.device("cpu"))
        found += beam_search(model, source, lengths, torch.tensor([sentence.limit]), options)
    return found


@pytest.mark.sampled(6)
@pytest.mark.parametrize("beam_size", [1, 2, 5, 9])
@pytest.mark.parametrize(("alpha", "end_bias"), [(0.0, 0.5), (1.0, 1.5), (2.0, -1.0)])
def test_hypotheses_are_those_of_beam_search(beam_size: int, alpha: float, end_bias: float) -> None:
    # More sentences than slots, of unlike limits, so that slots are taken again at different times.
    model = ToyModel(3, end_bias=end_bias, spread=3.0)
    sentences = toy_sentences([6, 1, 3, 9, 2, 4, 8, 5, 7, 0, 6, 10, 3])
    for nbest, attention in ((1, True), (beam_size, False)):
        options = SearchOptions(
            beam_size=beam_size, length_penalty_alpha=alpha, nbest_size=nbest, attention=attention
        )
        search = ContinuousSearch(partial(ToyGrid, model), options, torch.device("cpu"), 3, 1000)
        assert_same(search.search(sentences), search_one_by_one(model, sentences, options), 1e-6)


def test_a_slot_is_taken_again_as_soon_as_it_is_seen_to_be_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "STEPS", 1)
    grids: list[ToyGrid] = []

    def make(*sizes: int) -> ToyGrid:
        grids.append(ToyGrid(ToyModel(end_bias=-30.0), *sizes))
        return grids[-1]

    # The first sentence takes as long as all others do one after the other.
    options = SearchOptions(beam_size=2, max_output_factor=9.0)
    search = ContinuousSearch(make, options, torch.device("cpu"), 2, 1000)
    search.search([Sentence([0, 0, 0], 20), *(Sentence([1], 2) for _ in range(5))])
    (grid,) = grids
    assert sorted(grid.put_into) == [0, 1, 1, 1, 1, 1]


def test_a_search_that_was_left_leaves_nothing_behind() -> None:
    class Left(Exception):
        pass

    looks = 0

    def poll() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise Left

    model, options = ToyModel(5), SearchOptions(beam_size=3, nbest_size=3, max_output_factor=9.0)
    sentences = toy_sentences([20, 30, 25, 20])
    search = ContinuousSearch(partial(ToyGrid, model), options, torch.device("cpu"), 2, 1000)
    with pytest.raises(Left):
        search.search(sentences, poll)
    assert_same(search.search(sentences[::-1]), search_one_by_one(model, sentences[::-1], options), 1e-6)


def test_long_sentences_get_fewer_slots_and_lanes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuous, "WORTH", 2)
    made: list[tuple[int, ...]] = []

    def make(*sizes: int) -> ToyGrid:
        made.append(sizes)
        return ToyGrid(ToyModel(), *sizes)

    search = ContinuousSearch(make, SearchOptions(beam_size=2), torch.device("cpu"), 8, 24)
    assert sorted(search.worthwhile([1, 3, 4, 15, 5, 16])) == [[0, 1], [2, 4]]
    search.search([Sentence([1] * 7, 3)])
    search.search([Sentence([1] * 8, 3)])
    search.search([Sentence([2] * 6, 3)])
    search.search([Sentence([2] * 33, 3)])
    assert made == [(3, 2, 8), (1, 2, 16), (1, 2, 64)]
    assert sorted(search.worthwhile([15, 5])) == [[0], [1]]
    assert search.worthwhile([100, 15, 100]) == [[0, 2], [1]]


def test_a_model_without_finite_probabilities_gives_no_hypotheses() -> None:
    class Broken(ToyModel):
        def table(self, sentence: int, prefix: int) -> Tensor:
            table = super().table(sentence, prefix)
            return table * torch.nan if sentence == 1 else table

    sentences = toy_sentences([4, 4, 4])
    options = SearchOptions(beam_size=2)
    search = ContinuousSearch(partial(ToyGrid, Broken()), options, torch.device("cpu"), 2, 1000)
    found = search.search(sentences)
    assert [len(each) for each in found] == [1, 0, 1]


QUICK = ("additive", "deep", "together")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "variant",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in VARIANTS if name not in QUICK)],
)
def test_the_models_hypotheses_are_those_of_beam_search(variant: str, device: str) -> None:
    """Slots have their own coverage, too."""
    # In float64, since layer normalisation of cells and outputs magnifies the rounding of these sharp models.
    model = IncrementalModel(make_model(variant, device=device).double())
    draw = torch.Generator().manual_seed(1)
    lengths = [3, 1, 7, 2, 5, 1, 4, 9, 2, 6, 3]
    sources = [torch.randint(EOS + 1, SIZE, (length,), generator=draw).tolist() for length in lengths]
    limits = [2 * length + 2 for length in lengths]
    options = SearchOptions(beam_size=4, nbest_size=4)
    padded = pad_sources(sources, torch.device(device))
    expected = beam_search(model, *padded, torch.tensor(limits), options)
    search = ContinuousSearch(partial(Grid, model), options, torch.device(device), 4, 1000)
    for _ in range(3):  # called, captured, replayed
        found = search.search([Sentence(*each) for each in zip(sources, limits, strict=True)])
        assert_same(found, expected, 1e-4)


def test_what_is_captured_is_done_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_cuda(monkeypatch)
    graphs, total = runner(torch.device("cuda"), pytest.fail), torch.zeros(())
    for calls in range(1, 5):  # called, captured, replayed
        graphs("add", lambda: total.add_(1))
        assert total.item() == calls


def test_what_cannot_be_captured_is_called_and_the_first_error_told(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_cuda(monkeypatch)
    notes: list[str] = []
    graphs, total = runner(torch.device("cuda"), notes.append), torch.zeros(())
    for calls in range(1, 5):
        graphs("ask", lambda: total.add_(1).item())
        assert total.item() == calls
    assert notes == [
        "no CUDA graphs for the search, whose kernels are launched one by one: "
        "CUDA error: operation not permitted when stream is capturing"
    ]


def test_a_full_device_ends_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_cuda(monkeypatch)
    calls: list[int] = []

    def second_fails() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    graphs = runner(torch.device("cuda"), pytest.fail)
    graphs("fill", second_fails)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        graphs("fill", second_fails)
    assert len(calls) == 2
