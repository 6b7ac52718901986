"""Changes that would make room in a training step's memory, with the bytes that they are predicted to save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

from econmt_memory.measure.ledger import Ledger

_LEAST_SHARE = 0.01
"""Smallest saving that is worth advice, as a share of the live bytes."""


class Advice(NamedTuple):
    """A change, and the bytes that it is predicted to save."""

    text: str
    bytes: int


def advise(ledger: Ledger, kinds: Mapping[str, str], inputs: Mapping[str, int]) -> list[Advice]:
    """Returns the changes that would save the most first, from classes of modules and bytes of their inputs by name."""
    maps = ledger.category("feature maps")
    state = ledger.category("optimizer state")
    fixed = ledger.category("weights") + ledger.category("gradients") + state
    advice = [
        Advice("halve the batch", (ledger.peak - fixed) // 2),
        # float32 state of 8 bytes a parameter becomes 2 bytes, and a scale for each block of 256
        Advice("use an optimizer with 8-bit state", state * 3 // 4 - state // 256),
        *_checkpoints(ledger, kinds, inputs),
    ]
    wide = sum(
        each.bytes for each in ledger.largest if each.category == "feature maps" and each.dtype == "float32"
    )
    if wide > maps // 2:
        advice.append(Advice("compute in bfloat16 (torch.autocast)", maps // 2))
    least = _LEAST_SHARE * ledger.peak
    return sorted((each for each in advice if each.bytes >= max(1.0, least)), key=lambda each: -each.bytes)


def _checkpoints(ledger: Ledger, kinds: Mapping[str, str], inputs: Mapping[str, int]) -> list[Advice]:
    """Returns what checkpointing saves, for modules of one class with one parent.

    A checkpointed module keeps its input alone. While its gradient is computed, its feature maps exist again, so that
    the largest one saves nothing.
    """
    kept: Counter[str] = Counter()
    for (category, name), size in ledger.entries.items():
        if category == "feature maps":
            for module in accumulate(name.split("."), "{}.{}".format):  # and those around it
                kept[module] += size
    families: dict[tuple[str, str], list[str]] = {}
    for name, kind in kinds.items():
        if kept[name] > inputs.get(name, kept[name]):
            families.setdefault((name.rpartition(".")[0], kind), []).append(name)
    advice = []
    for (parent, kind), names in families.items():
        saved = [kept[name] - inputs[name] for name in names]
        if len(names) > 1:
            text = f"checkpoint each of the {len(names)} modules {kind} in {parent or 'the model'}"
            advice.append(Advice(text, sum(saved) - max(saved)))
    return advice
