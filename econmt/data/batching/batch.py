"""What every task's batches have in common: who trains knows rows, their places and how many tokens are learnt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from econmt.data.text.subwords import PAD

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class AnyBatch(ABC):
    """Rows of token ids; every tensor is int64 with B rows."""

    filler: ClassVar[Mapping[str, int]] = MappingProxyType({"indices": -1})
    """What a row that stands in holds, by the name of a tensor; padding in all others."""

    indices: torch.Tensor
    """(B,): where each row is in its store, for a person; it stays on the CPU. -1 in a row that stands in."""
    target_tokens: int
    """Tokens that are learnt, padding not counted."""

    @property
    @abstractmethod
    def positions(self) -> tuple[int, int]:
        """Padded source and target positions; batches alike in both have the same shape but for rows."""

    @property
    @abstractmethod
    def size_text(self) -> str:
        """Its size, for a person."""

    @property
    def rate(self) -> float:
        """What the learning rate of its update is multiplied by."""
        return 1.0

    def to(self, device: torch.device | str) -> Self:
        """The same batch with all tensors on ``device``; what a GPU has to do before is not waited for."""
        pinned = torch.device(device).type == "cuda"

        def there(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            # A copy of what may be paged out, once it is large, begins when the GPU has done all else.
            if pinned and not value.is_cuda:
                value = value.pin_memory()
            return value.to(device, non_blocking=True)

        return type(self)(**{name: there(value) for name, value in vars(self).items()})

    def split(self, rows: int) -> list[Self]:
        """The same rows in the fewest parts of at most ``rows`` rows, as even as can be, padded as before."""
        count = -(-len(self.indices) // rows)
        return [self] if count == 1 else [self.part(part) for part in _even_parts(len(self.indices), count)]

    def first(self, rows: int) -> Self:
        """The first ``rows`` rows, or all if there are fewer, padded as before."""
        return self if rows >= len(self.indices) else self.part(slice(0, rows))

    def trimmed(self) -> Self:
        """The same rows without the columns in which all have padding."""
        return self

    def share(self, rank: int, size: int, rows: int | None = None) -> Self:
        """The rows of one of ``size`` ranks: neighbours, as many on each, with rows that stand in where there are none.

        Args:
            rank: whose. size: how many ranks.
            rows: of each rank, enough for all together; None: the fewest.
        """
        if size == 1:
            return self
        rows = -(-len(self.indices) // size) if rows is None else rows
        part = self.part(slice(rank * rows, (rank + 1) * rows))
        return part.filled(rows)

    def renumbered(self) -> Self:
        """The same rows where no others have carried states: these then go by the places of the rows here."""
        return self

    def filled(self, rows: int) -> Self:
        """The same rows, and after them so many that stand in that there are ``rows``: no token of them is learnt."""
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
        """Some rows, padded as before."""

    def _tensors(self, rows: slice) -> dict[str, torch.Tensor]:
        return {name: value[rows] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


def _even_parts(rows: int, count: int) -> list[slice]:
    """``count`` neighbouring slices of ``rows`` rows, the first ones a row longer where it does not go evenly."""
    ends = [-(-rows * number // count) for number in range(count + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]


class BatchShape(NamedTuple):
    """A padded shape of batches: source and target positions, the most rows of any of them, how many there are."""

    source: int
    target: int
    rows: int
    batches: int


class Batches(Protocol):
    """An endless stream of batches, epoch after epoch; the same (seed, epoch, position) gives the same batch."""

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0."""

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches in the running epoch, the same on each rank."""

    def state_dict(self) -> dict[str, int]:
        """Where the stream stands; JSON-able."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to where :meth:`state_dict` was taken."""

    def __iter__(self) -> Iterator[AnyBatch]: ...

    def __next__(self) -> AnyBatch: ...

    def shapes(self) -> list[BatchShape]:
        """Every padded shape that batches of an epoch have, by rising target, then source positions."""

    def worst_batch(self) -> AnyBatch:
        """The batch that needs the most memory."""

    def largest_batch(self, source: int, target: int) -> AnyBatch:
        """The batch with the most rows of those of this padded shape, one of :meth:`shapes`."""
