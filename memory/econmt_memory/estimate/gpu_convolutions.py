"""Workspaces of cuDNN's convolutions on a GPU, as measured on an H100 with cuDNN 9.19 (94 shapes).

cuDNN's heuristics choose a kernel, and with it a workspace, on the GPU; without one its choice is assumed. Kernels read
and write the channels last: unless tensors are stored like that, a workspace holds such copies of inputs, outputs and
weights, with channels in multiples of 16 bytes. The gradient of weights adds sums that are divided among processors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from econmt_memory.estimate.allocator import round_up

aten = torch.ops.aten

LIMIT = "CUDNN_CONV_WSCAP_DBG"
"""Environment variable with the most MiB of a convolution's workspace, as cuDNN reads it."""

_PARTS = ((200_000, 14), (700_000, 7), (3_000_000, 3))
"""Partial sums of a float32 gradient by the most bytes of the weights; larger ones have one of 6 MiB."""
_FEW = 4
"""Channels of inputs or outputs for which other kernels are chosen."""


def _limited(size: int) -> int:
    limit = os.environ.get(LIMIT, "")
    return min(size, int(limit) << 20) if limit.isdigit() else size


def _copy(tensor: Tensor, channels: int = 1) -> int:
    """Returns the bytes of a copy with the channels last; 0 if they are last already."""
    if suggest_memory_format(tensor) is torch.channels_last:
        return 0
    count, width = tensor.shape[channels], tensor.element_size()
    return tensor.numel() // count * round_up(count, 16 // width) * width


def _copies(inputs: Tensor, outputs: Tensor, weight: Tensor, groups: int) -> int:
    """Returns the bytes of copies of all tensors of a convolution."""
    outer, inner = weight.shape[0], weight.shape[1]
    if (groups > 1 and inner == 1) or not weight.numel() or not _copy(inputs):
        return 0  # depthwise, or the channels are last
    step = 16 // weight.element_size()
    window = weight[0, 0].numel()
    kernel = round_up(outer, step) * round_up(inner, step) * window * weight.element_size()
    return _copy(inputs) + _copy(outputs) + (0 if window == 1 or groups > 1 else kernel)


def _is_wide(inputs: Tensor, weight: Tensor, stride: Any) -> bool:
    """Returns True for products of each position of a large image, which need no copies."""
    return weight[0, 0].numel() == 1 and set(stride) == {1} and inputs[0, 0].numel() >= 56 * 56


def convolution(inputs: Tensor, weight: Tensor, _bias: Any, stride: Any, *settings: Any) -> int:
    """Returns the bytes that a convolution needs besides its result."""
    padding, dilation, transposed, extra, groups = settings
    if (inputs.shape[1] <= _FEW and inputs.numel() < 1 << 20) or _is_wide(inputs, weight, stride):
        return 0
    with torch._C._DisableTorchDispatch():
        plain = [
            torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
            for each in (inputs, weight)
        ]
        outputs = torch.ops.aten.convolution(
            plain[0], plain[1], None, stride, padding, dilation, transposed, extra, groups
        )
    return _limited(_copies(inputs, outputs, weight, groups))


def convolution_backward(
    gradient: Tensor, inputs: Tensor, weight: Tensor, _bias: Any, stride: Any, *settings: Any
) -> int:
    """Returns the bytes that the gradients of a convolution need besides the results."""
    groups, needed = settings[4], settings[5]
    if _is_wide(inputs, weight, stride):
        return 1 << 20
    copies = _copies(inputs, gradient, weight, groups)
    if not needed[1] or not copies or weight.element_size() == 2:
        return _limited(copies)
    window = weight[0, 0].numel()
    if gradient.shape[1] <= _FEW:  # the only shape measured has 2.28 times its inputs
        return _limited(round(2.28 * _copy(inputs)))
    if inputs.shape[1] <= _FEW:
        return _limited(copies)
    if window == 1:
        return _limited(copies + (2 * weight.nbytes if weight.nbytes < 1 << 20 else 0))
    parts = next((count for most, count in _PARTS if weight.nbytes <= most), 0)
    large = 6 << 20 if weight.nbytes > 6_000_000 else 0
    return _limited(copies + parts * weight.nbytes + large)


CONVOLUTIONS: dict[Any, Callable[..., int]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
"""Bytes by operator."""
