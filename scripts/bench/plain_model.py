"""Translation model in plain PyTorch with autograd alone, against which econmt is compared.

cuDNN's or torch's own LSTMs for the encoder; in the decoder all four gates in one product, the input's part of them and
the attention's keys for all positions before the loop; output layer and loss once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

PAD = 0


class Sizes(NamedTuple):
    """Sizes of a model.

    Attributes:
        source, target: Entries of the vocabularies.
        embedding, encoder, decoder, attention: Units.
        encoder_layers, decoder_layers: Layers; the encoder's lowest reads in both directions.
        tied: True if both embeddings and the output layer share one table.
        dropout: Dropout of the embeddings and before the output layer.
    """

    source: int
    target: int
    embedding: int = 512
    encoder: int = 512
    decoder: int = 512
    attention: int = 512
    encoder_layers: int = 1
    decoder_layers: int = 1
    tied: bool = False
    dropout: tuple[float, float] = (0.0, 0.0)


class Memory(NamedTuple):
    """Source states as attention reads them: keys (B, S, A), values (B, S, E), padding (B, S) bool."""

    keys: Tensor
    values: Tensor
    padding: Tensor


State = tuple[Tensor, ...]
"""Hidden states of the layers, their cell states, and the attentional output, each (B, H)."""


class PlainModel(nn.Module):
    """Encoder of LSTM layers, decoder with additive attention and input feeding.

    Args:
        sizes: Sizes of the model.
        packed: True to read the source as a packed sequence, which skips padding but is never captured in a graph.
    """

    def __init__(self, sizes: Sizes, *, packed: bool) -> None:
        super().__init__()
        size, hidden, layers = sizes.encoder, sizes.decoder, sizes.decoder_layers
        self._packed, self._layers = packed, layers
        self.source = nn.Embedding(sizes.source, sizes.embedding, padding_idx=PAD)
        self.target = nn.Embedding(sizes.target, sizes.embedding, padding_idx=PAD)
        self.bottom = nn.LSTM(sizes.embedding, size // 2, batch_first=True, bidirectional=True)
        upper = sizes.encoder_layers - 1
        self.upper = nn.LSTM(size, size, upper, batch_first=True) if upper else None
        self.start = nn.Linear(size, 2 * hidden * layers)
        self.inputs = nn.Linear(sizes.embedding, 4 * hidden)
        self.recurrent = nn.ModuleList(
            nn.Linear(2 * hidden, 4 * hidden, bias=layer > 0) for layer in range(layers)
        )
        self.keys = nn.Linear(size, sizes.attention, bias=False)
        self.query = nn.Linear(hidden, sizes.attention, bias=False)
        self.score = nn.Linear(sizes.attention, 1, bias=False)
        self.combine = nn.Linear(hidden + size, hidden)
        self.drop = nn.Dropout(sizes.dropout[0]), nn.Dropout(sizes.dropout[1])
        self.output = nn.Linear(sizes.embedding if sizes.tied else hidden, sizes.target)
        self.readout = nn.Linear(hidden, sizes.embedding) if sizes.tied else nn.Identity()
        if sizes.tied:
            self.output.weight = self.target.weight = self.source.weight
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.08, 0.08)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Memory, State]:
        """Reads source ids (B, S) with lengths (B,); returns what attention reads and the first state."""
        embedded = self.drop[0](self.source(source))
        if self._packed:
            packed = pack_padded_sequence(embedded, lengths, batch_first=True, enforce_sorted=False)
            states, (last, _) = self.bottom(packed)
            values, _ = pad_packed_sequence(states, batch_first=True)
            final, padding = torch.cat((last[0], last[1]), 1), source == PAD
        else:
            values, _ = self.bottom(embedded)
            padding = torch.arange(values.shape[1], device=values.device) >= lengths[:, None]
        if self.upper is not None:
            values, _ = self.upper(values)
        if not self._packed:
            final = values[:, -1]
        start = torch.tanh(self.start(final)).view(len(values), 2, self._layers, -1)
        hidden, cells = start[:, 0].unbind(1), start[:, 1].float().unbind(1)
        return Memory(self.keys(values), values, padding), (*hidden, *cells, torch.zeros_like(hidden[0]))

    def step(self, gates: Tensor, memory: Memory, state: State) -> State:
        """Computes the next state from the input's part of the gates (B, 4H)."""
        hidden, cells, fed = [*state[: self._layers]], [*state[self._layers : -1]], state[-1]
        read = fed
        for layer, product in enumerate(self.recurrent):
            total = product(torch.cat((read, hidden[layer]), 1))
            i, f, g, o = (total + gates if layer == 0 else total).chunk(4, 1)
            cells[layer] = torch.sigmoid(f) * cells[layer] + torch.sigmoid(i) * torch.tanh(g)
            read = hidden[layer] = torch.sigmoid(o) * torch.tanh(cells[layer])
        scores = self.score(torch.tanh(self.query(read).unsqueeze(1) + memory.keys)).squeeze(2)
        weights = torch.softmax(scores.masked_fill(memory.padding, float("-inf")), 1)
        context = torch.bmm(weights.unsqueeze(1).to(memory.values.dtype), memory.values).squeeze(1)
        fed = torch.tanh(self.combine(torch.cat((read.to(memory.values.dtype), context), 1)))
        return (*hidden, *cells, fed)

    def logits(self, outputs: Tensor) -> Tensor:
        """Returns the scores of the target vocabulary for attentional outputs (..., H)."""
        scores: Tensor = self.output(self.readout(self.drop[1](outputs)))
        return scores

    def loss(self, source: Tensor, lengths: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Returns the mean cross-entropy of target ids (B, T + 1) that begin with ``<s>``, padding left out."""
        memory, state = self.encode(source, lengths)
        outputs = []
        for gates in self.inputs(self.drop[0](self.target(target[:, :-1]))).unbind(1):
            state = self.step(gates, memory, state)
            outputs.append(state[-1])
        wanted, stacked = target[:, 1:], torch.stack(outputs, 1)
        if self._packed:
            stacked, wanted = stacked[wanted != PAD], wanted[wanted != PAD]
        return F.cross_entropy(
            self.logits(stacked).flatten(0, -2),
            wanted.flatten(),
            ignore_index=PAD,
            label_smoothing=label_smoothing,
        )
