"""How the linear recurrence is divided into programs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from econmt_ops.backends.triton.recurrence import TileCut
from tests.ops.simulated_gpu import simulated_gpu


@pytest.mark.parametrize(
    ("rows", "steps", "ahead"),
    [(2, 1, 8), (2, 16, 8), (2, 17, 16), (2, 33, 32), (2, 400, 32), (4096, 400, 8)],
)
def test_few_programs_prefetch_more_steps_but_no_more_than_half_a_row(
    rows: int, steps: int, ahead: int
) -> None:
    like: Any = SimpleNamespace(
        shape=(rows, steps, 64), dtype=torch.float32, is_cuda=True, device=torch.device("cuda")
    )
    with simulated_gpu(multiprocessors=132):
        cut = TileCut(like, tiled=False)
    assert (cut.ahead, 32 % cut.ahead) == (ahead, 0)
