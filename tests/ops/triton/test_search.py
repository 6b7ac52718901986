"""The kernels in the steps of a search, against its steps without them."""

from __future__ import annotations

import pytest
import torch

from econmt.config import recipe
from econmt.model import IncrementalModel, TranslationModel
from econmt.model.inference.grid import Grid

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
