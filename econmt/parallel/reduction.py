"""Sums gradients over ranks in buckets, which are sent while the backward pass still runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from econmt.config.recipe import ParallelSection
from econmt.parallel.groups import Group, Pending
from econmt_ops.core.scopes import layer

BUCKET_BYTES = 25 << 20
"""Bytes of a bucket: messages are few, and the first is sent long before the last gradient is complete."""


def travelling(settings: ParallelSection) -> torch.dtype:
    """Returns the type in which gradients are sent."""
    return torch.bfloat16 if settings.reduction == "bfloat16" else torch.float32


_ALIGNMENT = 16
"""Each gradient begins at a multiple of this many elements in its bucket, so that kernels can use vector loads."""


class _Message(NamedTuple):
    """Dense gradients of a bucket in one flat tensor, with a view of it for each parameter's gradient."""

    flat: Tensor
    parameters: list[nn.Parameter]
    views: list[Tensor]


def in_buckets(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, ...]]:
    """Groups parameters in their order into buckets of at most :data:`BUCKET_BYTES`, or of one larger parameter."""
    buckets: list[list[nn.Parameter]] = []
    bucket_bytes = BUCKET_BYTES
    for parameter in parameters:
        if bucket_bytes + parameter.nbytes > BUCKET_BYTES:
            buckets.append([])
            bucket_bytes = 0
        buckets[-1].append(parameter)
        bucket_bytes += parameter.nbytes
    return [tuple(bucket) for bucket in buckets]


class BucketedReduction:
    """Reduction of gradients in buckets of type ``dtype``; see :class:`econmt.engine.communicator.Reduction`.

    Buckets are filled from the last parameter to the first, about the order in which a backward pass completes
    gradients, and sent in that order on every rank. So the ranks' messages match, and the sums, which depend on a
    value's position in a message, are the same in every run. No GPU value is read on the host, and no memory is
    allocated that a replay would not find again, so that a step with its messages can be captured in a CUDA graph.

    Sparse gradients of embedding tables are sent as rows where these are fewer bytes than the table.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], ranks: Group, dtype: torch.dtype) -> None:
        self._ranks, self._dtype = ranks, dtype
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        self._buckets = in_buckets(reversed(trained))
        self._bucket_of = {each: number for number, bucket in enumerate(self._buckets) for each in bucket}
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]
        self._missing = [0] * len(self._buckets)
        self._active = False
        self._sent = 0
        self._packed: dict[int, _Message] = {}
        self._sending: list[tuple[_Message, Pending]] = []
        self._sparse: list[nn.Parameter] = []

    def begin(self) -> None:
        """See :meth:`econmt.engine.communicator.Reduction.begin`."""
        self._active = True
        self._missing = [len(bucket) for bucket in self._buckets]

    def abandon(self) -> None:
        """See :meth:`econmt.engine.communicator.Reduction.abandon`."""
        self._active, self._sent = False, 0
        self._packed.clear()
        self._sending.clear()
        self._sparse.clear()

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
            if self._sparse:
                self._exchange_rows()
            for message, pending in self._sending:
                pending.wait()
                gradients = [parameter.grad for parameter in message.parameters if parameter.grad is not None]
                torch._foreach_copy_(gradients, message.views)
            work.wait()
        self.abandon()

    def _arrived(self, parameter: Tensor) -> None:
        """Counts a completed gradient, and sends the buckets that are complete and next in order."""
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
        """Sends the next bucket; sparse gradients wait until the end."""
        bucket = self._buckets[self._sent]
        self._sparse += [
            parameter for parameter in bucket if parameter.grad is not None and parameter.grad.is_sparse
        ]
        message = self._packed.pop(self._sent, None) or self._pack(bucket)
        self._sent += 1
        if message.parameters:
            self._sending.append((message, self._ranks.all_reduce(message.flat)))

    def _pack(self, bucket: Sequence[nn.Parameter]) -> _Message:
        """Copies the dense gradients of a bucket into a message."""
        parameters = [member for member in bucket if member.grad is not None and not member.grad.is_sparse]
        begins, end = [], 0
        for parameter in parameters:
            begins.append(end)
            end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        flat = torch.zeros(end, dtype=self._dtype, device=bucket[0].device)
        views = [
            flat[begin : begin + parameter.numel()].view(parameter.shape)
            for parameter, begin in zip(parameters, begins, strict=True)
        ]
        if views:
            torch._foreach_copy_(views, [member.grad for member in parameters if member.grad is not None])
        return _Message(flat, parameters, views)

    def _exchange_rows(self) -> None:
        """Sums the sparse gradients of embedding tables."""
        gradients = [parameter.grad.coalesce() for parameter in self._sparse if parameter.grad is not None]
        counts = zip(*self._ranks.counts([gradient._nnz() for gradient in gradients]), strict=True)
        for parameter, gradient, row_counts in zip(self._sparse, gradients, counts, strict=True):
            if rows_are_fewer(row_counts, gradient.shape):
                parameter.grad = self._sum_rows(gradient, row_counts)
            else:
                parameter.grad = gradient.to_dense()
                self._ranks.all_reduce(parameter.grad).wait()

    def _sum_rows(self, gradient: Tensor, counts: Sequence[int]) -> Tensor:
        """Returns the sum of the sparse gradients of all ranks, which have ``counts`` rows each."""
        most = max(counts)
        ids = torch.zeros(most, dtype=torch.int64)
        values = torch.zeros(most, *gradient.shape[1:], dtype=self._dtype)
        ids[: gradient._nnz()] = gradient._indices()[0]
        values[: gradient._nnz()] = gradient._values()
        all_ids, all_values = (self._ranks.gather(part).wait() for part in (ids, values))
        ids_of_all = torch.cat([rank_ids[:count] for rank_ids, count in zip(all_ids, counts, strict=True)])
        rows, positions = torch.unique(ids_of_all, return_inverse=True)
        sums = torch.zeros(len(rows), *gradient.shape[1:], dtype=gradient.dtype)
        # A rank's rows are distinct, so that each sum is added up in rank order.
        for position, rank_values, count in zip(
            positions.split(list(counts)), all_values, counts, strict=True
        ):
            sums.index_add_(0, position, rank_values[:count].to(gradient.dtype))
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), sums, gradient.shape, is_coalesced=True, check_invariants=False
        )


def rows_are_fewer(counts: Sequence[int], shape: Sequence[int]) -> bool:
    """Returns True if receiving rows takes fewer bytes than the table, of which a ring sends each part twice.

    All ranks send the largest of their ``counts`` of rows.
    """
    return max(counts) * len(counts) < 2 * shape[0]
