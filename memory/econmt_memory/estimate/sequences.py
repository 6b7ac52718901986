"""Sequences of several lengths: packed ones, and those of CTC losses (PyTorch 2.11, aten/src/ATen/native).

Lengths are values of tensors. Those that the program has made before are known (:func:`known_values`); others are
taken to be the longest possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

_MOST_KNOWN = 4096
"""Most elements of a tensor whose values are known."""
_FOLLOWED = frozenset(
    getattr(aten, name)
    for name in (
        *(
            "_to_copy",
            "clone",
            "detach",
            "select",
            "slice",
            "unbind",
            "index",
            "index_select",
            "flip",
            "sort",
            "cumsum",
        ),
        *(
            "max",
            "min",
            "sum",
            "add",
            "sub",
            "mul",
            "div",
            "floor_divide",
            "remainder",
            "floor",
            "ceil",
            "clamp",
        ),
    )
)
"""Operators by which programs compute with lengths."""
CELLS = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""Recurrent functions of PyTorch, in the order of their numbers in `torch._cudnn_rnn` (cudnn/RNN.cpp)."""


def know_values(fake: Tensor, tensor: Tensor) -> None:
    """Lets a fake tensor know the values of the real one that it stands for, if they may be lengths."""
    is_list = tensor.dim() == 1 and tensor.numel() <= _MOST_KNOWN
    if is_list and tensor.dtype in (torch.int32, torch.int64) and tensor.device.type == "cpu":
        with torch._C._DisableTorchDispatch():
            fake.known = tensor.clone()  # type: ignore[attr-defined]


def known_values(fake: Tensor) -> Any:
    """Returns the values of a fake tensor of integers, as `Tensor.tolist` does; None if they are unknown."""
    known = getattr(fake, "known", None)
    if known is None or known.is_floating_point():
        return None
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return known.tolist()


