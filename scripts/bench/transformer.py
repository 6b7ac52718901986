"""Writes a small transformer trained for CTranslate2.

    pip install ctranslate2
    python -m scripts.bench transformer runs/multi30k transformer --device cuda --seconds 110

It is the other side of the comparison of inference, in plain PyTorch, and learns from the prepared text of a model
folder and has its vocabulary, so that both translate the same subwords. The folder that is written is one of
CTranslate2; `scripts.bench inference --ctranslate2` times it. Three layers a side of 256 units, four heads, 512 units
inside, layer normalisation before each part, sinusoidal positions, one table for both embeddings and the output layer;
Adam, label smoothing 0.1, the inverse square root schedule.
"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from econmt.checkpoint.folder import ModelFolder
from econmt.config.recipe import Recipe, load_recipe
from econmt.data.batching.batches import Batch, training_batches
from econmt.data.batching.store import PreparedData, open_prepared, store_folder
from econmt.data.text.vocabulary import PAD
from econmt.errors import InputError
from scripts.bench.frame import Bench

LAYERS, WIDTH, HEADS, INSIDE, DROPOUT = 3, 256, 4, 512, 0.1
LONGEST = 512
"""Positions that have encodings."""
LEARNING_RATE, WARM_UP = 1e-3, 1000


class SmallTransformer(nn.Module):
    """Transformer of ``torch.nn.Transformer`` with tied embeddings, for a vocabulary of ``size`` entries."""

    positions: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, WIDTH, padding_idx=PAD)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.body = nn.Transformer(
            WIDTH, HEADS, LAYERS, LAYERS, INSIDE, DROPOUT, batch_first=True, norm_first=True
        )
        self.bias = nn.Parameter(torch.zeros(size))
        angles = torch.arange(LONGEST)[:, None] * torch.exp(
            torch.arange(0, WIDTH, 2) * (-math.log(10_000.0) / WIDTH)
        )
        self.register_buffer("positions", torch.stack((angles.sin(), angles.cos()), 2).flatten(1))

    def embed(self, ids: Tensor) -> Tensor:
        """Returns the embeddings (B, T, D) of ids (B, T), with positions."""
        embedded = self.embedding(ids) * WIDTH**0.5 + self.positions[: ids.shape[1]]
        return F.dropout(embedded, DROPOUT, self.training)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Returns the scores (B, T, V) of the next target word after each of ``target`` (B, T)."""
        padding = source == PAD
        later = nn.Transformer.generate_square_subsequent_mask(target.shape[1], source.device)
        outputs = self.body(
            self.embed(source),
            self.embed(target),
            tgt_mask=later,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return F.linear(outputs, self.embedding.weight, self.bias)

    def loss(self, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy of a batch with label smoothing."""
        scores = self(batch.source, batch.target_input).flatten(0, 1)
        return F.cross_entropy(scores, batch.target_output.flatten(), ignore_index=PAD, label_smoothing=0.1)


def learning_rate(update: int) -> float:
    """Returns the learning rate of an update, counted from 1."""
    return LEARNING_RATE * min(update / WARM_UP, math.sqrt(WARM_UP / update))


def train(recipe: Recipe, prepared: PreparedData, device: torch.device, seconds: float) -> SmallTransformer:
    """Trains for some seconds, in bfloat16 on a GPU, else in float32."""
    torch.manual_seed(1)
    model = SmallTransformer(prepared.vocabularies.target.size).to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), fused=True)
    end = time.monotonic() + seconds
    for update, batch in enumerate(training_batches(recipe, prepared), 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(update)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model.loss(batch.trimmed().to(device))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        over = time.monotonic() > end
        if update % 500 == 1 or over:
            print(f"update {update}, loss {loss.item():.3f}", file=sys.stderr)
        if over:
            break
    return model.eval()


def save(model: SmallTransformer, tokens: list[str], folder: Path) -> None:
    """Writes the folder that CTranslate2 loads."""
    specs: Any = importlib.import_module("ctranslate2.specs")
    spec = specs.TransformerSpec.from_config((LAYERS, LAYERS), HEADS, pre_norm=True)
    encoder, decoder = spec.encoder, spec.decoder
    for side in (encoder, decoder):
        side.position_encodings.encodings = _array(model.positions)
    table = _array(model.embedding.weight)
    encoder.embeddings[0].weight = decoder.embeddings.weight = decoder.projection.weight = table
    decoder.projection.bias = _array(model.bias)
    body = model.body
    _set_norm(encoder.layer_norm, body.encoder.norm)
    _set_norm(decoder.layer_norm, body.decoder.norm)
    for target, layer in zip(encoder.layer, body.encoder.layers, strict=True):
        _set_self_attention(target.self_attention, layer.self_attn, layer.norm1)
        _set_inside(target.ffn, layer, layer.norm2)
    for target, layer in zip(decoder.layer, body.decoder.layers, strict=True):
        _set_self_attention(target.self_attention, layer.self_attn, layer.norm1)
        attention = layer.multihead_attn
        for number, part in enumerate((slice(0, WIDTH), slice(WIDTH, None))):
            target.attention.linear[number].weight = _array(attention.in_proj_weight[part])
            target.attention.linear[number].bias = _array(attention.in_proj_bias[part])
        _set_linear(target.attention.linear[2], attention.out_proj)
        _set_norm(target.attention.layer_norm, layer.norm2)
        _set_inside(target.ffn, layer, layer.norm3)
    spec.register_source_vocabulary(tokens)
    spec.register_target_vocabulary(tokens)
    spec.config.add_source_eos = True
    spec.validate()
    spec.optimize()
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def _array(tensor: Tensor) -> Any:
    return tensor.detach().float().cpu().numpy()


def _set_linear(spec: Any, layer: nn.Linear) -> None:
    spec.weight, spec.bias = _array(layer.weight), _array(layer.bias)


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma, spec.beta = _array(norm.weight), _array(norm.bias)


def _set_self_attention(spec: Any, attention: nn.MultiheadAttention, norm: nn.LayerNorm) -> None:
    assert attention.in_proj_weight is not None
    spec.linear[0].weight, spec.linear[0].bias = map(
        _array, (attention.in_proj_weight, attention.in_proj_bias)
    )
    _set_linear(spec.linear[1], attention.out_proj)
    _set_norm(spec.layer_norm, norm)


def _set_inside(spec: Any, layer: Any, norm: nn.LayerNorm) -> None:
    _set_linear(spec.linear_0, layer.linear1)
    _set_linear(spec.linear_1, layer.linear2)
    _set_norm(spec.layer_norm, norm)


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="cpu", seconds=110.0)
    bench.add_argument("model", type=Path, help="model folder whose prepared text and vocabulary are used")
    bench.add_argument("output", type=Path, help="folder to write, in CTranslate2's format")
    given = bench.begin(words)
    recipe = load_recipe(str(ModelFolder(given.model).recipe), [f"output={given.model}"])
    prepared = open_prepared(store_folder(recipe))
    source, target = prepared.vocabularies.sides
    if source is not target:
        raise InputError(f"{given.model}: has two vocabularies; train a recipe with data.subwords.joint")
    trained = train(recipe, prepared, given.device, given.seconds)
    save(trained, target.tokens(range(target.size)), given.output)
