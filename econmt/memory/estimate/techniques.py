"""Ways to run a training step that keep more or less of it, and what each is predicted to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from econmt.config.recipe import OPS
from econmt.memory.estimate.training_step import estimate_step
from econmt.memory.measure.ledger import Ledger
from econmt.model import Implementations
from econmt.parallel.simulated_rank import ALONE, Rank
from econmt.tasks.protocol import Shape, Task
from econmt_ops.dispatch.rule import can_run
from econmt_ops.dispatch.traits import implementations_of

Say = Callable[[str], object]
"""Is told what is being done."""


class Technique(NamedTuple):
    """Way of running a step."""

    name: str
    implementations: Implementations
    precision: torch.dtype


def techniques(stash: str, device: str, warming: bool) -> list[Technique]:
    """The rows of a comparison: the reference, what saves most op by op and in all of them, then every other way.

    Args:
        stash: what recomputing LSTMs keep, as a recipe says it.
        device: the type of device whose implementations count.
        warming: also those that must warm up.
    """
    reference = Implementations.definitions()
    lean = Implementations.leanest(device)
    fastest = lean.traits("decoder")
    if stash == "auto" and fastest is not None and fastest.has_kernels:
        stash = fastest.model_stash  # as a run that leaves it at auto
    lean = lean._replace(stash=stash)
    # By itself the decoder's loop keeps its gates, as autograd would: what it saves is the attention's.
    decoder = reference._replace(decoder=lean.decoder, attention=lean.attention, stash="gates")
    rows = [
        Technique("reference", reference, torch.float32),
        Technique("+ decoder", decoder, torch.float32),
        Technique("+ encoder", reference._replace(encoder=lean.encoder, stash=stash), torch.float32),
        Technique("+ output", reference._replace(output=lean.output), torch.float32),
        Technique("all", lean, torch.float32),
        Technique("all, bfloat16", lean, torch.bfloat16),
    ]
    others: dict[str, dict[str, str]] = {}
    for key, functions in OPS.items():
        for name, found in implementations_of(functions[0]).items():
            traits = found.traits
            runs = can_run(traits, device, torch.float32) and (warming or not traits.warms_up)
            if runs and traits.recomputes and name != getattr(lean, key):
                others.setdefault(name, {})[key] = name
    for name, keys in others.items():
        chosen = lean._replace(**keys)
        rows += [Technique(f"all, {name}", chosen, torch.float32)]
        rows += [Technique(f"all, {name}, bfloat16", chosen, torch.bfloat16)]
    return rows


def estimate(task: Task, technique: Technique, shape: Shape, device: str, rank: Rank = ALONE) -> Ledger:
    """The ledger of a step without running it; ``device`` is "cpu" or "cuda", ``rank`` whose step it is."""
    return estimate_step(
        task,
        shape,
        device,
        precision=technique.precision,
        implementations=_traceable(technique).implementations,
        rank=rank,
    )


def estimates(
    task: Task, rows: Sequence[Technique], shape: Shape, device: str, say: Say, rank: Rank = ALONE
) -> list[Ledger]:
    """The ledgers of several techniques; those that keep the same are estimated once."""
    found: dict[Technique, Ledger] = {}
    for number, technique in enumerate(rows, 1):
        key = _traceable(technique)
        if key not in found:
            say(f"predicting {number} of {len(rows)}: {technique.name}, {shape}")
            found[key] = estimate(task, technique, shape, device, rank)
    return [found[_traceable(technique)] for technique in rows]


def _traceable(technique: Technique) -> Technique:
    """The technique, without a name, that allocates the same bytes."""
    return Technique("", technique.implementations.traceable(), technique.precision)


def fixed_bytes(ledger: Ledger) -> int:
    """Bytes that every batch needs, however small: weights, as many of gradients, and the optimizer's state."""
    return 2 * ledger.category("weights") + ledger.category("optimizer state")
