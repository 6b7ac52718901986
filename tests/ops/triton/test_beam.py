"""Beam search by kernels beside :class:`econmt.decoding.search.slots.Slots`, and models with parameters in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt.config import recipe
from econmt.config.recipe import load_recipe
from econmt.decoding.search import slots as module
from econmt.decoding.search.beam import SearchOptions
from econmt.decoding.search.slots import Slots, hypotheses
from econmt.engine.precision import NAMED
from econmt.engine.step import TrainingStep
from econmt.model import Implementations, IncrementalModel, TranslationModel
from econmt.model.inference.grid import Grid
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_ops.backends.triton import beam
from tests.ops.triton.kernel_device import DEVICE


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
        scores[0, 16:] = -torch.inf  # all scores of a chunk
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


SIZE = 23
VARIANTS: dict[str, dict[str, object]] = {
    "additive": {},
    "layer-norm": {"attention": {"size": 7, "layer_norm": True}},
    "scaled-dot": {"attention": {"type": "scaled_dot"}},
    "parallel": {"decoder": {"size": 8, "layers": 2, "input_feeding": False}},
    "deep": {"decoder": {"size": 8, "layers": 2, "residual": True}},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_are_those_without_kernels(variant: str, device: str) -> None:
    sections = {"embedding": 8, "encoder": {"size": 8}, "decoder": {"size": 8}, "attention": {"size": 8}}
    torch.manual_seed(1)
    model = TranslationModel(recipe.Model.model_validate({**sections, **VARIANTS[variant]}), SIZE, SIZE)
    source = torch.tensor([[5, 9, 4, 3, 0], [7, 3, 0, 0, 0], [4, 4, 8, 9, 3]], device=device)
    lengths = torch.tensor([4, 2, 5], device=device)
    tokens = torch.tensor([[2, 2, 2, 2, 2, 2], [5, 9, 6, 6, 7, 22]], device=device)
    found = []
    for dtype in (torch.float32, torch.float64):  # which the kernels do not serve
        grid = Grid(IncrementalModel(model.to(device, dtype).eval()), 3, 2, 6)
        assert (grid._state.sources.kernels is None) == (dtype == torch.float64)
        grid.encode(source, lengths)
        grid.put(torch.tensor([2, 0, 1], device=device), torch.tensor([0, 1, 2], device=device))
        grid.step(tokens[0])
        grid.select(torch.tensor([0, 0, 2, 2, 4, 4], device=device))
        found.append(grid.step(tokens[1]))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), expected.double(), rtol=1e-4, atol=1e-5)


SIZES = (
    "model.embedding=16",
    "model.encoder={layers: 2, size: 32}",
    "model.decoder={layers: 2, size: 16}",
    "model.attention.size=16",
    "model.dropout=0.0",
)


def gradients(dtype: str, implementation: str) -> tuple[float, dict[str, Tensor]]:
    task = TranslationTask(load_recipe("quickstart", [*SIZES, f"training.param_dtype={dtype}"]), 60, 60)
    torch.manual_seed(3)
    model = task.build_model().train().to(DEVICE)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    how = Implementations.everywhere(implementation, "outputs")
    step = TrainingStep(task, model, NAMED["bfloat16"], implementations=how)
    torch.manual_seed(4)
    batch = task.example(Shape(3, 4, 3))
    loss = float(step.gradient([batch.to(step.device)], step.tokens([batch])).loss)
    step.optimizer.make_dense()
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {part.dtype for part in named.values() if part is not None and part.dim() > 1} == {
        getattr(torch, dtype)
    }
    return loss, {name: part.float() for name, part in named.items() if part is not None}


@pytest.mark.parametrize("implementation", ["recompute", pytest.param("triton", marks=pytest.mark.thorough)])
def test_gradients_are_those_of_float32_parameters(implementation: str) -> None:
    (loss, narrow), (exact_loss, exact) = (
        gradients(dtype, implementation) for dtype in ("bfloat16", "float32")
    )
    assert loss == pytest.approx(exact_loss, rel=1e-6)
    assert narrow.keys() == exact.keys()
    for name, gradient in exact.items():
        assert (narrow[name] - gradient).abs().max() <= 2.0**-7 * gradient.abs().max(), name
