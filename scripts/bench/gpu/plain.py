"""The yardstick on a GPU: a recipe's model in plain PyTorch as a good engineer writes it, a step in a CUDA graph.

cuDNN's LSTMs for the encoder; in the decoder all four gates in one product, the input's part of them and the
attention's keys for all positions before the loop; output layer and loss once; autocast; fused Adam. Autograd does
the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from econmt.config import recipe as schema

PAD = 0


class Text(NamedTuple):
    """A batch: source (B, S), lengths (B,), target input and output (B, T), all int64 on the device."""

    source: Tensor
    lengths: Tensor
    target_input: Tensor
    target_output: Tensor


class Plain(nn.Module):
    """The recipe's model: a bidirectional layer below, LSTM layers above, additive attention, input feeding."""

    def __init__(self, model: schema.Model, source_size: int, target_size: int) -> None:
        super().__init__()
        size, wide, attention = model.encoder.size, model.decoder.size, model.attention.size
        self.source = nn.Embedding(source_size, model.embedding, padding_idx=PAD)
        self.target = nn.Embedding(target_size, model.embedding, padding_idx=PAD)
        self.bottom = nn.LSTM(model.embedding, size // 2, batch_first=True, bidirectional=True)
        upper = model.encoder.layers - 1
        self.upper = nn.LSTM(size, size, upper, batch_first=True) if upper else None
        self.start = nn.Linear(size, 2 * wide * model.decoder.layers)
        self.inputs = nn.Linear(model.embedding, 4 * wide)
        self.recurrent = nn.ModuleList(
            nn.Linear(2 * wide, 4 * wide, bias=layer > 0) for layer in range(model.decoder.layers)
        )
        self.keys = nn.Linear(size, attention, bias=False)
        self.query = nn.Linear(wide, attention, bias=False)
        self.score = nn.Linear(attention, 1, bias=False)
        self.combine = nn.Linear(wide + size, wide)
        self.drop = nn.Dropout(model.dropouts.embedding), nn.Dropout(model.dropouts.output)
        self.output = nn.Linear(model.embedding if model.weight_tying != "none" else wide, target_size)
        self.readout = nn.Linear(wide, model.embedding) if model.weight_tying != "none" else nn.Identity()
        if model.weight_tying != "none":
            self.output.weight = self.target.weight = self.source.weight
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.08, 0.08)

    def loss(self, text: Text, label_smoothing: float) -> Tensor:
        """The mean cross-entropy of the target tokens that are not padding."""
        embed, before_output = self.drop
        values, _ = self.bottom(embed(self.source(text.source)))
        if self.upper is not None:
            values, _ = self.upper(values)
        keys = self.keys(values)
        padding = torch.arange(values.shape[1], device=values.device) >= text.lengths[:, None]
        layers = len(self.recurrent)
        start = torch.tanh(self.start(values[:, -1])).view(len(values), 2, layers, -1)
        h, c = list(start[:, 0].unbind(1)), list(start[:, 1].float().unbind(1))
        fed, outputs = torch.zeros_like(h[0]), []
        for gates in self.inputs(embed(self.target(text.target_input))).unbind(1):
            read = fed
            for layer, product in enumerate(self.recurrent):
                total = product(torch.cat((read, h[layer]), 1))
                i, f, g, o = (total + gates if layer == 0 else total).chunk(4, 1)
                c[layer] = torch.sigmoid(f) * c[layer] + torch.sigmoid(i) * torch.tanh(g)
                read = h[layer] = torch.sigmoid(o) * torch.tanh(c[layer])
            scores = self.score(torch.tanh(self.query(read).unsqueeze(1) + keys)).squeeze(2)
            weights = torch.softmax(scores.masked_fill(padding, float("-inf")), 1)
            context = torch.bmm(weights.unsqueeze(1).to(values.dtype), values).squeeze(1)
            fed = torch.tanh(self.combine(torch.cat((read.to(values.dtype), context), 1)))
            outputs.append(fed)
        logits = self.output(self.readout(before_output(torch.stack(outputs, 1))))
        return F.cross_entropy(
            logits.flatten(0, 1),
            text.target_output.flatten(),
            ignore_index=PAD,
            label_smoothing=label_smoothing,
        )


class CapturedStep:
    """A whole step, loss to Adam, captured for the shape of one batch and replayed."""

    def __init__(self, recipe: schema.Recipe, sizes: tuple[int, int], text: Text, dtype: torch.dtype) -> None:
        model = Plain(recipe.model, *sizes).to(text.source.device).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True, capturable=True)
        clipping = recipe.training.gradient_clipping

        def step() -> Tensor:
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16, cache_enabled=True):
                loss = model.loss(text, recipe.training.label_smoothing)
            torch.autograd.backward(loss)
            if clipping.type == "value":
                nn.utils.clip_grad_value_(model.parameters(), clipping.threshold)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), clipping.threshold)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # The graph knows addresses: what lies there must live as long as it does.
        self._kept = model, optimizer, text
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.loss = step()

    def __call__(self) -> None:
        """Enqueues a step; :attr:`loss` holds its loss afterwards."""
        self._graph.replay()
