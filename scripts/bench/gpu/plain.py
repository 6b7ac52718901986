"""Training step of :mod:`scripts.bench.plain_model` in a CUDA graph, with autocast and fused Adam."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt.config import recipe as schema
from econmt_ops.dispatch.capture import Capturer
from scripts.bench.plain_model import PlainModel, Sizes


class Text(NamedTuple):
    """Source (B, S), lengths (B,) and target (B, T + 1) from ``<s>`` on, all int64 on the device."""

    source: Tensor
    lengths: Tensor
    target: Tensor


def sizes_of(model: schema.Model, source: int, target: int) -> Sizes:
    """Returns the sizes of a recipe's model."""
    encoder, decoder, dropout = model.encoder, model.decoder, model.dropouts
    widths = model.embedding, encoder.size, decoder.size, model.attention.size
    tied, dropouts = model.weight_tying != "none", (dropout.embedding, dropout.output)
    return Sizes(source, target, *widths, encoder.layers, decoder.layers, tied, dropouts)


class CapturedStep:
    """Training step, from the loss to Adam, captured for the shape of one batch."""

    def __init__(self, recipe: schema.Recipe, sizes: tuple[int, int], text: Text, dtype: torch.dtype) -> None:
        model = PlainModel(sizes_of(recipe.model, *sizes), packed=False).to(text.source.device).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True, capturable=True)
        clipping = recipe.training.gradient_clipping

        def step() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=True):
                loss = model.loss(*text, recipe.training.label_smoothing)
            torch.autograd.backward(loss)
            if clipping.type == "value":
                nn.utils.clip_grad_value_(model.parameters(), clipping.threshold)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), clipping.threshold)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        capturer = Capturer(text.source.device)
        with capturer.warming_up():
            step()
            step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # The graph knows addresses: what lies there must live as long as it does.
        self._kept = model, optimizer, text
        self._graph, self.loss = capturer.capture(step)

    def __call__(self) -> None:
        """Enqueues a step; :attr:`loss` holds its loss afterwards."""
        self._graph.replay()
