"""Interfaces of batches and batch streams that all tasks share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from econmt.data.text.vocabulary import PAD

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class AnyBatch(ABC):
    """Base class of batches: B rows of token ids, all tensors int64."""

    filler: ClassVar[Mapping[str, int]] = MappingProxyType({"indices": -1})
    """Values of padding rows by tensor name; other tensors are filled with ``<pad>``."""

    indices: torch.Tensor
    """Index of each row in its token store, for messages, (B,); -1 for padding rows."""
    target_tokens: int
    """Number of target tokens that contribute to the loss, padding excluded."""
    rate: float = field(default=1.0, kw_only=True)
    """Factor of the learning rate for this batch."""

    @property
    @abstractmethod
    def positions(self) -> tuple[int, int]:
        """Padded numbers of source and target positions."""

    @property
    @abstractmethod
    def size_text(self) -> str:
        """Size of the batch in words, for messages."""

    def to(self, device: torch.device | str) -> Self:
        """Copies all tensors to ``device``, asynchronously to a GPU."""
        pinned = torch.device(device).type == "cuda"

        def copied(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            # Without pinning, a large copy would wait for the GPU's queued work.
            if pinned and not value.is_cuda:
                value = value.pin_memory()
            return value.to(device, non_blocking=True)

        return type(self)(**{name: copied(value) for name, value in vars(self).items()})

    def split(self, rows: int) -> list[Self]:
        """Splits the batch into the fewest parts of at most ``rows`` rows, nearly equal in size, same padding."""
        count = -(-len(self.indices) // rows)
        return [self] if count == 1 else [self.part(part) for part in _even_parts(len(self.indices), count)]

    def first(self, rows: int) -> Self:
        """Returns the first ``rows`` rows, or all if there are fewer, with the same padding."""
        return self if rows >= len(self.indices) else self.part(slice(0, rows))

    def trimmed(self) -> Self:
        """Returns the batch without the columns in which all rows have padding."""
        return self

    def share(self, rank: int, size: int, rows: int | None = None) -> Self:
        """Returns the contiguous rows of one of ``size`` ranks, padded so that all ranks have equally many.

        ``rows`` are those per rank, enough for the whole batch; None: the fewest possible.
        """
        if size == 1:
            return self
        rows = -(-len(self.indices) // size) if rows is None else rows
        part = self.part(slice(rank * rows, (rank + 1) * rows))
        return part.filled(rows)

    def renumbered(self) -> Self:
        """Renumbers carried states by the positions of the rows in this batch, for a model that holds only these."""
        return self

    def filled(self, rows: int) -> Self:
        """Pads the batch to ``rows`` rows. Padding rows contribute no loss."""
        missing = rows - len(self.indices)
        if missing <= 0:
            return self
        tensors = {
            name: torch.cat([value, value.new_full((missing, *value.shape[1:]), self.filler.get(name, PAD))])
            for name, value in self._tensors(slice(None)).items()
        }
        changes: dict[str, Any] = {**tensors}
        return replace(self, **changes)

    @abstractmethod
    def part(self, rows: slice) -> Self:
        """Returns some rows, with the same padding."""

    def _tensors(self, rows: slice) -> dict[str, torch.Tensor]:
        return {name: value[rows] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def _even_parts(rows: int, count: int) -> list[slice]:
    """Divides ``rows`` rows into ``count`` contiguous slices whose lengths differ by at most one."""
    ends = [-(-rows * number // count) for number in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


class BatchShape(NamedTuple):
    """Padded shape: source and target positions, largest number of rows, and number of batches with this shape."""

    source: int
    target: int
    rows: int
    batches: int


BatchType = TypeVar("BatchType", bound=AnyBatch, covariant=True)


class Batches(ABC, Generic[BatchType]):
    """Endless stream of batches over epochs; a batch depends on seed, epoch and position only.

    Attributes:
        epoch: epoch of the next batch, from 0.
    """

    def __init__(self) -> None:
        self.epoch, self._position = 0, 0

    @property
    @abstractmethod
    def batches_per_epoch(self) -> int:
        """Number of batches in the current epoch, the same on every rank."""

    @abstractmethod
    def _batch(self, position: int) -> BatchType:
        """Builds the batch at a position of the current epoch."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchType:
        batch = self._batch(self._position)
        self._position += 1
        if self._position == self.batches_per_epoch:
            self.epoch, self._position = self.epoch + 1, 0
        return batch

    def state_dict(self) -> dict[str, int]:
        """Returns the position of the stream, JSON-serialisable."""
        return {"epoch": self.epoch, "position": self._position, "batches_per_epoch": self.batches_per_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restores the position that :meth:`state_dict` returned.

        If the number of batches in an epoch has changed since, continues at the same fraction of the epoch.
        """
        self.epoch = int(state["epoch"])
        then, now = int(state["batches_per_epoch"]), self.batches_per_epoch
        position = int(state["position"])
        self._position = position if then == now else min(position * now // then, now - 1)

    @abstractmethod
    def shapes(self) -> list[BatchShape]:
        """Returns all padded shapes of the batches of an epoch, sorted by target, then source positions."""

    @abstractmethod
    def worst_batch(self) -> BatchType:
        """Returns the batch that needs the most memory."""

    @abstractmethod
    def largest_batch(self, source: int, target: int) -> BatchType:
        """Returns the batch with the most rows of this padded shape, one of :meth:`shapes`."""
