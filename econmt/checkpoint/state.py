"""State of a training run except parameters and optimizer tensors: schema, JSON form, metrics, random generators."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import asdict, field, fields
from itertools import chain
from math import nan
from typing import Annotated, Any, Literal, Union

import torch
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from econmt.config import limits
from econmt.config.json_reader import Record, parse_json, shaped_like
from econmt.config.recipe import OPS, implementation_names
from econmt.config.yaml_reader import complaints
from econmt.errors import InputError
from econmt_ops.core.chunks import STASHES

FORMAT = "econmt-training-state-1"
TIMES = frozenset({"seconds", "target_tokens_per_second", "peak_memory_bytes"})
"""Columns in which two runs of one recipe may differ."""

Count = Annotated[int, Field(ge=0, le=limits.TOKENS)]
Update = Annotated[int, Field(ge=0, le=limits.UPDATES)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]


class BatchPosition(Record):
    """Position of the batch iterator."""

    epoch: Update
    position: Count
    batches_per_epoch: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _inside(self) -> BatchPosition:
        if self.position >= self.batches_per_epoch:
            raise ValueError(f"position {self.position} is past {self.batches_per_epoch} batches an epoch")
        return self


class ScheduleState(Record):
    """State of the learning rate schedule."""

    name: str
    factor: Annotated[float, Field(gt=0.0, le=1.0)]
    num_not_improved: Count


class MetricsRow(Record):
    """Row of metrics.tsv; values that were not measured are NaN. Recipes may add columns.

    ``seconds`` is wall time including validation, over all runs; ``target_tokens_per_second`` is that of the updates
    since the last row, without validation and saving; ``gradient_norm`` is that of the last update before clipping.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]

    update: Annotated[int, Field(ge=1, le=limits.UPDATES)]
    seconds: Seconds
    target_tokens: Count
    train_loss: float
    valid_perplexity: float
    bleu: float
    learning_rate: float
    target_tokens_per_second: float
    peak_memory_bytes: Bytes
    epoch: Finite
    gradient_norm: float

    @model_validator(mode="after")
    def _names_of_columns(self) -> MetricsRow:
        for name in self.__pydantic_extra__:
            if not re.fullmatch(r"[\w.:]+", name, re.ASCII):
                raise ValueError(f"{name[:40]!r} is not a valid column name")
        return self


COLUMNS = tuple(MetricsRow.model_fields)
"""Columns that metrics.tsv always has."""


def _check_implementations(names: Any, keys: Any) -> None:
    stashes = ["auto", *STASHES]
    for key, name in zip(keys, names, strict=True):
        known = implementation_names(key) if key in OPS else stashes
        if name not in known:
            raise ValueError(f"{key} {name!r} is not one of {', '.join(known)}")


def _check_allotment(row: list[Any]) -> list[Any]:
    sizes, names = row[:6], row[6:]
    if len(row) != 11 or not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError("a batch budget must have six integers and five names")
    if not all(sizes[index] for index in (0, 1, 2, 4)):
        raise ValueError("a batch budget must have positions and rows")
    _check_implementations(names, (*OPS, "stash"))
    return row


class PlanState(Record):
    """Plan of a memory budget, see :meth:`econmt.budget.planner.MemoryPlan.state_dict`."""

    made_for: str
    budget: Annotated[int, Field(ge=1, le=2**62)]
    decoding_rows: Annotated[int, Field(ge=1, le=limits.TRANSLATED)]
    allotments: list[Annotated[list[Any], AfterValidator(_check_allotment)]]

    @model_validator(mode="after")
    def _trains(self) -> PlanState:
        if not any(row[3] for row in self.allotments):
            raise ValueError("the plan has no batches")
        return self


class PipelineState(Record):
    """Division of layers over ranks, see :class:`econmt.parallel.pipeline.partition.PipelinePlan`."""

    stages: Annotated[int, Field(ge=2, le=limits.LAYERS)]
    homes: list[list[Annotated[int, Field(ge=0, lt=limits.LAYERS)]]]
    chunks: list[Annotated[int, Field(ge=1, le=limits.POSITIONS)]]

    @model_validator(mode="after")
    def _homes_are_stages(self) -> PipelineState:
        if any(home >= self.stages for homes in self.homes for home in homes):
            raise ValueError("a layer is on a stage that does not exist")
        return self


class LossScaleState(Record):
    """Loss scale of float16 and its counter, see :class:`econmt_ops.optimizers.loss_scale.LossScale`."""

    scale: Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
    good: Count


