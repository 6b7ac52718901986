"""Batches of sentences for a model, and the context in which it computes them.

Shapes: B sentences, S source positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from econmt.data.batching.token_store import rectangle
from econmt.data.text.vocabulary import EOS


def pad_sources(sources: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns source ids (B, S) with EOS and padding, and lengths (B,) including EOS, from ids without them."""
    source, lengths = rectangle([[*ids, EOS] for ids in sources])
    return torch.from_numpy(source).to(device), torch.from_numpy(lengths).to(device)


def batches_by_length(lengths: Sequence[int], batch_size: int, tokens: int) -> list[list[int]]:
    """Returns batches of indices of sentences of similar length, longest first.

    Args:
        lengths: length of each sentence. batch_size: maximum number of sentences in a batch.
        tokens: maximum number of padded tokens in a batch of several sentences; very long lines are translated alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    for index in order:
        last = batches[-1] if batches else []
        if last and len(last) < batch_size and (len(last) + 1) * lengths[last[0]] <= tokens:
            last.append(index)
        else:
            batches.append([index])
    return batches


@contextmanager
def evaluation_mode(models: Sequence[object]) -> Iterator[None]:
    """Disables dropout and cuDNN's TF32 within the context.

    PyTorch lets cuDNN compute the LSTMs of whole sentences in TF32, but not the single steps of a search: scores of a
    translation from searching and from scoring would differ in the fourth digit.
    """
    training = [model for model in models if isinstance(model, nn.Module) and model.training]
    allowed = torch.backends.cudnn.allow_tf32
    for model in training:
        model.eval()
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
        for model in training:
            model.train()
