"""Beam search by kernels against :class:`econmt.decoding.search.slots.Slots` without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt.decoding.search import slots as module
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.slots import Slots, hypotheses
from econmt_ops.backends.triton import beam


class Drawn:
    """A grid whose scores are drawn, whatever the tokens are; rows are padded with NaN."""

    def __init__(self, rows: int, words: int, device: str, end: float) -> None:
        self.draw = torch.Generator().manual_seed(1)
        self.shape, self.device, self.end = (rows, words), device, end

    def encode(self, source: Tensor, lengths: Tensor) -> None:
        pass

    def put(self, slots: Tensor, places: Tensor) -> None:
        pass

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        assert int(tokens.min()) >= 0
        assert int(tokens.max()) < self.shape[1]
        scores = 2.0 * torch.randn(self.shape, generator=self.draw)
        scores[:, 3] += self.end
        padded = torch.full((self.shape[0], self.shape[1] + 3), torch.nan)
        padded[:, : self.shape[1]] = scores
        return padded.to(self.device)[:, : self.shape[1]], tokens

    def select(self, rows: Tensor) -> None:
        owners = torch.arange(len(rows)) // (len(rows) // 3)
        assert torch.equal(rows.cpu() // (len(rows) // 3), owners), "a row changes its slot"


@pytest.mark.parametrize(
    ("places", "nbest", "words", "chunk", "end"),
    [
        (1, 1, 30, 16, 2.0),
        (2, 1, 5, 8, 1.0),
        pytest.param(5, 1, 40, 16, 1.5, marks=pytest.mark.thorough),
        pytest.param(5, 5, 33, 8, 2.5, marks=pytest.mark.thorough),
        pytest.param(3, 2, 70, 64, -50.0, marks=pytest.mark.thorough),
        pytest.param(7, 3, 6, 8, 0.0, marks=pytest.mark.thorough),
    ],
)
def test_a_search_by_kernels_is_that_without(
    places: int, nbest: int, words: int, chunk: int, end: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beam, "_CHUNK", chunk)
    found = []
    for most in (16, 0):
        monkeypatch.setattr(module, "MOST_BY_KERNELS", most)
        grid = Drawn(3 * places, words, device, end)
        search = Slots(
            grid, 3, 12, None, SearchOptions(beam_size=places, nbest_size=nbest), torch.device(device)
        )
        first = torch.arange(3, device=device)
        search.begin(first, first, torch.tensor([3, 8, 0], device=device))
        states = []
        for number in range(11):
            if number == 5:  # a slot is taken again while others go on
                search.begin(first[2:], first[:1], torch.tensor([3, 8, 0], device=device))
            search.step()
            ended = [search.ended[s, : int(n)] for s, n in enumerate(search.count)]
            states.append([search.state(), search.totals.clone(), *(part.clone() for part in ended)])
        tables = search.ended.cpu(), search.grown.cpu()
        limits = (3, 8, 3)
        best = [
            hypotheses(tables[0][s, : int(search.count[s])], tables[1][s], None, 1, limits[s], [1.0] * 20, 9)
            for s in range(3)
        ]
        found.append((states, [[(each.ids, each.cut) for each in sentence] for sentence in best]))
    (states, ours), (expected_states, expected) = found
    assert ours == expected
    assert all(ours)
    for each, other in zip(states, expected_states, strict=True):
        for one, another in zip(each, other, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-6, atol=1e-5)


def test_rows_without_finite_scores_end_their_sentence(device: str) -> None:
    class Broken(Drawn):
        def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            scores, attention = super().step(tokens)
            scores[2:4] = torch.nan
            return scores, attention

    search = Slots(Broken(6, 20, device, 1.0), 3, 8, None, SearchOptions(beam_size=2), torch.device(device))
    first = torch.arange(3, device=device)
    search.begin(first, first, torch.full((3,), 4, device=device))
    for _ in range(5):
        search.step()
    taken, count = search.state().tolist()
    assert taken[1] == 1
    assert count[1] == 0
    assert count[0] > 0
    assert count[2] > 0
