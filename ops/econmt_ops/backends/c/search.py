"""Whole layers and beam searches by the C library, and weights as these read them; kernels.h describes every argument.

B sentences, S source positions, K places of a sentence, T steps, N outputs and K inputs of a weight.
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
from torch.nn import functional

from econmt_ops.backends import c as native
from econmt_ops.backends.c.library import BeamSearch, Weight

MOST_PLACES = 64
"""That of search_room.h."""

_WATCHED = 4
_LANES, _LINE = 16, 64
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_Watch = ctypes.CFUNCTYPE(ctypes.c_int64)


class SearchWeight:
    """left weight^T + bias as a search multiplies.

    Args:
        weight: (N, K). bias: (N,), or None. dtype: float32, bfloat16 or int8.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        # Importing it above would be a circle: products ask this package whether it serves.
        from econmt_ops.core.int8 import rounded

        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._steps: Tensor | None = None
        if dtype == torch.int8:
            self._rows, self._steps = rounded(weight)
        else:
            self._rows = weight.detach().to(dtype)
        self._laid_out: tuple[Tensor, Tensor | None] | None = None

    @property
    def outputs(self) -> int:
        """N."""
        return len(self._rows)

    def only(self, outputs: Tensor) -> SearchWeight:
        """That of some outputs (M,)."""
        made = object.__new__(SearchWeight)
        made._rows = self._rows.index_select(0, outputs)
        made._bias, made._steps = (
            None if part is None else part.index_select(0, outputs) for part in (self._bias, self._steps)
        )
        made._laid_out = None
        return made

    def structure(self) -> Any:
        """For the library; it lives as long as this."""
        from econmt_ops.core.int8 import grouped

        rows = self._rows
        if self._laid_out is None:
            narrow = rows.dtype != torch.float32
            inputs = -rows.shape[1] % (_LINE // rows.itemsize) if narrow else 0
            filled = functional.pad(rows, (0, inputs, 0, -len(rows) % _LANES))
            sums = filled.sum(1, dtype=torch.int32) if rows.dtype == torch.int8 else None
            self._laid_out = grouped(filled), sums
        values, sums = self._laid_out
        places = [_place(part) for part in (values, sums, self._steps, self._bias)]
        return Weight(_KINDS[rows.dtype], rows.shape[1], len(rows), *places)


def _place(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _array(weights: Sequence[SearchWeight | None]) -> Any:
    return (Weight * len(weights))(*(Weight() if each is None else each.structure() for each in weights))


def lstm_sequence(
    recurrent: SearchWeight,
    table: Tensor,
    places: Tensor,
    lengths: Tensor,
    outputs: Tensor,
    last: Tensor,
    *,
    backwards: bool,
) -> None:
    """All steps of an LSTM layer in one direction.

    Args:
        recurrent: (4H, H). table: (M, 4H) float32, what inputs add to the gates.
        places: (T, B) which of them a position has. lengths: (B,), at least 1.
        outputs: (T, B, H), written at a row's own positions; H may be columns of more. last: (B, H), h after the last
            step. Both float32.
    """
    positions, rows, size = outputs.shape
    structure = recurrent.structure()
    table, places, lengths = (part.contiguous() for part in (table, places, lengths))
    assert table.dtype == outputs.dtype == last.dtype == torch.float32
    native.call(
        "lstm_sequence",
        4 * positions * rows * size,
        (rows, positions, size, int(backwards)),
        recurrent=ctypes.addressof(structure),
        table=table,
        places=places,
        lengths=lengths,
        outputs=outputs.flatten(0, 1),
        last=last,
    )


class _Kept:
    """Keeps what is raised inside: through C it could not pass."""

    error: BaseException | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> bool:
        self.error = self.error or error
        return True


@contextmanager
def _signals_wait() -> Iterator[Callable[[], None]]:
    """Within it handlers of Ctrl-C and SIGTERM run when what is given is called, and those left when it ends.

    Python would run them as a callback begins, where what they raise goes nowhere.
    """
    came: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {}

    def handle() -> None:
        while came:
            number, frame = came.pop(0)
            handlers[number](number, frame)

    if threading.current_thread() is threading.main_thread():
        for awaited in (signal.SIGINT, signal.SIGTERM):
            if callable(handler := signal.getsignal(awaited)):
                handlers[awaited] = handler
                signal.signal(awaited, lambda *given: came.append(given))
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
    """Searches; fills ``ended``, ``count``, ``grown`` and ``seen``.

    Args:
        weights: in the library's order, None where there is none.
        sizes, tensors: the fields of the structure by their names; tensors are contiguous.
        watch: called before every few steps; what it raises ends the search.
    """
    kept = _Kept()

    def watched() -> int:
        with kept:
            handle()
            watch()
        return int(kept.error is not None)

    stopped = torch.zeros(1, dtype=torch.int64)
    array = _array(weights)
    function = _Watch(watched)
    assert all(part is None or part.is_contiguous() for part in tensors.values())
    with _signals_wait() as handle:
        native.call(
            "beam_search",
            1 << 30,
            (),
            **sizes,
            **tensors,
            watched=_WATCHED,
            weights=ctypes.addressof(array),
            watch=ctypes.cast(function, ctypes.c_void_p).value,
            stopped=stopped,
        )
    if kept.error is not None:
        raise kept.error


def search_step(
    weights: Sequence[SearchWeight | None],
    sizes: Mapping[str, int],
    tensors: Mapping[str, Tensor | None],
    rows: Mapping[str, Tensor],
) -> None:
    """One step of the decoder for hypotheses that are chosen elsewhere, with the arithmetic of :func:`beam_search`.

    Args:
        weights, sizes, tensors: as there, without what a search alone has.
        rows: the fields of the step's structure by their names, contiguous: ``owners`` and ``tokens`` (R,) int64;
            ``h`` and ``c`` (layers, R, H) and ``output`` (R, H), which are overwritten; ``seen`` (R, S) and
            ``log_probs`` (R, N), which are written.
    """
    array = _array(weights)
    places = {name: _place(part) for name, part in tensors.items()}
    search = BeamSearch(**sizes, **places, beam=1, nbest=1, weights=ctypes.addressof(array))
    assert all(part is None or part.is_contiguous() for part in (*tensors.values(), *rows.values()))
    log_probs = rows["log_probs"]
    native.call("search_step", log_probs.numel(), (len(log_probs),), search=ctypes.addressof(search), **rows)
