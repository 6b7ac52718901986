"""Transformer in plain PyTorch, against which econmt is compared.

Layer normalisation before each part, sinusoidal positions, one table for both embeddings and the output layer, torch's
``scaled_dot_product_attention``, and a search whose layers keep their keys and values.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from econmt.data.text.vocabulary import BOS, EOS, PAD, UNK

HEAD = 64
"""Units of a head."""
LONGEST = 512
"""Positions that have encodings."""
ALIGNMENT = 16
"""Elements to whose multiples rows of a mask are aligned, as its kernels need."""
POLL = 8
"""Steps of a search after which it looks whether all translations have ended."""


class Sizes(NamedTuple):
    """Layers of each side, units of a position, and units inside a layer's two products."""

    layers: int
    width: int
    inside: int


SIZES = {"three": Sizes(3, 256, 512), "econmt": Sizes(4, 384, 1024), "base": Sizes(6, 512, 2048)}

Cache = tuple[Tensor, Tensor]
"""Keys and values of all heads, each (B, N, S, 64)."""


class Attention(nn.Module):
    """Attention whose keys and values come from one product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._heads = width // HEAD
        self.query = nn.Linear(width, width)
        self.memory = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)

    def cache(self, memory: Tensor) -> Cache:
        """Returns keys and values of what is attended to, (B, S, D)."""
        both = self.memory(memory).unflatten(2, (2, self._heads, HEAD)).permute(2, 0, 3, 1, 4)
        return both[0], both[1]

    def forward(self, inputs: Tensor, cache: Cache, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """Attends from each of ``inputs`` (B, T, D); a mask is added to the scores."""
        query = self.query(inputs).unflatten(2, (self._heads, HEAD)).transpose(1, 2)
        read = F.scaled_dot_product_attention(query, *cache, attn_mask=mask, is_causal=causal)
        found: Tensor = self.output(read.transpose(1, 2).flatten(2))
        return found


class Layer(nn.Module):
    """Layer of either side; a decoder's also attends to the source."""

    def __init__(self, sizes: Sizes, dropout: float, *, decoder: bool) -> None:
        super().__init__()
        width = sizes.width
        self.own = Attention(width)
        self.source = Attention(width) if decoder else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if decoder else 2))
        self.first, self.second = nn.Linear(width, sizes.inside), nn.Linear(sizes.inside, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, inputs: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """Computes the outputs (B, T, D) of a side, a decoder's from the encoder's outputs as ``memory`` (B, S, D)."""
        read = self.norms[0](inputs)
        if self.source is None:
            outputs = inputs + self.drop(self.own(read, self.own.cache(read), mask))
        else:
            assert memory is not None
            outputs = inputs + self.drop(self.own(read, self.own.cache(read), None, causal=True))
            found = self.source(self.norms[1](outputs), self.source.cache(memory), mask)
            outputs = outputs + self.drop(found)
        return outputs + self.drop(self._inside(outputs))

    def step(self, inputs: Tensor, cache: Cache, position: int, memory: Cache, mask: Tensor) -> Tensor:
        """Computes a decoder's outputs (B, 1, D) at a position, whose keys and values go into the cache."""
        assert self.source is not None
        read = self.norms[0](inputs)
        for kept, new in zip(cache, self.own.cache(read), strict=True):
            kept[:, :, position : position + 1] = new
        keys, values = (kept[:, :, : position + 1] for kept in cache)
        outputs = inputs + self.own(read, (keys, values), None)
        outputs = outputs + self.source(self.norms[1](outputs), memory, mask)
        return outputs + self._inside(outputs)

    def _inside(self, inputs: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(self.norms[-1](inputs))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Transformer with tied embeddings, for a joint vocabulary of ``size`` entries."""

    positions: Tensor

    def __init__(self, size: int, sizes: Sizes, dropout: float) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(size, sizes.width, padding_idx=PAD)
        self.encoder, self.decoder = (
            nn.ModuleList(Layer(sizes, dropout, decoder=decoder) for _ in range(sizes.layers))
            for decoder in (False, True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(sizes.width) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(size))
        self.drop = nn.Dropout(dropout)
        angles = torch.arange(LONGEST)[:, None] * torch.exp(
            torch.arange(0, sizes.width, 2) * (-math.log(10_000.0) / sizes.width)
        )
        self.register_buffer("positions", torch.stack((angles.sin(), angles.cos()), 2).flatten(1))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        nn.init.normal_(self.embedding.weight, std=sizes.width**-0.5)

    def embed(self, ids: Tensor, first: int = 0) -> Tensor:
        """Returns the embeddings (B, T, D) of ids (B, T) that begin at a position."""
        embedded = self.embedding(ids) * self.sizes.width**0.5
        dropped: Tensor = self.drop(embedded + self.positions[first : first + ids.shape[1]])
        return dropped

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Reads the source (B, S); returns the encoder's outputs (B, S, D) and its mask (B, 1, 1, S)."""
        rows, length = source.shape
        outputs = self.embed(source)
        padding = source == PAD
        padding[:, 0] = False  # a row of padding alone attends to itself
        aligned = outputs.new_zeros(rows, 1, 1, -(-length // ALIGNMENT) * ALIGNMENT)
        mask = aligned[..., :length].masked_fill_(padding[:, None, None], float("-inf"))
        for layer in self.encoder:
            outputs = layer(outputs, mask)
        return self.norms[0](outputs), mask

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns the decoder's outputs (B, T, D) after each of ``target`` (B, T)."""
        memory, mask = self.encode(source)
        outputs = self.embed(target)
        for layer in self.decoder:
            outputs = layer(outputs, mask, memory)
        found: Tensor = self.norms[1](outputs)
        return found

    def scores(self, outputs: Tensor) -> Tensor:
        """Returns the scores of the vocabulary for the decoder's outputs, in float32."""
        return F.linear(outputs, self.embedding.weight, self.bias).float()

    def losses(self, outputs: Tensor, wanted: Tensor, label_smoothing: float, reduction: str) -> Tensor:
        """Returns the cross-entropy of the wanted words (B, T), padding left out."""
        scores, words = self.scores(outputs).flatten(0, 1), wanted.flatten()
        smoothing = label_smoothing
        return F.cross_entropy(
            scores, words, ignore_index=PAD, label_smoothing=smoothing, reduction=reduction
        )


@torch.inference_mode()
def search(model: Transformer, source: Tensor, beam: int) -> list[list[int]]:
    """Translates sources (B, S); of ``beam`` hypotheses each, that with the best mean score a word is returned.

    Such a translation has at most twice as many words as the source, and ten. With a beam of 1 the search is greedy.
    """
    rows, length = source.shape
    limit = min(2 * length + 10, LONGEST)
    encoded, mask = model.encode(source)
    spread = torch.arange(rows, device=source.device).repeat_interleave(beam)
    layers: Any = model.decoder
    memories = [tuple(part[spread] for part in layer.source.cache(encoded)) for layer in layers]
    mask = mask.expand(-1, 1, 1, -1)[spread]
    shape = rows * beam, model.sizes.width // HEAD, limit, HEAD
    caches = [[encoded.new_zeros(shape), encoded.new_zeros(shape)] for _ in layers]
    words = source.new_full((rows * beam, limit + 1), PAD)
    words[:, 0] = BOS
    scores = encoded.new_full((rows, beam), float("-inf"), dtype=torch.float32)
    scores[:, 0] = 0.0
    best, finished = scores.new_full((rows,), float("-inf")), words.new_zeros(rows)
    found, found_length = words[::beam].clone(), words.new_zeros(rows)
    first_rows = torch.arange(rows, device=source.device)[:, None] * beam
    for position in range(limit):
        outputs = model.embed(words[:, position : position + 1], position)
        for layer, cache, memory in zip(layers, caches, memories, strict=True):
            outputs = layer.step(outputs, cache, position, memory, mask)
        logs = torch.log_softmax(model.scores(model.norms[1](outputs))[:, 0], 1)
        logs[:, [PAD, UNK, BOS]] = float("-inf")
        totals, places = (scores[:, :, None] + logs.view(rows, beam, -1)).flatten(1).topk(2 * beam)
        parents, chosen = first_rows + places // logs.shape[1], places % logs.shape[1]
        ends = chosen == EOS
        value, which = totals[:, :beam].masked_fill(~ends[:, :beam], float("-inf")).max(1)
        value = value / (position + 1)
        better = (value > best) & (finished < beam)
        best = torch.where(better, value, best)
        found = torch.where(better[:, None], words[parents.gather(1, which[:, None])[:, 0]], found)
        found_length = torch.where(better, position, found_length)
        finished = finished + ends[:, :beam].sum(1)
        if position % POLL == POLL - 1 and bool((finished >= beam).all()):
            break
        scores, kept = totals.masked_fill(ends, float("-inf")).topk(beam)
        origin = parents.gather(1, kept).flatten()
        words = words[origin]
        words[:, position + 1] = chosen.gather(1, kept).flatten()
        caches = [[part[origin] for part in cache] for cache in caches]
    rest = words[::beam]
    unended = best == float("-inf")
    found = torch.where(unended[:, None], rest, found)
    found_length = torch.where(unended, limit, found_length)
    return [row[1 : 1 + count] for row, count in zip(found.tolist(), found_length.tolist(), strict=True)]


def save_for_ctranslate2(model: Transformer, tokens: Sequence[str], folder: Path) -> None:
    """Writes the folder that CTranslate2 loads."""
    specs: Any = importlib.import_module("ctranslate2.specs")
    spec = specs.TransformerSpec.from_config(
        (model.sizes.layers,) * 2, model.sizes.width // HEAD, pre_norm=True
    )
    encoder, decoder = spec.encoder, spec.decoder
    for side in (encoder, decoder):
        side.position_encodings.encodings = _array(model.positions)
    table = _array(model.embedding.weight)
    encoder.embeddings[0].weight = decoder.embeddings.weight = decoder.projection.weight = table
    decoder.projection.bias = _array(model.bias)
    for side, norm, layers in zip(
        (encoder, decoder), model.norms, (model.encoder, model.decoder), strict=True
    ):
        _set_norm(side.layer_norm, norm)
        for target, layer in zip(side.layer, layers, strict=True):
            _set_layer(target, layer)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.add_source_eos = True
    spec.validate()
    spec.optimize()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def _set_layer(spec: Any, layer: Any) -> None:
    own = layer.own
    spec.self_attention.linear[0].weight = _array(torch.cat((own.query.weight, own.memory.weight)))
    spec.self_attention.linear[0].bias = _array(torch.cat((own.query.bias, own.memory.bias)))
    _set_linear(spec.self_attention.linear[1], own.output)
    _set_norm(spec.self_attention.layer_norm, layer.norms[0])
    if layer.source is not None:
        attention = layer.source
        for number, part in enumerate((attention.query, attention.memory, attention.output)):
            _set_linear(spec.attention.linear[number], part)
        _set_norm(spec.attention.layer_norm, layer.norms[1])
    _set_linear(spec.ffn.linear_0, layer.first)
    _set_linear(spec.ffn.linear_1, layer.second)
    _set_norm(spec.ffn.layer_norm, layer.norms[-1])


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().cpu().numpy()


def _set_linear(spec: Any, layer: Any) -> None:
    spec.weight, spec.bias = _array(layer.weight), _array(layer.bias)


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)
