"""As compiling.py, for the kernels of the output layer, of dropout, look-ups, reversal and of cell states.

python -m tests.ops.triton.compiling_output CAPABILITY NAME...
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from econmt_ops.backends.triton import (
    cross_entropy,
    embedding,
    persistent,
    random,
    reversal,
    sliced_cross_entropy,
)
from tests.ops.triton.compiling import report


def losses(dtype: torch.dtype, vocabulary: int) -> None:
    """With label smoothing and gradients; rows as `walk` pads them."""
    stride = -(-vocabulary // 64) * 64
    logits, values = torch.zeros(2, stride, dtype=dtype), torch.zeros(2)
    targets = torch.zeros(2, dtype=torch.int64)
    cross_entropy._make_losses(logits, vocabulary, targets, values, None, 0.1, -100, True)


def slices(end: bool) -> None:
    """The first of its kernels, or the second."""
    logits, targets = torch.zeros(2, 16_640, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int64)
    labels = sliced_cross_entropy.Labels(targets, 0, 33_278, 16_639, 0.1, -100)
    if not end:
        sliced_cross_entropy.slice_numbers_of(logits, 16_639, targets, labels)
        return
    numbers, losses = torch.zeros(2, 3, 2), torch.zeros(2)
    sliced_cross_entropy.put_slice_gradient(logits, 16_639, targets, numbers, labels, torch.ones(()), losses)


def cell_states() -> None:
    """Of an LSTM that walks backwards over rows of different lengths."""
    sums, states = torch.zeros(1, 3, 5, 256, dtype=torch.bfloat16), torch.zeros(1, 3, 5, 64)
    persistent.walk_cells(sums, states[:, 0], states, torch.ones(5, dtype=torch.int64), (True,))


def calls() -> dict[str, Callable[[], object]]:
    """Launches by name."""
    rows, lengths = torch.zeros(2, 16, 512, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)
    seed = torch.zeros((), dtype=torch.int64)
    return {
        "losses bfloat16": lambda: losses(torch.bfloat16, 32_000),
        "losses float32": lambda: losses(torch.float32, 32_000),
        "losses of an odd vocabulary": lambda: losses(torch.bfloat16, 7709),
        "numbers of a slice": lambda: slices(False),
        "gradient of a slice": lambda: slices(True),
        "bias": lambda: cross_entropy._add_rows(torch.zeros(32_000), rows.view(1, -1)[:, :16_384], False),
        "mask": lambda: random.keep_mask(1 << 20, seed, 1, 50_000),
        "dropout bfloat16": lambda: random.dropout(rows, seed, 1, 50_000, 1.25, False),
        "dropout float32": lambda: random.dropout(rows.float(), seed, 1, 50_000, 1.25, True),
        "look-up": lambda: embedding.gradient(rows.float(), torch.zeros(2, 16, dtype=torch.int64), 32_000, 0),
        "cell states": cell_states,
        "reversal": lambda: reversal.reverse(rows, lengths),
    }


if __name__ == "__main__":
    report(calls())
