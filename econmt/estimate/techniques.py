"""Techniques: ways to run a training step that keep more or fewer feature maps, and their predicted ledgers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from econmt.config.recipe import OPS
from econmt.data.progress_bars import Say
from econmt.engine.precision import NAMED, Precision
from econmt.estimate.training_step import estimate_step
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank
from econmt.tasks.protocol import Shape, Task
from econmt_memory.measure.ledger import Ledger
from econmt_ops.dispatch.rule import can_run
from econmt_ops.dispatch.traits import implementations_of


class Technique(NamedTuple):
    """Way of running a training step: implementations of the ops, and precision of products."""

    name: str
    implementations: Implementations
    precision: Precision

    @property
    def is_reference(self) -> bool:
        """True if every op runs its definition, so that techniques of the same precision are compared with it."""
        return self.implementations == Implementations.definitions()

    def compared_with(self, others: Iterable[Technique]) -> Technique | None:
        """Returns the reference of the same precision among ``others``; None if there is none."""
        alike = (each for each in others if each.is_reference and each.precision == self.precision)
        return next(alike, None)


def techniques(stash: str, device: str, warming: bool) -> list[Technique]:
    """Returns the techniques of a comparison for a recipe with the stash level ``stash``.

    They are the reference, the leanest implementation in one op at a time, the leanest ones in all ops, reference and
    leanest ones in bfloat16, and all other implementations that recompute; those that must warm up only if ``warming``.
    """
    single, half = NAMED["float32"], NAMED["bfloat16"]
    reference = Implementations.definitions()
    lean = Implementations.leanest(device)
    fastest, half_stash = lean.traits("decoder"), stash
    if stash == "auto" and fastest is not None and fastest.has_kernels:  # as in a run with stash: auto
        with single.products(torch.device(device)):
            stash, half_stash = map(fastest.stash_in_model, (single.dtype, half.dtype))
    lean, lean_half = lean._replace(stash=stash), lean._replace(stash=half_stash)
    # This row keeps the gates, as autograd does, so that it shows the savings of attention alone.
    decoder = reference._replace(decoder=lean.decoder, attention=lean.attention, stash="gates")
    rows = [
        Technique("reference", reference, single),
        Technique("+ decoder", decoder, single),
        Technique("+ encoder", reference._replace(encoder=lean.encoder, stash=stash), single),
        Technique("+ output", reference._replace(output=lean.output), single),
        Technique("all", lean, single),
        Technique("reference, bfloat16", reference, half),
        Technique("all, bfloat16", lean_half, half),
    ]
    others: dict[str, dict[str, str]] = {}
    for key, functions in OPS.items():
        for name, implementation in implementations_of(functions[0]).items():
            traits = implementation.traits
            runs = can_run(traits, device, single.dtype) and (warming or not traits.warms_up)
            if runs and traits.recomputes and name != getattr(lean, key):
                others.setdefault(name, {})[key] = name
    for name, keys in others.items():
        rows += [Technique(f"all, {name}", lean._replace(**keys), single)]
        rows += [Technique(f"all, {name}, bfloat16", lean_half._replace(**keys), half)]
    return rows


def estimate(task: Task, technique: Technique, shape: Shape, device: str, rank: Rank = ALONE) -> Ledger:
    """Predicts the ledger of a step on "cpu" or "cuda"."""
    return estimate_step(
        task,
        shape,
        device,
        precision=technique.precision,
        implementations=_traceable(technique).implementations,
        rank=rank,
    )


def estimator(
    task: Task, shape: Shape, device: str, say: Say, rank: Rank = ALONE
) -> Callable[[Technique], Ledger]:
    """Returns a function that predicts ledgers; techniques that allocate the same bytes are estimated once."""
    ledgers: dict[Technique, Ledger] = {}

    def predict(technique: Technique) -> Ledger:
        key = _traceable(technique)
        if key not in ledgers:
            say(f"predicting {technique.name}, {shape}")
            ledgers[key] = estimate(task, technique, shape, device, rank)
        return ledgers[key]

    return predict


def _traceable(technique: Technique) -> Technique:
    """Returns the unnamed technique that allocates the same bytes and runs on fake tensors."""
    return Technique("", technique.implementations.traceable(), technique.precision)


def fixed_bytes(ledger: Ledger) -> int:
    """Returns the bytes that every batch needs: weights, as many of gradients, and the optimizer's state."""
    return 2 * ledger.category("weights") + ledger.category("optimizer state")
