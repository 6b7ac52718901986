"""The state of a training run, apart from parameters and optimizer: everything that resuming needs."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, field, fields
from itertools import chain
from math import nan
from typing import Annotated, Any

import torch
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from econmt.checkpoint.state_schema import (
    Choices,
    Count,
    DataPlace,
    Finite,
    MetricsRow,
    PipelineState,
    PlanState,
    PrecisionName,
    RandomStates,
    ScheduleState,
    Score,
    Seconds,
    Update,
    as_bytes,
)
from econmt.config.json_reader import parse_json, shaped_like
from econmt.config.yaml_reader import complaints
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
"""Columns that metrics.tsv always has.

``seconds`` is wall time including validation, over all runs; ``target_tokens_per_second`` is that of the updates since
the last row, without validation and saving; ``gradient_norm`` is that of the last update before clipping.
"""
TIMES = frozenset({"seconds", "target_tokens_per_second", "peak_memory_bytes"})
"""Columns in which two runs of one recipe may differ."""


_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(config=_STRICT)
class Meter:
    """Sums over some updates: loss in nats, target tokens, and seconds."""

    loss: Finite = 0.0
    tokens: Count = 0
    seconds: Seconds = 0.0


@dataclass(config=_STRICT)
class TrainingState:
    """State of a run. All values are JSON, and floats are restored from JSON with the same bits.

    ``update`` counts updates; ``data`` is the state of the batch iterator; ``last_checkpoint`` is the update of the
    last row of ``metrics``, 0 before the first; ``parameters_from`` is the checkpoint whose parameters training
    continues with (the best one after the plateau schedule returned to it); ``num_not_improved`` counts checkpoints
    since the best one, of score ``best_score``; ``gradient_norm`` is that of the last update, ``monitored`` those of
    monitored parameters; ``text`` and ``vocabulary`` are fingerprints; ``plan`` is that of a memory budget, empty
    without one; ``choices`` names the implementations that the run began with, empty with a budget; ``pipeline`` is the
    division of layers over ranks, empty without a pipeline; ``precision`` is that at the beginning, by its name in a
    recipe; ``average_from`` is the update after which parameter averaging began, None before; ``environment`` is that
    of the last save, see :mod:`econmt.training.environment`.
    """

    update: Update = 0
    seconds: Seconds = 0.0
    target_tokens: Count = 0
    data: Annotated[dict[str, Any], shaped_like(DataPlace, may_be_empty=True)] = field(default_factory=dict)
    random: Annotated[dict[str, Any], shaped_like(RandomStates, may_be_empty=True)] = field(
        default_factory=dict
    )
    schedule: Annotated[dict[str, Any], shaped_like(ScheduleState, may_be_empty=True)] = field(
        default_factory=dict
    )
    best_update: Update = 0
    best_score: Score = None
    num_not_improved: Count = 0
    last_checkpoint: Update = 0
    parameters_from: Update = 0
    signature: str = ""
    vocabulary: str = ""
    text: str = ""
    gradient_norm: float = 0.0
    monitored: dict[str, Finite] = field(default_factory=dict)
    since_checkpoint: Meter = field(default_factory=Meter)
    since_log: Meter = field(default_factory=Meter)
    plan: Annotated[dict[str, Any], shaped_like(PlanState, may_be_empty=True)] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)
    pipeline: Annotated[dict[str, Any], shaped_like(PipelineState, may_be_empty=True)] = field(
        default_factory=dict
    )
    precision: PrecisionName = "float32"
    average_from: Update | None = None
    environment: dict[str, str] = field(default_factory=dict)
    metrics: list[Annotated[dict[str, Any], shaped_like(MetricsRow)]] = field(default_factory=list)

    def to_json(self) -> str:
        """Returns the state as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> TrainingState:
        """Parses a state from JSON text.

        Raises:
            InputError: The text is broken or from another version; the message names ``where``.
        """
        advice = "start anew with --overwrite-output"
        values = parse_json(text, where, advice)
        if values.pop("format", None) != FORMAT:
            raise InputError(
                f"{where}: not a training state of this version of econmt; start anew in another folder"
            )
        # States of older versions lack fields that were added later; their precision was float32.
        missing = (
            {entry.name for entry in fields(cls)}
            - {"plan", "choices", "precision", "average_from", "environment", "monitored"}
            - set(values)
        )
        wrong = [f"{name}: missing" for name in sorted(missing)]
        try:
            for name in ("since_checkpoint", "since_log"):
                if isinstance(values.get(name), dict):
                    values[name] = Meter(**values[name])
            state = cls(**values)
            wrong += state._contradictions()
        except ValidationError as failure:
            wrong += complaints(failure)
        if wrong:
            raise InputError(f"{where}: broken training state ({wrong[0]}); {advice}")
        return state

    def _contradictions(self) -> list[str]:
        """Returns inconsistencies: every checkpoint that a state names must have a row of metrics."""
        rows = {0, *(row["update"] for row in self.metrics)}
        names = ("best_update", "last_checkpoint", "parameters_from")
        wrong = [
            f"{name} {getattr(self, name)}: no such checkpoint"
            for name in names
            if getattr(self, name) not in rows
        ]
        wrong += [f"{name}: empty" for name in ("data", "random", "schedule") if not getattr(self, name)]
        return wrong + [f"update {self.update}: less than that of a checkpoint"] * (max(rows) > self.update)

    def metrics_text(self) -> str:
        """Returns the content of metrics.tsv; numbers have the shortest form that restores the same float."""
        columns = [*dict.fromkeys((*COLUMNS, *chain.from_iterable(self.metrics)))]
        lines = ["\t".join(columns)]
        lines += ["\t".join(_number(name, row.get(name, nan)) for name in columns) for row in self.metrics]
        return "\n".join(lines) + "\n"


def _number(column: str, value: float) -> str:
    if column == "seconds":
        return f"{value:.3f}"
    if column == "target_tokens_per_second":
        return f"{value:.1f}"
    return repr(value)


def random_states() -> dict[str, Any]:
    """Returns the states of PyTorch's default generators as JSON values; nothing draws from other global generators."""
    states: dict[str, Any] = {"torch": _encode(torch.get_rng_state()), "cuda": []}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = [_encode(state) for state in torch.cuda.get_rng_state_all()]
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Restores the states from :func:`random_states`."""
    torch.set_rng_state(as_bytes(states["torch"]))
    for index, state in enumerate(states["cuda"]):
        if index < torch.cuda.device_count():
            torch.cuda.set_rng_state(as_bytes(state), index)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")
