"""Optimizer state divided over ranks (ZeRO-1: Rajbhandari, Rasley, Ruwase and He 2020, section 5.1).

Each rank holds the state of some parameters, updates these, and broadcasts their values. Whole parameters are assigned
to ranks, so that updates, files and rounding are those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from torch import nn

from econmt.parallel.groups import Group
from econmt.parallel.reduction import in_buckets
from econmt_ops.core.scopes import layer


def shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assigns items of given sizes to ranks: the largest first, always to the rank with the least so far."""
    taken = [0] * ranks
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        owner = taken.index(min(taken))
        owners[number] = owner
        taken[owner] += sizes[number]
    return owners


def largest_share(sizes: Sequence[int], ranks: int) -> tuple[int, float]:
    """Returns the rank with the largest share, and that share from 0 to 1."""
    taken = [0] * ranks
    for size, owner in zip(sizes, shares(sizes, ranks), strict=True):
        taken[owner] += size
    return taken.index(max(taken)), max(taken) / max(1, sum(sizes))


class OptimizerShares:
    """Division of the optimizer's state; see :class:`econmt.engine.communicator.Shares`."""

    def __init__(self, parameters: Iterable[nn.Parameter], rank: int, ranks: Group) -> None:
        self._ranks, self._rank = ranks, rank
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        owners = shares([parameter.numel() for parameter in trained], ranks.size)
        self.owner = dict(zip(trained, owners, strict=True))
        self._parts = [
            in_buckets([parameter for parameter in trained if self.owner[parameter] == number])
            for number in range(ranks.size)
        ]

    @property
    def owned(self) -> list[nn.Parameter]:
        """Parameters that this rank updates."""
        return [parameter for parameter, owner in self.owner.items() if owner == self._rank]

    @torch.no_grad()
    def spread(self) -> None:
        """Broadcasts the updated parameters; see :class:`econmt.engine.communicator.Shares`."""
        with self._ranks.watched(), layer("exchange"):
            for buckets in zip_longest(*self._parts, fillvalue=()):
                works = []
                for owner, bucket in enumerate(buckets):
                    if bucket:
                        sizes = [part.numel() for part in bucket]
                        flat = bucket[0].new_empty(sum(sizes))
                        parts = zip(torch.split(flat, sizes), bucket, strict=True)
                        views = [part.view(parameter.shape) for part, parameter in parts]
                        if owner == self._rank:
                            torch._foreach_copy_(views, bucket)
                        works.append((owner, bucket, views, self._ranks.broadcast(flat, owner)))
                for owner, bucket, views, work in works:
                    work.wait()
                    if owner != self._rank:
                        torch._foreach_copy_(bucket, views)
