"""Entire layers and beam searches in the C library, and weights in its format; kernels.h describes every argument.

Sizes: B sentences, S source positions, K beam size, T steps, N outputs and K inputs of a weight.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.core.int8 import in_groups, rounded

MOST_PLACES = 64
"""Maximum beam size, as in search_room.h."""

_WATCHED = 4
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
CELL_NUMBERS = {"lstm": 0, "gru": 1, "ssru": 2, "lnlstm": 3, "lnglstm": 4}
"""Cells that the library runs, with their numbers in kernels.h."""
_Watch = ctypes.CFUNCTYPE(ctypes.c_int64)


class SearchWeight:
    """Weight of a product left weight^T + bias in a search.

    Args:
        weight: (N, K). bias: (N,), or None. dtype: float32, bfloat16 or int8.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._steps: Tensor | None = None
        if dtype == torch.int8:
            self._rows, self._steps = rounded(weight)
        else:
            self._rows = weight.detach().to(dtype)
        self._prepacked: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def supports(dtype: torch.dtype) -> bool:
        """Returns True if searches in the C library can compute products in this type."""
        return dtype in _KINDS

    @property
    def outputs(self) -> int:
        """Number of outputs, N."""
        return len(self._rows)

    def only(self, outputs: Tensor) -> SearchWeight:
        """Returns the weight restricted to some outputs (M,)."""
        restricted = object.__new__(SearchWeight)
        restricted._rows = self._rows.index_select(0, outputs)
        restricted._bias, restricted._steps = (
            None if part is None else part.index_select(0, outputs) for part in (self._bias, self._steps)
        )
        restricted._prepacked = None
        return restricted

    def structure(self) -> Any:
        """Returns the structure for the library; it is valid while this object exists."""
        rows = self._rows
        if self._prepacked is None:
            self._prepacked = in_groups(rows)
        values, sums = self._prepacked
        addresses = [_address(part) for part in (values, sums, self._steps, self._bias)]
        return native.structure_of("weight").kind(_KINDS[rows.dtype], rows.shape[1], len(rows), *addresses)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _array(weights: Sequence[SearchWeight | None]) -> Any:
    kind = native.structure_of("weight").kind
    return (kind * len(weights))(*(kind() if weight is None else weight.structure() for weight in weights))


def layer_sequence(
    cell: int,
    recurrent: SearchWeight | None,
    vectors: Tensor | None,
    table: Tensor,
    places: Tensor,
    lengths: Tensor,
    outputs: Tensor,
    last: Tensor,
    *,
    backwards: bool,
) -> None:
    """Runs all steps of a layer with G gates in one direction.

    Args:
        cell: number of the cell. recurrent: (G H, H); None for SSRU. vectors: as in kernels.h.
        table: (M, G H), the inputs' share of the gates.
        places: (T, B), row index into ``table`` of each position. lengths: (B,), at least 1.
        outputs: (T, B, H), written at a row's own positions; may be columns of a wider tensor. last: (B, H), h after
            the last step.
    """
    positions, rows, size = outputs.shape
    structure = None if recurrent is None else recurrent.structure()
    native.call(
        "layer_sequence", 4 * positions * rows * size, rows=rows, positions=positions, hidden=size, cell=cell,
        backwards=backwards, recurrent=None if structure is None else ctypes.addressof(structure), vectors=vectors,
        table=table, places=places, lengths=lengths, outputs=outputs.flatten(0, 1), last=last,
    )  # fmt: skip


@contextmanager
def _signals_wait() -> Iterator[Callable[[], None]]:
    """Defers handlers of Ctrl-C and SIGTERM until the yielded function is called, or until the context ends.

    Python would otherwise run them at the start of a callback, where their exceptions are lost.
    """
    pending: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}

    def handle() -> None:
        while pending:
            number, frame = pending.pop(0)
            handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for awaited in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(awaited)):
                handlers[awaited] = handler
                signal.signal(awaited, lambda *given: pending.append(given))
    try:
        yield handle
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        handle()


def beam_search(
    weights: Sequence[SearchWeight | None],
    sizes: Mapping[str, int],
    tensors: Mapping[str, Tensor | None],
    watch: Callable[[], object],
) -> None:
    """Runs a beam search; fills ``ended``, ``count``, ``grown`` and ``seen``.

    Args:
        weights: in the library's order, None for missing ones.
        sizes, tensors: fields of the structure by name; tensors are contiguous.
        watch: called every few steps; an exception that it raises ends the search.
    """
    errors: list[BaseException] = []

    def watched() -> int:
        try:
            handle()
            watch()
        except BaseException as error:  # noqa: BLE001  it cannot propagate through C
            errors.append(error)
        return len(errors)

    stopped = torch.zeros(1, dtype=torch.int64)
    array = _array(weights)
    function = _Watch(watched)
    with _signals_wait() as handle:
        native.call(
            "beam_search",
            1 << 30,
            **sizes,
            **tensors,
            watched=_WATCHED,
            weights=ctypes.addressof(array),
            watch=ctypes.cast(function, ctypes.c_void_p).value,
            stopped=stopped,
        )
    if errors:
        raise errors[0]


def search_step(
    weights: Sequence[SearchWeight | None],
    sizes: Mapping[str, int],
    tensors: Mapping[str, Tensor | None],
    rows: Mapping[str, Tensor],
) -> None:
    """Runs one decoder step for hypotheses that the caller selects, with the arithmetic of :func:`beam_search`.

    Args:
        weights, sizes, tensors: as there, without the fields that only a search needs.
        rows: fields of the step's structure by name, contiguous; those of the state are overwritten.
    """
    array = _array(weights)
    addresses = {name: _address(part) for name, part in tensors.items()}
    assert all(part is None or part.is_contiguous() for part in tensors.values())
    kind = native.structure_of("beam_search").kind
    search = kind(**sizes, **addresses, beam=1, nbest=1, weights=ctypes.addressof(array))
    log_probs = rows["log_probs"]
    native.call(
        "search_step", log_probs.numel(), rows=len(log_probs), search=ctypes.addressof(search), **rows
    )
