"""The optimizer's state in shares, one a rank (ZeRO-1: Rajbhandari, Rasley, Ruwase and He 2020, section 5.1).

Each rank holds the state of some parameters, updates these, and gives all others their values. The shares are of whole
parameters: no update, no file and no rounding differs from those of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from econmt.parallel.groups import Members
from econmt.parallel.reduction import BUCKET_BYTES
from econmt_ops.core.scopes import layer


def shares(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank of each of several things of some sizes: the largest first, always to the rank that has the least."""
    taken = [0] * ranks
    owners = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        owner = taken.index(min(taken))
        owners[number] = owner
        taken[owner] += sizes[number]
    return owners


def largest_share(sizes: Sequence[int], ranks: int) -> tuple[int, float]:
    """The rank that has the most of several things, and how much of them that is, from 0 to 1."""
    taken = [0] * ranks
    for size, owner in zip(sizes, shares(sizes, ranks), strict=True):
        taken[owner] += size
    return taken.index(max(taken)), max(taken) / max(1, sum(sizes))


class OptimizerShares:
    """See :class:`econmt.engine.communicator.Shares`.

    Args:
        parameters: in the model's order.
        rank: of this process.
        ranks: all of them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], rank: int, ranks: Members) -> None:
        self._ranks, self._rank = ranks, rank
        trained = [each for each in parameters if each.requires_grad]
        owners = shares([each.numel() for each in trained], ranks.size)
        self.owner = dict(zip(trained, owners, strict=True))
        self._parts = [
            _in_buckets([each for each in trained if self.owner[each] == number])
            for number in range(ranks.size)
        ]

    @property
    def owned(self) -> list[nn.Parameter]:
        """See :class:`econmt.engine.communicator.Shares`."""
        return [parameter for parameter, owner in self.owner.items() if owner == self._rank]

    @torch.no_grad()
    def spread(self) -> None:
        """See :class:`econmt.engine.communicator.Shares`."""
        with self._ranks.watched(), layer("exchange"):
            for buckets in zip_longest(*self._parts, fillvalue=()):
                works = []
                for owner, bucket in enumerate(buckets):
                    if bucket:
                        flat = bucket[0].new_empty(sum(part.numel() for part in bucket))
                        views = _views(flat, bucket)
                        if owner == self._rank:
                            torch._foreach_copy_(views, list(bucket))
                        works.append((owner, bucket, views, self._ranks.broadcast(flat, owner)))
                for owner, bucket, views, work in works:
                    work.wait()
                    if owner != self._rank:
                        torch._foreach_copy_(list(bucket), views)


def _in_buckets(parameters: Sequence[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
    """Parameters that travel together."""
    found: list[list[nn.Parameter]] = []
    taken = BUCKET_BYTES
    for parameter in parameters:
        if taken + parameter.nbytes > BUCKET_BYTES:
            found.append([])
            taken = 0
        found[-1].append(parameter)
        taken += parameter.nbytes
    return [tuple(bucket) for bucket in found]


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns a view of each parameter in a message."""
    parts = torch.split(flat, [each.numel() for each in parameters])
    return [part.view(each.shape) for part, each in zip(parts, parameters, strict=True)]
