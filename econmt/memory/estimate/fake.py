"""Replacements, on fake tensors, of operators that read values or whose size only a library knows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from econmt.memory.estimate.allocator import round_up
from econmt.model import translation
from econmt_ops.dispatch.rule import rules_only
from econmt_ops.lstm.cudnn import cudnn_lstm

aten = torch.ops.aten


def _scalar(_value: Tensor) -> int:
    """The value of a tensor, of which only seeds of dropout masks are asked."""
    return 1


def _every_index(tensor: Tensor) -> Tensor:
    """The indices of all values, as if none were zero."""
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


def _distinct_words(
    words: Tensor, _sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Assumes the largest number of distinct words for which the model multiplies each once."""
    return _unique(words, max(1, translation.most_distinct(words.numel())), inverse, counts)


def _all_different(
    values: Tensor, _sorted: bool = True, inverse: bool = False, counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Assumes that all values are distinct."""
    return _unique(values, values.numel(), inverse, counts)


def _unique(values: Tensor, many: int, inverse: bool, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    found = values.new_empty(many)
    places = values.new_empty(values.shape if inverse else 0)
    return found, places, found.new_empty(many if counts else 0)


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Compares two tensors' forms without making them, unlike PyTorch."""
    own, others = tensor.untyped_storage(), other.untyped_storage()
    return own._cdata == others._cdata and all(
        getattr(tensor, name)() == getattr(other, name)() for name in ("storage_offset", "size", "stride")
    )


def _consecutive(
    values: Tensor, inverse: bool = False, counts: bool = False, _dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """No value stands beside one like it."""
    return _unique(values, values.numel(), inverse, counts)


def _counts(values: Tensor, _weights: Tensor | None = None, least: int = 0) -> Tensor:
    """Returns a tensor of counts of the right shape."""
    return values.new_empty(least)


def _parts(tensor: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    """Parts of these sizes; equal ones if the sizes do not add up, since they were values of a tensor."""
    if sum(sizes) != tensor.shape[dim]:
        return list(torch.tensor_split(tensor, len(sizes), dim))
    return list(torch.tensor_split(tensor, list(accumulate(sizes))[:-1], dim))


def _add(left: Tensor, right: Tensor | float, **_: Any) -> Any:
    """The sum of a gradient of all rows and one of some rows, of which fake tensors know nothing."""
    if isinstance(right, Tensor) and right.is_sparse and not left.is_sparse:
        return torch.empty_like(left)
    return NotImplemented


def _add_in_place(left: Tensor, right: Tensor | float, **_: Any) -> Any:
    """Adds in place."""
    if isinstance(right, Tensor) and right.is_sparse and not left.is_sparse:
        return left
    return NotImplemented


def onednn_workspace(steps: int, batch: int, inputs: int, hidden: int) -> int:
    """Bytes that oneDNN keeps of one float32 LSTM layer for the backward pass.

    The gates, h once more, and input, h and their gradients over all steps and the one before, for the layer and
    what it reads, in rows padded to cache lines, each part in whole pages (oneDNN 3, rnn_utils::set_offsets).
    """

    def padded(size: int) -> int:
        row = round_up(size, 16)
        return row + 16 if row % 256 == 0 else row

    over_time = 2 * (steps + 1) * batch
    parts = [steps * batch * padded(4 * hidden), steps * batch * padded(hidden)]
    parts += 3 * [over_time * padded(max(inputs, hidden))] + 2 * [over_time * hidden]
    return sum(round_up(4 * part, 4096) for part in parts)


def _onednn_lstm(inputs: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    recurrent, h, c, training = rest[1], rest[4], rest[5], rest[-1]
    steps, batch, size = inputs.shape
    hidden = recurrent.shape[1]
    kept = onednn_workspace(steps, batch, size, hidden) if training else 0
    return (
        inputs.new_empty(steps, batch, hidden),
        torch.empty_like(h),
        torch.empty_like(c),
        inputs.new_empty(kept, dtype=torch.uint8),
    )


class CuDNN(TorchFunctionMode):
    """Sends ``torch.lstm`` to cuDNN, as on a GPU, though the tensors are those of a CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.lstm:
            return func(*args, **(kwargs or {}))
        inputs, (h, c), weights, biases, layers, dropout, training, bidirectional, batch_first = args
        assert biases
        assert layers == 1
        assert dropout == 0.0
        return cudnn_lstm(inputs, h, c, weights, training, bidirectional, batch_first)


def _time_first(inputs: Tensor, batch_first: bool) -> Tensor:
    return inputs.transpose(0, 1).contiguous() if batch_first else inputs.contiguous()


def _cudnn_workspace(inputs: Tensor, hidden: int, directions: int) -> Tensor:
    """Assumed: the gates of every step."""
    return inputs.new_empty(inputs.shape[0] * inputs.shape[1] * 4 * hidden * directions)


def _cudnn_lstm(
    inputs: Tensor,
    _weights: list[Tensor],
    _stride: int,
    buffer: Tensor,
    h: Tensor,
    c: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _, hidden, _, _, batch_first, _, training, bidirectional, _, _ = rest
    directions = 2 if bidirectional else 1
    inputs = _time_first(inputs, batch_first)
    steps, batch, _ = inputs.shape
    outputs = inputs.new_empty(steps, batch, directions * hidden)
    last_h, last_c = torch.empty_like(h), torch.empty_like(c)
    # Assumed: four gates, the cell state and the output of every step.
    kept = steps * batch * directions * 6 * hidden * inputs.element_size() if training else 0
    reserve = inputs.new_empty(kept, dtype=torch.uint8)
    workspace = _cudnn_workspace(inputs, hidden, directions)
    del workspace
    return outputs.transpose(0, 1) if batch_first else outputs, last_h, last_c, reserve, buffer


def _cudnn_lstm_backward(
    inputs: Tensor,
    weights: list[Tensor],
    _stride: int,
    buffer: Tensor,
    h: Tensor,
    c: Tensor,
    _outputs: Tensor,
    gradient: Tensor | None,
    _dh: Tensor | None,
    _dc: Tensor | None,
    _mode: int,
    hidden: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    _, _, batch_first, _, _, bidirectional, *_ = rest
    read = _time_first(inputs, batch_first)
    incoming = None if gradient is None else _time_first(gradient, batch_first)
    result = torch.empty_like(read)
    dh, dc = torch.empty_like(h), torch.empty_like(c)
    workspace = _cudnn_workspace(read, hidden, 2 if bidirectional else 1)
    whole = torch.empty_like(buffer)
    del workspace, incoming
    parts, begin = [], 0
    for weight in weights:
        parts.append(whole[begin : begin + weight.numel()].view(weight.shape))
        begin += weight.numel()
    return result.transpose(0, 1) if batch_first else result, dh, dc, parts


REPLACEMENTS: dict[OpOverload[..., Any], Callable[..., Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.is_set_to.default: _is_same,
    aten.nonzero.default: _every_index,
    aten._unique2.default: _distinct_words,
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add_in_place,
    aten.unique_consecutive.default: _consecutive,
    aten.bincount.default: _counts,
    aten.split_with_sizes.default: _parts,
    aten.mkldnn_rnn_layer.default: _onednn_lstm,
    aten._cudnn_rnn.default: _cudnn_lstm,
    aten._cudnn_rnn_backward.default: _cudnn_lstm_backward,
}
"""By operator: called with its arguments, gives its results; what it makes besides is workspace."""


@contextmanager
def standing_in(device: str) -> Iterator[FakeTensorMode]:
    """Within it, tensors of the CPU have shapes and no values, and stand for those of a device, "cpu" or "cuda"."""
    with ExitStack() as stack:
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(rules_only(device))
        if device == "cuda":
            stack.enter_context(CuDNN())
            stack.enter_context(launching_nothing())
        yield mode


@contextmanager
def launching_nothing() -> Iterator[None]:
    """Within it, launches of Triton kernels do nothing: what is around them can be followed without values."""
    if importlib.util.find_spec("triton") is None:
        yield
        return
    kinds: list[Any] = [
        importlib.import_module("triton.runtime.jit").JITFunction,
        importlib.import_module("triton.runtime.interpreter").InterpretedFunction,
    ]
    launches = [kind.run for kind in kinds]
    for kind in kinds:
        kind.run = lambda *_, **__: None
    try:
        yield
    finally:
        for kind, launch in zip(kinds, launches, strict=True):
            kind.run = launch


def _add_to_sum(_total: Tensor, _left: Tensor, _right: Tensor, _dtype: torch.dtype, **options: Any) -> Tensor:
    """A product of 16-bit factors added to a float32 sum, of which fake tensors of torch 2.11 know nothing."""
    out: Tensor = options["out"]
    return out


ON_GPU: dict[OpOverload[..., Any], Callable[..., Any]] = {
    **REPLACEMENTS,
    aten._unique2.default: _all_different,
    **(
        {aten.addmm.dtype_out: _add_to_sum} if hasattr(aten.addmm, "dtype_out") else {}
    ),  # torch 2.8 and newer
}
"""Replacements for a fake GPU, on which the model does not look for distinct words, to avoid waiting."""
