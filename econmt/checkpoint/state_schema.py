"""Schema of the JSON data in a training state, so that a damaged state is reported rather than used."""

from __future__ import annotations

import base64
import re
from typing import Annotated, Any, Literal, Union

import torch
from pydantic import AfterValidator, ConfigDict, Field, model_validator

from econmt.config import limits
from econmt.config.json_reader import Record
from econmt.config.recipe import OPS, implementation_names

Count = Annotated[int, Field(ge=0, le=limits.TOKENS)]
Update = Annotated[int, Field(ge=0, le=limits.UPDATES)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=2**62)]


class DataPlace(Record):
    """Position of the batch iterator."""

    epoch: Update
    position: Count
    batches_per_epoch: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _inside(self) -> DataPlace:
        if self.position >= self.batches_per_epoch:
            raise ValueError(f"position {self.position} is past {self.batches_per_epoch} batches an epoch")
        return self


class ScheduleState(Record):
    """State of the learning rate schedule."""

    name: str
    factor: Annotated[float, Field(gt=0.0, le=1.0)]
    num_not_improved: Count


class MetricsRow(Record):
    """Row of metrics.tsv; values that were not measured are NaN. A recipe may add columns."""

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


def _known(names: Any, keys: Any) -> None:
    for key, name in zip(keys, names, strict=True):
        known = (
            implementation_names(key) if key in OPS else ["auto", "outputs", "attention", "cells", "gates"]
        )
        if name not in known:
            raise ValueError(f"{key} {name!r} is not one of {', '.join(known)}")


def _allotment(row: list[Any]) -> list[Any]:
    sizes, names = row[:6], row[6:]
    if len(row) != 11 or not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise ValueError("an allotment must have six integers and five names")
    if not all(sizes[index] for index in (0, 1, 2, 4)):
        raise ValueError("an allotment must have positions and rows")
    _known(names, (*OPS, "stash"))
    return row


class PlanState(Record):
    """Plan of a memory budget, see :meth:`econmt.memory.plan.planner.MemoryPlan.state_dict`."""

    made_for: str
    budget: Annotated[int, Field(ge=1, le=2**62)]
    decoding_rows: Annotated[int, Field(ge=1, le=limits.TRANSLATED)]
    allotments: list[Annotated[list[Any], AfterValidator(_allotment)]]

    @model_validator(mode="after")
    def _trains(self) -> PlanState:
        if not any(row[3] for row in self.allotments):
            raise ValueError("the plan has no batches")
        return self


class PipelineState(Record):
    """Division of layers over ranks, see :class:`econmt.parallel.pipeline.costs.PipelinePlan`."""

    stages: Annotated[int, Field(ge=2, le=limits.LAYERS)]
    homes: list[list[Annotated[int, Field(ge=0, lt=limits.LAYERS)]]]
    chunks: list[Annotated[int, Field(ge=1, le=limits.POSITIONS)]]

    @model_validator(mode="after")
    def _homes_are_stages(self) -> PipelineState:
        if any(home >= self.stages for homes in self.homes for home in homes):
            raise ValueError("a layer is on a stage that does not exist")
        return self


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
    """Decodes base64 to a byte tensor, the argument of ``torch.set_rng_state``.

    Raises:
        ValueError: The text is not base64.
    """
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _choices(names: dict[str, str]) -> dict[str, str]:
    if "lstm" not in names:  # from an older version, whose names have other meanings
        keys = [key for key in (*OPS, "stash") if key in names]
        _known([names[key] for key in keys], keys)
    return names


Choices = Annotated[dict[str, str], AfterValidator(_choices)]
PrecisionName = Literal["float32", "tf32", "bfloat16"]
Score = Union[float, None]