def following_values(run: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Returns a function that runs an operator on fake tensors, and computes its result from values that are known."""

    def run_and_follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(func, args, kwargs)
        first = args[0] if args else None
        if func is aten.lift_fresh.default and type(first) is Tensor:
            know_values(result, first)
        elif getattr(first, "known", None) is not None:
            _follow(func, args, kwargs, result)
        return result

    return run_and_follow


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    if func._schema.is_mutable:
        args[0].known = None
    elif func is aten.index.Tensor and result.shape == args[0].shape:
        result.known = args[0].known  # in another order, as when packed sequences are put back into theirs
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if func.overloadpacket not in _FOLLOWED or any(getattr(each, "known", None) is None for each in given):
        return
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        real_args, real_kwargs = tree_map_only(Tensor, lambda each: each.known, (args, kwargs))
        values = func(*real_args, **real_kwargs)
    for fake, real in zip(tree_leaves(result), tree_leaves(values), strict=True):
        fake.known = real


def _lengths(lengths: Tensor | Sequence[int], longest: int) -> list[int]:
    values = known_values(lengths) if isinstance(lengths, Tensor) else list(lengths)
    return [longest] * len(lengths) if values is None else values


def batch_sizes_of(batch_sizes: Tensor, rows: int) -> list[int]:
    """Returns the rows of each step of a packed sequence; equal ones if they are unknown."""
    return _lengths(batch_sizes, rows // len(batch_sizes))


def _pack(inputs: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Copies the steps, as many at once as have the same sequences (PackedSequence.cpp, _pack_padded_sequence)."""
    inputs = inputs.transpose(0, 1) if batch_first else inputs
    values = _lengths(lengths, len(inputs))
    sizes = [sum(length > step for length in values) for step in range(max(values))]
    steps, begin = [], 0
    for size, equal in groupby(sizes):
        end = begin + len(list(equal))
        steps.append(inputs[begin:end, :size].contiguous().view(-1, *inputs.shape[2:]))
        begin = end
    packed = torch.cat(steps)
    with torch._C._DisableTorchDispatch():
        real = torch.tensor(sizes)
    batch_sizes = lengths.new_empty(len(sizes), dtype=torch.int64)
    know_values(batch_sizes, real)
    return packed, batch_sizes


def _pack_backward(
    gradient: Tensor, shape: Sequence[int], _batch_sizes: Tensor, _batch_first: bool
) -> Tensor:
    return gradient.new_zeros(shape)


def _unpack(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Copies the steps, as many at once as have the same sequences (PackedSequence.cpp, _pad_packed_sequence)."""
    sizes = batch_sizes_of(batch_sizes, len(data))
    padded = data.new_full((max(steps, len(sizes)), sizes[0], *data.shape[1:]), padding)
    begin = row = 0
    for size, equal in groupby(sizes):
        count = len(list(equal))
        part = data[row : row + count * size]
        padded[begin : begin + count, :size].copy_(part.view(count, size, *data.shape[1:]))
        begin, row = begin + count, row + count * size
    lengths = torch.tensor([sum(size > index for size in sizes) for index in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _packed_rnn(name: str, data: Tensor, batch_sizes: Tensor, *settings: Any) -> Any:
    """Runs a recurrent network step by step, which reads the numbers of rows (RNN.cpp, PackedLayer)."""
    sizes = batch_sizes_of(batch_sizes, len(data))
    with torch._C._DisableTorchDispatch():
        real = torch.tensor(sizes)
    function = getattr(aten, name).data
    return function._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, data, real, *settings)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, _lengths_of_inputs: Any, target_lengths: Any, *_: Any
) -> tuple[Tensor, Tensor]:
    """Keeps two values for each symbol of the longest target and step (LossCTC.cpp)."""
    steps, batch = log_probs.shape[:2]
    longest = max(
        _lengths(target_lengths, targets.shape[-1] if targets.dim() > 1 else -(-len(targets) // batch))
    )
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _ctc_loss_backward(_gradient: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    betas = torch.empty_like(others[4])
    gradient = torch.empty_like(log_probs)
    del betas
    return gradient


def _cudnn_ctc_loss(log_probs: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Computes the gradient at once (cudnn/LossCTC.cpp); the workspace of cuDNN is taken to be two such tensors."""
    gradient = torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    workspace = [torch.empty_like(gradient) for _ in range(2)]
    del workspace
    return log_probs.new_empty(log_probs.shape[1]), gradient


def _ctc_loss_of(
    on_gpu: bool,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Computes a CTC loss (LossCTC.cpp, ctc_loss_impl); on a GPU in cuDNN where it can (_use_cudnn_ctc_loss)."""
    lengths = [each for each in (input_lengths, target_lengths) if isinstance(each, Tensor)]
    in_cudnn = (
        on_gpu
        and torch.backends.cudnn.enabled
        and blank == 0
        and log_probs.dim() == 3
        and targets.dim() == 1
        and log_probs.dtype is torch.float32
        and all(each.dtype is torch.int32 for each in (targets, *lengths))
    )
    if in_cudnn:
        most, of_targets = _lengths(input_lengths, len(log_probs)), _lengths(target_lengths, 0)
        in_cudnn = all(length <= min(255, limit) for length, limit in zip(of_targets, most, strict=True))
        in_cudnn = in_cudnn and (bool(lengths) or set(most) == {len(log_probs)})
    if log_probs.dim() == 2:
        log_probs = log_probs.unsqueeze(1)
    settings = input_lengths, target_lengths, blank
    if in_cudnn:
        losses = aten._cudnn_ctc_loss(log_probs, targets, *settings, True, zero_infinity)[0]
    else:
        losses = aten._ctc_loss(log_probs, targets.long(), *settings, zero_infinity)[0]
        if zero_infinity:
            losses = torch.where(losses == torch.inf, losses.new_zeros(()), losses)
    if reduction == 1:
        counts = target_lengths if lengths else torch.tensor(target_lengths)
        return (losses / counts.to(losses.dtype).clamp_min(1)).mean()  # type: ignore[no-any-return]
    return losses.sum() if reduction else losses  # type: ignore[no-any-return]


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten._pack_padded_sequence.default: _pack,
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._cudnn_ctc_loss.default: _cudnn_ctc_loss,
    aten._cudnn_ctc_loss.Tensor: _cudnn_ctc_loss,
}
"""Replacements by operator."""

STAND_INS: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence_backward": _pack_backward,
    "_pad_packed_sequence": _unpack,
    **{f"{name}.data": partial(_packed_rnn, name) for name in CELLS},
    **{f"ctc_loss.{overload}": partial(_ctc_loss_of, False) for overload in ("IntList", "Tensor")},
}
"""Stand-ins for functions that read lengths, by the name of the function's overload."""

ctc_loss_on_gpu = partial(_ctc_loss_of, True)
