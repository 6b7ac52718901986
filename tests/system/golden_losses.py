"""Computes the loss of every update of a small training run, for each implementation of the ops.

The curves are compared by test_same_answer.py. Those of the reference are kept beside it, so that a change
of the reference itself is seen. After one that is meant, write them anew:

    python -m tests.system.golden_losses
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from econmt.config.recipe import Recipe, load_recipe
from econmt.data.batching.batches import Batch, pad_batch
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.tasks.translation import TranslationTask
from econmt_ops.core.chunks import STASHES

FILE = Path(__file__).resolve().with_suffix(".json")
UPDATES = 200
VOCABULARY = 23
REFERENCE = Implementations.everywhere("reference")
MODEL = [
    "model.embedding=6",
    "model.encoder.size=8",
    "model.encoder.layers=2",
    "model.decoder.size=8",
    "model.decoder.layers=2",
    "model.attention.size=7",
    "model.dropout=0.1",
    "training.label_smoothing=0.1",
    "training.optimizer.learning_rate=0.005",
    "training.gradient_clipping.type=none",
]
WHOLE_TARGET = "model.decoder.input_feeding=false model.encoder.layers=1 model.weight_tying=trg_softmax"
KINDS = {"input feeding": ["model.attention.layer_norm=true"], "whole target": WHOLE_TARGET.split()}
"""Keys in which the two models differ."""


def recipe(kind: str) -> Recipe:
    """Returns the recipe of a model of :data:`KINDS`."""
    return load_recipe("quickstart", [*MODEL, *KINDS[kind]])


def batches() -> Iterator[Batch]:
    """Yields batches of sequences and their reverses, of many shapes, the same in every run."""
    draw = torch.Generator().manual_seed(11)
    for _ in range(UPDATES):
        rows, longest = (int(torch.randint(low, high, (), generator=draw)) for low, high in ((1, 5), (1, 4)))
        lengths = torch.randint(1, longest + 1, (rows,), generator=draw).numpy()
        source = torch.randint(4, VOCABULARY, (rows, longest + 1), generator=draw).numpy()
        target = source.copy()
        for row, length in enumerate(lengths):
            target[row, :length] = source[row, :length][::-1]
        yield pad_batch(np.arange(rows), source, lengths, target, lengths, (longest + 1, longest + 1))


def curve(kind: str, implementations: Implementations, updates: int = UPDATES) -> list[float]:
    """Returns the loss a token of every update, in nats, float32 on the CPU."""
    config = recipe(kind)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        task = TranslationTask(config, VOCABULARY, VOCABULARY)
        step = TrainingStep(task, task.build_model().train(), implementations=implementations)
        losses = []
        for batch in islice(batches(), updates):
            total, *_ = step.gradient([batch], step.tokens([batch]))
            # Clipped by PyTorch: the curves that are kept have its rounding.
            step.optimizer.make_dense()
            torch.nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
            step.update()
            losses.append((total / batch.target_tokens).item())
    return losses


def variants(kind: str, name: str) -> list[Implementations]:
    """Returns each op alone with another implementation, and all ops with every stash level where they differ.

    Compiled ops run the steps of the recomputing ones and compile for long: one run with all of them is enough.
    """
    everything = [Implementations.everywhere(name, level) for level in STASHES]
    alone = [REFERENCE._replace(**{op: name}) for op in ("decoder", "encoder", "output")]
    if name == "compiled":
        return everything[:1] if kind == "input feeding" else []
    if kind == "input feeding":
        return [*alone, *everything]
    return [REFERENCE._replace(attention=name), everything[0]]


def main(arguments: Sequence[str]) -> int:
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    curves = {kind: curve(kind, REFERENCE) for kind in KINDS}
    FILE.write_text(json.dumps(curves, indent=0) + "\n", encoding="utf-8")
    for kind, losses in curves.items():
        print(f"{kind}: {losses[0]:.6f} -> {losses[-1]:.6f} in {UPDATES} updates")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
