"""The state of a training run beside its parameters and the optimizer's: everything a later process needs to go on."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch

from econmt.errors import InputError

FORMAT = "econmt-training-state-1"
COLUMNS = (
    "update",
    "seconds",
    "target_tokens",
    "train_loss",
    "valid_perplexity",
    "bleu",
    "learning_rate",
    "target_tokens_per_second",
    "peak_memory_bytes",
    "epoch",
    "gradient_norm",
)
"""Columns of metrics.tsv. ``seconds`` is wall time including validation, over all runs; ``target_tokens_per_second``
is that of the updates since the last row, validation and saving not counted; ``gradient_norm`` is that of the last
update before clipping."""
TIMES = frozenset({"seconds", "target_tokens_per_second", "peak_memory_bytes"})
"""The columns in which two runs of one recipe differ."""


@dataclass
class Meter:
    """Sums over some updates: the loss in nats, the target tokens, and the seconds that they took."""

    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class TrainingState:
    """Where a run stands. All values are JSON, and floats come back from JSON with the same bits.

    ``update`` counts updates; ``data`` is the state of the batch iterator; ``last_checkpoint`` is the update of the
    last row of ``metrics``, 0 before the first; ``parameters_from`` is the checkpoint whose parameters training goes on
    with (the best one after the plateau schedule went back to it); ``num_not_improved`` counts checkpoints since the
    best one, of score ``best_score``; ``gradient_norm`` is that of the last update; ``text`` and ``vocabulary`` are
    fingerprints; ``plan`` is that of a byte budget, empty without one; ``choices`` names the implementations
    that the run began with, empty with a budget; ``precision`` is what it began with, by its name in a recipe.
    """

    update: int = 0
    seconds: float = 0.0
    target_tokens: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    best_update: int = 0
    best_score: float | None = None
    num_not_improved: int = 0
    last_checkpoint: int = 0
    parameters_from: int = 0
    signature: str = ""
    vocabulary: str = ""
    text: str = ""
    gradient_norm: float = 0.0
    since_checkpoint: Meter = field(default_factory=Meter)
    since_log: Meter = field(default_factory=Meter)
    plan: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    precision: str = "float32"
    metrics: list[dict[str, float]] = field(default_factory=list)

    def to_json(self) -> str:
        """The state as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> TrainingState:
        """The state in JSON text.

        Raises:
            InputError: naming ``where``, if the text is broken or another version's.
        """
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT:
                raise InputError(
                    f"{where}: not a training state of this version of econmt; start anew elsewhere"
                )
            values["since_checkpoint"] = Meter(**values["since_checkpoint"])
            values["since_log"] = Meter(**values["since_log"])
            # States of runs that began before there were budgets and choices have none, and auto was float32.
            missing = {entry.name for entry in fields(cls)} - {"plan", "choices", "precision"} - set(values)
            if missing:
                raise KeyError(min(missing))
            return cls(**values)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{where}: broken training state ({error}); start anew with --overwrite-output"
            ) from error

    def metrics_text(self) -> str:
        """The content of metrics.tsv: numbers in the shortest form that reads back as the same float."""
        lines = ["\t".join(COLUMNS)]
        lines += ["\t".join(_number(column, row[column]) for column in COLUMNS) for row in self.metrics]
        return "\n".join(lines) + "\n"


def _number(column: str, value: float) -> str:
    if column == "seconds":
        return f"{value:.3f}"
    if column == "target_tokens_per_second":
        return f"{value:.1f}"
    return repr(value)


def random_states() -> dict[str, Any]:
    """The states of every random generator that a library might draw from, as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [
            str(name),
            _encode(np.asarray(keys, dtype="<u4").tobytes()),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
        "cuda": [],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [_encode(state.numpy().tobytes()) for state in torch.cuda.get_rng_state_all()]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Puts back what :func:`random_states` gave."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, np.frombuffer(_decode(keys), dtype="<u4"), position, has_gauss, cached))
    torch.set_rng_state(_byte_tensor(states["torch"]))
    for index, state in enumerate(states["cuda"]):
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(_byte_tensor(state), index)


def seed_everything(seed: int) -> None:
    """Seeds python's, numpy's and torch's generators, on every device."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _byte_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)
