"""Sequences of several lengths: packed ones, and those of CTC losses (PyTorch 2.11, aten/src/ATen/native).

Lengths are values of tensors. Vectors of integers that the program has made before are known, and small tensors that it
computes from them and from constants, such as masks (:func:`following_values`). Other lengths are the longest possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_MOST_KNOWN = 1 << 22
"""Most elements of a tensor whose values are known."""
CELLS = ("rnn_relu", "rnn_tanh", "lstm", "gru")
"""Recurrent functions of PyTorch, in the order of their numbers in `torch._cudnn_rnn` (cudnn/RNN.cpp)."""


def know_values(fake: Tensor, tensor: Tensor) -> None:
    """Lets a fake tensor know the values of the real one that it stands for, if they may be lengths."""
    is_whole = tensor.dtype in (torch.int32, torch.int64) and tensor.device.type == "cpu"
    if is_whole and tensor.dim() == 1 and tensor.numel() <= _MOST_KNOWN:
        with torch._C._DisableTorchDispatch():
            fake.known = tensor.clone()  # type: ignore[attr-defined]


def known_values(fake: Tensor) -> Any:
    """Returns the values of a fake tensor of integers, as `Tensor.tolist` does; None if they are unknown."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        known = _known(fake)
        known = getattr(fake, "constant", None) if known is None else known
        return None if known is None or known.is_floating_point() else known.tolist()


def _known(fake: Tensor) -> Tensor | None:
    known: Tensor | None = getattr(fake, "known", None)
    return None if known is None or (known.numel() and not known.untyped_storage().nbytes()) else known


def following_values(run: Callable[..., Any]) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Returns a function that runs an operator on fake tensors, and computes its result from values that are known."""

    def run_and_follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = run(func, args, kwargs)
        first = args[0] if args else None
        if isinstance(first, FakeTensor) and getattr(first, "known", None) is None:
            return result
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if func is aten.lift_fresh.default and type(first) is Tensor:
                result.known = first.clone() if first.numel() <= _MOST_KNOWN else None
            elif not isinstance(first, Tensor) or _known(first) is not None:
                _follow(func, args, kwargs, result)
        return result

    return run_and_follow


def _follow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    fakes = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
    given = [_known(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    is_small = all(each.numel() <= _MOST_KNOWN for each in fakes)
    has_values = func.namespace == "aten" and "empty" not in func.name()
    if has_values and is_small and all(each is not None for each in given):
        real_args, real_kwargs = tree_map_only(Tensor, _known, (args, kwargs))
        for fake, real in zip(fakes, tree_leaves(func(*real_args, **real_kwargs)), strict=False):
            fake.known = real  # type: ignore[attr-defined]
    elif func._schema.is_mutable and torch.Tag.inplace_view not in func.tags:
        if given and given[0] is not None:
            given[0].untyped_storage().resize_(0)  # forgets the values, of all views
    elif func is aten.index.Tensor and result.shape == args[0].shape:
        result.known = _known(args[0])  # in another order, as when packed sequences are put back into theirs


def lengths_of(lengths: Tensor, longest: int) -> Any:
    """Returns lengths, of sequences or of the steps of packed ones; all the longest one if they are unknown."""
    values = known_values(lengths)
    return [longest] * len(lengths) if values is None else values


def _pack(inputs: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Copies the steps, as many at once as have the same sequences (PackedSequence.cpp, _pack_padded_sequence)."""
    inputs = inputs.transpose(0, 1) if batch_first else inputs
    values = lengths_of(lengths, len(inputs))
    sizes = [sum(length > step for length in values) for step in range(max(values))]
    steps, begin = [], 0
    for size, equal in groupby(sizes):
        end = begin + len(list(equal))
        steps.append(inputs[begin:end, :size].contiguous().view(-1, *inputs.shape[2:]))
        begin = end
    return torch.cat(steps), torch.tensor(sizes)


def _pack_backward(gradient: Tensor, shape: Sequence[int], *_: Any) -> Tensor:
    return gradient.new_zeros(shape)


def _unpack(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding: float, steps: int
) -> tuple[Tensor, Tensor]:
    """Copies the steps, as many at once as have the same sequences (PackedSequence.cpp, _pad_packed_sequence)."""
    sizes = lengths_of(batch_sizes, len(data) // len(batch_sizes))
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
    sizes = lengths_of(batch_sizes, len(data) // len(batch_sizes))
    with torch._C._DisableTorchDispatch():
        real = torch.tensor(sizes)
    return getattr(aten, name).data._op_dk(_COMPOSITE, data, real, *settings)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, _lengths_of_inputs: Tensor, target_lengths: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    """Keeps two values for each symbol of the longest target and step (LossCTC.cpp)."""
    steps, batch = log_probs.shape[:2]
    longest = max(lengths_of(target_lengths, -(-targets.numel() // batch)))
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


def _ctc_loss_backward(_gradient: Tensor, log_probs: Tensor, *others: Any) -> Tensor:
    betas = torch.empty_like(others[4])
    gradient = torch.empty_like(log_probs)
    del betas
    return gradient


def _with_tensors(log_probs: Tensor, targets: Tensor, *settings: Any) -> Any:
    """Computes a CTC loss whose lengths are lists, as if they were tensors."""
    lengths = [torch.tensor(each, dtype=targets.dtype) for each in settings[:2]]
    return aten.ctc_loss.Tensor(log_probs, targets, *lengths, *settings[2:])


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten._pack_padded_sequence.default: _pack,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
}
"""Replacements by operator."""

STAND_INS: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence_backward": _pack_backward,
    "_pad_packed_sequence": _unpack,
    "ctc_loss.IntList": _with_tensors,
    **{f"{name}.data": partial(_packed_rnn, name) for name in CELLS},
}
"""Stand-ins for functions that read lengths, by the name of the function's overload."""