class RandomStates(Record):
    """States of random generators, see :func:`econmt.checkpoint.state.random_states`; validated by a generator."""

    torch: str
    cuda: list[str]
    dropout: list[Annotated[int, Field(ge=-(2**63), lt=2**63)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _generators_take_them(self) -> RandomStates:
        try:
            torch.Generator().set_state(as_bytes(self.torch))
        except (ValueError, TypeError, RuntimeError):
            raise ValueError("torch is not a state of its generator") from None
        for state in self.cuda:
            as_bytes(state)
        return self


def as_bytes(text: str) -> torch.Tensor:
    """Decodes base64 to a byte tensor, the argument of ``torch.set_rng_state``; raises ValueError for other text."""
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _check_choices(names: dict[str, str]) -> dict[str, str]:
    keys = [key for key in (*OPS, "stash") if key in names]
    _check_implementations([names[key] for key in keys], keys)
    return names


Values = dict[str, Any]
Choices = Annotated[dict[str, str], AfterValidator(_check_choices)]
PrecisionName = Literal["float32", "tf32", "bfloat16", "float16"]
Score = Union[float, None]


_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(config=_STRICT)
class Meter:
    """Sums over several updates: loss in nats, target tokens, and seconds."""

    loss: Finite = 0.0
    tokens: Count = 0
    seconds: Seconds = 0.0


@dataclass(config=_STRICT)
class TrainingState:
    """State of a run. All values are JSON, and floats are restored from JSON with the same bits.

    ``update`` counts updates; ``data`` is the state of the batch iterator; ``last_checkpoint`` is the update of the
    last row of ``metrics``, 0 before the first; ``parameters_from`` is the checkpoint whose parameters training
    continues with (the best one after the plateau schedule returned to it); ``best_update`` is the best checkpoint, of
    score ``best_score``; ``best_regular`` is the best one at the checkpoint interval, to which the plateau schedule
    returns, and ``num_not_improved`` counts those since it; ``gradient_norm`` is that of the last update; ``text``
    and ``vocabulary`` are fingerprints; ``plan`` is that of a memory budget,
    empty without one; ``choices`` names the implementations that the run began with, empty with a budget; ``pipeline``
    is the division of layers over ranks, empty without a pipeline; ``precision`` is that at the beginning, by its name
    in a recipe; ``loss_scale`` is that of the next update, empty unless in float16, and ``skipped`` counts the updates
    that overflowed; ``average_from`` is the update after which parameter averaging began, None before; ``environment``
    is that of the last save, see :mod:`econmt.training.context`.
    """

    update: Update = 0
    seconds: Seconds = 0.0
    target_tokens: Count = 0
    data: Annotated[Values, shaped_like(BatchPosition, may_be_empty=True)] = field(default_factory=dict)
    random: Annotated[Values, shaped_like(RandomStates, may_be_empty=True)] = field(default_factory=dict)
    schedule: Annotated[Values, shaped_like(ScheduleState, may_be_empty=True)] = field(default_factory=dict)
    best_update: Update = 0
    best_score: Score = None
    best_regular: Update = 0
    num_not_improved: Count = 0
    last_checkpoint: Update = 0
    parameters_from: Update = 0
    signature: str = ""
    vocabulary: str = ""
    text: str = ""
    gradient_norm: float = 0.0
    since_checkpoint: Meter = field(default_factory=Meter)
    since_log: Meter = field(default_factory=Meter)
    plan: Annotated[Values, shaped_like(PlanState, may_be_empty=True)] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)
    pipeline: Annotated[Values, shaped_like(PipelineState, may_be_empty=True)] = field(default_factory=dict)
    precision: PrecisionName = "float32"
    loss_scale: Annotated[Values, shaped_like(LossScaleState, may_be_empty=True)] = field(
        default_factory=dict
    )
    skipped: Count = 0
    average_from: Update | None = None
    environment: dict[str, str] = field(default_factory=dict)
    metrics: list[Annotated[Values, shaped_like(MetricsRow)]] = field(default_factory=list)

    def to_json(self) -> str:
        """Returns the state as JSON text."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> TrainingState:
        """Parses a state from JSON text named ``where``; raises InputError if it is broken or from another version."""
        advice = "start anew with --overwrite-output"
        values = parse_json(text, where, advice)
        if values.pop("format", None) != FORMAT:
            raise InputError(
                f"{where}: not a training state of this version of econmt; start anew in another folder"
            )
        # Older states lack best_regular and have the fields of options that left.
        for former in ("monitored", "savings"):
            values.pop(former, None)
        values.setdefault("best_regular", values.get("best_update", 0))
        missing = {entry.name for entry in fields(cls)} - set(values)
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
        names = ("best_update", "best_regular", "last_checkpoint", "parameters_from")
        named = {name: getattr(self, name) for name in names}
        wrong = [
            f"{name} {update}: no such checkpoint" for name, update in named.items() if update not in rows
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
