"""Writes a transformer trained by minutes in plain PyTorch.

    python -m scripts.bench transformer laws-en-fr runs/transformer data.prepared=store --size econmt --marks 60 120
    python -m scripts.bench transformer runs/multi30k/recipe.yaml transformer --size three --marks 110 --device cuda

It is the other side of quality by minute and of inference. Pieces, buckets, batches, their size, the label smoothing,
the bound on gradients, the highest learning rate and an average that starts at once are the recipe's; AdamW, linear
warm-up, then the inverse square root of updates; parameters in bfloat16 on a GPU with float32 masters; a CUDA graph for
each shape of batches. The clock starts with the first update, before anything is compiled or captured. At each mark, in
seconds, the parameters are copied; after training each copy translates the validation text with the recipe's beam, the
last also the test text.

The folder gets the last parameters, model.safetensors, and, where the package ctranslate2 is installed, the folder
ctranslate2, which `scripts.bench inference --ctranslate2` times. A folder that has parameters is not trained again.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from econmt.config.recipe import Recipe, load_recipe
from econmt.data.batching.batches import BatchIterator, training_batches, valid_batches
from econmt.data.batching.store import PreparedData, open_prepared, store_folder
from econmt.data.batching.token_store import TokenStore
from econmt.engine.devices import peak_memory
from econmt.engine.parameters import average_weight
from econmt.errors import InputError
from econmt.evaluation.metrics import bleu, corpus_score, make_metric
from econmt_ops.dispatch.capture import GraphCache
from scripts.bench.frame import Bench
from scripts.bench.transformer_model import SIZES, Transformer, save_for_ctranslate2, search

BATCHES_AHEAD = 8
UPDATES_AHEAD = 4
"""Updates that the host may be ahead of the GPU."""
SENTENCES = 250
"""Sentences translated at a time."""


class Loaded(NamedTuple):
    """Batch of a shape: source (R, S), target inputs (R, T) and outputs (R, T) side by side, with a fixed R."""

    shape: tuple[int, int]
    ids: Tensor
    target_tokens: int


class Moment(NamedTuple):
    """Parameters of a mark; the other names are those of metrics.tsv."""

    seconds: float
    update: int
    peak_memory_bytes: int
    target_tokens_per_second: float
    parameters: list[Tensor]


def loaded(batches: BatchIterator) -> Iterator[Loaded]:
    """Yields the batches for ever; a thread prepares some of them ahead.

    Batches with fewer pairs than others of their shape are filled with padding. The thread leaves CUDA alone, since a
    graph may be captured meanwhile.
    """
    rows = {(shape.source, shape.target): shape.rows for shape in batches.shapes()}
    ahead: queue.Queue[Loaded] = queue.Queue(BATCHES_AHEAD)

    def load() -> None:
        for batch in batches:
            full = batch.filled(rows[batch.positions])
            ids = torch.cat((full.source, full.target_input, full.target_output), 1)
            ahead.put(Loaded(batch.positions, ids, batch.target_tokens))

    threading.Thread(target=load, daemon=True).start()
    while True:
        yield ahead.get()


class Trainer:
    """Model, its master copy in float32, optimizer, and a CUDA graph of the whole update for each shape of batches."""

    def __init__(self, model: Transformer, recipe: Recipe, warm_up: int, device: torch.device) -> None:
        self.model, self._training = model, recipe.training
        self._warm_up, self._device = warm_up, device
        self._parameters = list(model.parameters())
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._rate, self._share = (torch.zeros((), device=device) for _ in range(2))
        self._averages, on_gpu = recipe.training.averaging.start == "at-once", device.type == "cuda"
        self.saved = [master.clone() for master in self._masters] if self._averages else self._masters
        # A tensor as learning rate can be changed between replays.
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=self._rate, betas=(0.9, 0.98), fused=True, capturable=on_gpu
        )
        self._graphs = GraphCache(device) if on_gpu else None
        self._inputs: dict[tuple[int, int], Tensor] = {}
        self._events: list[torch.cuda.Event] = []
        self.loss = torch.zeros((), device=device)

    def update(self, number: int, batch: Loaded) -> None:
        """Updates the parameters; the first update of a shape runs eagerly, the second is captured."""
        highest = self._training.optimizer.learning_rate
        self._rate.fill_(highest * min(number / self._warm_up, math.sqrt(self._warm_up / number)))
        self._share.fill_(average_weight(number, self._training.averaging.decay))
        if batch.shape not in self._inputs:
            self._inputs[batch.shape] = torch.zeros_like(batch.ids, device=self._device)
        if self._graphs is None:
            self._inputs[batch.shape].copy_(batch.ids)
            self._run(batch.shape)
            return
        self._inputs[batch.shape].copy_(batch.ids.pin_memory(), non_blocking=True)
        self._graphs.call(batch.shape, lambda: self._run(batch.shape), self._refused)
        self._events.append(torch.cuda.Event())
        self._events[-1].record()
        if len(self._events) > UPDATES_AHEAD:
            self._events.pop(0).synchronize()

    def _refused(self, reason: str) -> None:
        print(f"a shape runs without a CUDA graph: {reason}", flush=True)

    def _run(self, shape: tuple[int, int]) -> None:
        source, target, wanted = self._inputs[shape].split((shape[0], shape[1], shape[1]), 1)
        for parameter in self._parameters:
            parameter.grad = None
        outputs = self.model(source, target)
        loss = self.model.losses(outputs, wanted, self._training.label_smoothing, "mean")
        torch.autograd.backward(loss)
        gradients = [parameter.grad for parameter in self._parameters]
        with torch.no_grad():
            torch._foreach_copy_([master.grad for master in self._masters], gradients)
            nn.utils.clip_grad_norm_(self._masters, self._training.gradient_clipping.threshold)
            self._optimizer.step()
            torch._foreach_copy_(self._parameters, self._masters)
            if self._averages:
                for saved, master in zip(self.saved, self._masters, strict=True):
                    saved.lerp_(master, self._share)
            self.loss.copy_(loss)


def train(
    model: Transformer, recipe: Recipe, prepared: PreparedData, given: argparse.Namespace
) -> list[Moment]:
    """Trains until the last mark; returns the parameters of each."""
    device, moments, tokens, last = given.device, list[Moment](), 0, 0.0
    batches = loaded(training_batches(recipe, prepared))
    trainer = Trainer(model, recipe, given.warm_up, device)
    print("first update begins: 0 s", flush=True)
    began = time.monotonic()
    for number in count(1):
        batch = next(batches)
        trainer.update(number, batch)
        tokens += batch.target_tokens
        if time.monotonic() - began >= given.marks[len(moments)]:
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds, allocated = time.monotonic() - began, peak_memory(device)
            copies = [saved.to("cpu", copy=True) for saved in trainer.saved]
            moments.append(Moment(seconds, number, allocated, tokens / (seconds - last), copies))
            print(f"checkpoint {number}: {seconds:.2f} s, loss {trainer.loss.item():.3f}", flush=True)
            tokens, last = 0, seconds
            if len(moments) == len(given.marks):
                return moments
    raise AssertionError("training ends at its last mark")


@torch.inference_mode()
def translate(
    model: Transformer, store: TokenStore, prepared: PreparedData, beam: int
) -> tuple[list[str], float]:
    """Translates a text; returns the translations and the perplexity of the references."""
    device = model.bias.device
    texts, total, tokens = [""] * len(store), 0.0, 0
    for batch in valid_batches(store, SENTENCES):
        source, target, wanted = (
            ids.to(device) for ids in (batch.source, batch.target_input, batch.target_output)
        )
        total += model.losses(model(source, target), wanted, 0.0, "sum").item()
        tokens += batch.target_tokens
        decoded = prepared.vocabularies.target.decode_many(search(model, source, beam))
        for index, text in zip(batch.indices.tolist(), decoded, strict=True):
            texts[index] = text
    return texts, math.exp(total / tokens)


def scores_of(texts: list[str], references: list[str]) -> dict[str, float]:
    """Returns BLEU and chrF."""
    chrf = corpus_score(make_metric("chrf", [references]), texts)
    return {"bleu": round(bleu(texts, references).value, 2), "chrf": round(chrf.value, 2)}


def report(
    model: Transformer, moments: Sequence[Moment], recipe: Recipe, prepared: PreparedData, folder: Path
) -> None:
    """Translates with the parameters of each mark, writes the translations and prints their scores."""

    def write(name: str, texts: list[str]) -> None:
        (folder / f"hypotheses.{name}").write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")

    said = "BLEU {bleu}, chrF {chrf}".format_map
    beam, valid = recipe.decoding.beam_size, prepared.valid_text.target
    table = ["\t".join((*Moment._fields[:-1], "bleu"))]
    for moment in moments:
        for parameter, copy in zip(model.parameters(), moment.parameters, strict=True):
            parameter.data.copy_(copy)
        texts, perplexity = translate(model, prepared.valid, prepared, beam)
        write(f"{moment.update:05d}", texts)
        scores = scores_of(texts, valid)
        table.append("\t".join(map(str, (*moment[:-1], scores["bleu"]))))
        print(f"mark: {moment.seconds:.2f} s, {said(scores)}, perplexity {perplexity:.2f}", flush=True)
    (folder / "metrics.tsv").write_text("".join(f"{line}\n" for line in table), encoding="utf-8")
    began = time.monotonic()
    texts, _ = translate(model, prepared.valid, prepared, 1)
    print(f"greedy: {said(scores_of(texts, valid))}, {time.monotonic() - began:.1f} s", flush=True)
    if prepared.test is not None:
        texts, _ = translate(model, prepared.test, prepared, beam)
        write("test", texts)
        print(f"test: {said(scores_of(texts, prepared.test_text.target))}", flush=True)


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto")
    add = bench.add_argument
    add("recipe", help="recipe, by its path or shipped name")
    add("folder", type=Path, help="folder to write")
    add("changes", nargs="*", metavar="KEY=VALUE", help="changes of the recipe")
    add("--size", choices=SIZES, default="econmt", help="layers and units (%(default)s)")
    add("--marks", nargs="+", type=float, default=[60.0], help="seconds of training (%(default)s)")
    add("--dropout", type=float, default=0.1, help="dropout of embeddings and residuals (%(default)s)")
    add("--warm-up", type=int, default=2000, help="updates until the highest learning rate (%(default)s)")
    given = bench.begin(words)
    recipe = load_recipe(given.recipe, given.changes)
    prepared = open_prepared(store_folder(recipe))
    source, target = prepared.vocabularies.sides
    if source is not target:
        raise InputError(f"{given.recipe}: has two vocabularies; give a recipe with data.subwords.joint")
    torch.manual_seed(recipe.training.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)  # plans a kernel for each of many shapes
    precision = torch.bfloat16 if given.device.type == "cuda" else torch.float32

    def make(dropout: float) -> Transformer:
        return Transformer(target.size, SIZES[given.size], dropout).to(given.device, precision)

    model, file = make(0.0).eval(), given.folder / "model.safetensors"
    if file.is_file():
        model.load_state_dict(load_file(file))
    else:
        trained = make(given.dropout).train()
        print(f"{sum(each.numel() for each in model.parameters()):,} parameters", flush=True)
        given.folder.mkdir(parents=True, exist_ok=True)
        report(model, train(trained, recipe, prepared, given), recipe, prepared, given.folder)
        save_file(model.state_dict(), file)
    if importlib.util.find_spec("ctranslate2") is not None:
        save_for_ctranslate2(model, target.tokens(range(target.size)), given.folder / "ctranslate2")
    else:
        print("without the package ctranslate2 there is no folder for it", file=sys.stderr)
