"""What exchanges between ranks take on paper: latency and bandwidth of links, rings and trees over them.

The model is that of Hockney (1994): a message of n bytes takes alpha + n / beta. An all-reduce over a ring of N ranks
is 2 (N - 1) messages of n / N bytes one after the other; over a double binary tree (Sanders, Speck & Träff, 2009; NCCL
since 2.4) the bytes travel twice, up and down, in parts that follow each other closely, and the latency is that of
twice its depth. Whoever has both takes the faster, and so does the model. Where ranks share hosts an
all-reduce is a reduce-scatter inside each host, an all-reduce between hosts of what each rank then has, and an
all-gather inside.
"""

from __future__ import annotations

from math import ceil, inf, log2
from typing import NamedTuple


class Link(NamedTuple):
    """What lies between two ranks.

    Attributes:
        name: for tables.
        latency: alpha, seconds a message.
        bandwidth: beta, bytes a second in each direction.
        source: where the figures are from.
    """

    name: str
    latency: float
    bandwidth: float
    source: str = ""

    def seconds(self, size: float) -> float:
        """Of a message of ``size`` bytes."""
        return self.latency + size / self.bandwidth


FREE = Link("none", 0.0, inf)
"""A link that takes no time: what a model without it predicts is what computing alone takes."""


class Machine(NamedTuple):
    """Where ranks are and how they reach each other.

    Attributes:
        name: for tables.
        ranks_per_host: ranks beyond it are on further hosts.
        within: a link inside a host. between: one between hosts, that of one rank.
        overlaps: whether a rank can compute while it exchanges; a process with one core cannot.
        messages: between neighbours of a pipeline on a host, where they were measured apart; None: as ``within``.
        crowding: by how much N busy ranks of a host slow each other down, (N, factor) with rising N; between them it is
            interpolated, beyond the last one kept.
    """

    name: str
    ranks_per_host: int
    within: Link
    between: Link
    overlaps: bool = True
    crowding: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    messages: Link | None = None

    def without_exchanges(self) -> Machine:
        """The same machine with links that take no time."""
        return self._replace(within=FREE, between=FREE, messages=None)


class Group(NamedTuple):
    """Ranks that exchange: so many on each of so many hosts.

    Attributes:
        local: ranks of the group on a host. hosts: how many there are.
        within, between: their links.
    """

    local: int
    hosts: int
    within: Link
    between: Link

    @property
    def size(self) -> int:
        """Ranks."""
        return self.local * self.hosts

    @classmethod
    def of(cls, machine: Machine, ranks: int, stride: int = 1) -> Group:
        """Every ``stride``-th rank of a machine, so many of them; the last host may be full only in part.

        A group that does not fill its last host is counted as if all hosts had as many.
        """
        local = min(ranks, max(1, machine.ranks_per_host // stride))
        return cls(local, ceil(ranks / local), machine.within, machine.between)


def all_reduce_seconds(size: float, group: Group) -> float:
    """Seconds in which every rank of a group has the sum of ``size`` bytes of each."""
    inside = 2.0 * _scatter_seconds(size, group.local, group.within)
    return inside + _flat_all_reduce_seconds(size / group.local, group.hosts, group.between)


def all_gather_seconds(size: float, group: Group) -> float:
    """Seconds in which every rank has all parts of ``size`` bytes, of which each had one at first."""
    outside = _scatter_seconds(size / group.local, group.hosts, group.between)
    return outside + _scatter_seconds(size, group.local, group.within)


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Bytes that each rank sends in an all-reduce over a ring, the least that any way needs."""
    return 2.0 * size * (ranks - 1) / ranks


def _scatter_seconds(size: float, ranks: int, link: Link) -> float:
    """A reduce-scatter or an all-gather over a ring."""
    return (ranks - 1) * link.seconds(size / ranks) if ranks > 1 else 0.0


def _flat_all_reduce_seconds(size: float, ranks: int, link: Link) -> float:
    if ranks == 1:
        return 0.0
    tree = 2.0 * ceil(log2(ranks)) * link.latency + 2.0 * size / link.bandwidth
    return min(2.0 * _scatter_seconds(size, ranks, link), tree)
