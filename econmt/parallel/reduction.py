"""Gradients added up over ranks in buckets, which leave while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt.config.recipe import ParallelSection
from econmt.parallel.groups import Members, Pending
from econmt_ops.core.scopes import layer

BUCKET_BYTES = 25 << 20
"""Gradients that travel together: few messages, and the first leaves long before the last gradient is there."""


def travelling(settings: ParallelSection) -> torch.dtype:
    """The type in which gradients travel."""
    return torch.bfloat16 if settings.reduction == "bfloat16" else torch.float32


_ALIGNMENT = 16
"""Elements at whose multiples each gradient begins in its bucket, so that kernels may read several at once."""


class _Message(NamedTuple):
    """A bucket on its way: the parameters, the flat tensor, where each one's gradient lies in it, and its arrival."""

    parameters: list[nn.Parameter]
    flat: Tensor
    begins: list[int]
    work: Pending


class BucketedReduction:
    """See :class:`econmt.engine.communicator.Reduction`.

    Buckets are made from the last parameter to the first, about the order in which a backward pass is done with them,
    and leave in that order on every rank, so that all ranks speak of the same thing and the sums, which depend on where
    in a message a value lies, are the same in every run. Nothing here asks for a value on a GPU or takes memory that a
    replay would not find again, so a step may be captured in a CUDA graph with the messages in it.

    Gradients of some rows of a table go as rows where these are fewer bytes than the table.

    Args:
        parameters: in the model's order.
        ranks: that have them.
        dtype: of what travels.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Members, dtype: torch.dtype) -> None:
        self._ranks, self._dtype = ranks, dtype
        self._buckets: list[list[nn.Parameter]] = [[]]
        taken = 0
        self._bucket_of: dict[nn.Parameter, int] = {}
        for parameter in reversed([each for each in parameters if each.requires_grad]):
            if taken + parameter.nbytes > BUCKET_BYTES and self._buckets[-1]:
                self._buckets.append([])
                taken = 0
            taken += parameter.nbytes
            self._bucket_of[parameter] = len(self._buckets) - 1
            self._buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
        self._missing = [0] * len(self._buckets)
        self._active = False
        self._sent = 0
        self._packed: dict[int, tuple[list[nn.Parameter], Tensor, list[int]]] = {}
        self._messages: list[_Message] = []
        self._rows: list[nn.Parameter] = []

    def begin(self) -> None:
        """See :meth:`econmt.engine.communicator.Reduction.begin`."""
        self._active = True
        self._missing = [len(bucket) for bucket in self._buckets]

    def abandon(self) -> None:
        """See :meth:`econmt.engine.communicator.Reduction.abandon`."""
        self._active, self._sent = False, 0
        self._packed.clear()
        self._messages.clear()
        self._rows.clear()

    def pack(self) -> None:
        """See :meth:`econmt.engine.communicator.Reduction.pack`."""
        with torch.no_grad(), layer("exchange"):
            for number in range(self._sent, len(self._buckets)):
                self._packed[number] = self._pack(self._buckets[number])

    def finish(self, loss: Tensor) -> None:
        """See :meth:`econmt.engine.communicator.Reduction.finish`."""
        with self._ranks.watched(), torch.no_grad(), layer("exchange"):
            while self._sent < len(self._buckets):
                self._send()
            work = self._ranks.all_reduce(loss)
            if self._rows:
                self._exchange_rows()
            for message in self._messages:
                message.work.wait()
                self._receive(message)
            work.wait()
        self.abandon()

    def _arrived(self, parameter: Tensor) -> None:
        """A gradient is complete: its bucket may be, and may be the one whose turn it is."""
        if not self._active:
            return
        assert isinstance(parameter, nn.Parameter)
        bucket = self._bucket_of[parameter]
        self._missing[bucket] -= 1
        assert self._missing[bucket] >= 0, "a gradient was added to after it had left"
        while self._sent < len(self._buckets) and self._missing[self._sent] == 0:
            with self._ranks.watched(), torch.no_grad(), layer("exchange"):
                self._send()

    def _send(self) -> None:
        """Sends the next bucket; rows of tables wait for the end."""
        bucket = self._buckets[self._sent]
        self._rows += [each for each in bucket if each.grad is not None and each.grad.is_sparse]
        if self._sent not in self._packed:
            self._packed[self._sent] = self._pack(bucket)
        parameters, flat, begins = self._packed.pop(self._sent)
        self._sent += 1
        if parameters:
            self._messages.append(_Message(parameters, flat, begins, self._ranks.all_reduce(flat)))

    def _pack(self, bucket: Sequence[nn.Parameter]) -> tuple[list[nn.Parameter], Tensor, list[int]]:
        """Packs the dense gradients of a bucket: returns their parameters, a flat tensor, and each one's offset."""
        parameters = [each for each in bucket if each.grad is not None and not each.grad.is_sparse]
        begins, end = [], 0
        for parameter in parameters:
            begins.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        flat = torch.zeros(end, dtype=self._dtype, device=bucket[0].device)
        gradients = [each.grad for each in parameters if each.grad is not None]
        if gradients:
            torch._foreach_copy_(_views(flat, parameters, begins), gradients)
        return parameters, flat, begins

    def _receive(self, message: _Message) -> None:
        """Puts the sums where the gradients were, which stay at their place in memory."""
        gradients = [each.grad for each in message.parameters if each.grad is not None]
        torch._foreach_copy_(gradients, _views(message.flat, message.parameters, message.begins))

    def _exchange_rows(self) -> None:
        """Adds up gradients of tables that have some rows only."""
        found = []
        for parameter in self._rows:
            assert parameter.grad is not None
            found.append(parameter.grad.coalesce())
        counts = zip(*self._ranks.counts([each._nnz() for each in found]), strict=True)
        for parameter, gradient, each in zip(self._rows, found, counts, strict=True):
            if rows_are_fewer(each, gradient.shape):
                parameter.grad = self._gathered(gradient, each)
            else:
                parameter.grad = gradient.to_dense()
                self._ranks.all_reduce(parameter.grad).wait()

    def _gathered(self, gradient: Tensor, counts: Sequence[int]) -> Tensor:
        """The sum of every rank's rows; ``counts`` of them."""
        most = max(counts)
        ids = torch.zeros(most, dtype=torch.int64)
        values = torch.zeros(most, *gradient.shape[1:], dtype=self._dtype)
        ids[: gradient._nnz()] = gradient._indices()[0]
        values[: gradient._nnz()] = gradient._values()
        all_ids, all_values = self._ranks.gather(ids), self._ranks.gather(values)
        kept = torch.cat([each[:count] for each, count in zip(all_ids, counts, strict=True)])
        rows, places = torch.unique(kept, return_inverse=True)
        sums = torch.zeros(len(rows), *gradient.shape[1:], dtype=gradient.dtype)
        # A rank's rows are distinct, so that each sum is made in the order of the ranks.
        for place, part, count in zip(places.split(list(counts)), all_values, counts, strict=True):
            sums.index_add_(0, place, part[:count].to(gradient.dtype))
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), sums, gradient.shape, is_coalesced=True, check_invariants=False
        )


def rows_are_fewer(counts: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns True if sending rows takes fewer values than an all-reduce of the table.

    Args:
        counts: rows of each rank, each sent as the largest number of them. shape: (V, E) of the table.
    """
    return max(counts) * len(counts) < 2 * shape[0]


def _views(flat: Tensor, parameters: Sequence[Tensor], begins: Sequence[int]) -> list[Tensor]:
    """Returns a view of each parameter's gradient in a message."""
    return [
        flat[begin : begin + each.numel()].view(each.shape)
        for each, begin in zip(parameters, begins, strict=True)
    ]
