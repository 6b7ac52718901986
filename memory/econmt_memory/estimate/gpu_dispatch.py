"""Functions for which PyTorch calls other operators on a GPU than on a CPU.

Within :func:`as_on_gpu`, fake tensors of the CPU take the path that PyTorch takes on a GPU of compute capability 9.0
with cuDNN 9.15 or newer. The functions are composite: the operators that they call are differentiable, so feature maps
and backward passes follow. Sources are files of PyTorch 2.11 below aten/src/ATen/native, unless named otherwise.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad
from torch.utils import _foreach_utils

from econmt_memory.estimate.sequences import CELLS, STAND_INS, lengths_of
from econmt_memory.measure.patches import patched

aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


def dropout(inputs: Tensor, p: float, train: bool) -> Tensor:
    """Computes dropout with a mask of one byte per element (Dropout.cpp, is_fused_kernel_acceptable)."""
    if train and 0.0 < p < 1.0 and inputs.numel():
        return aten.native_dropout(inputs, p, True)[0]  # type: ignore[no-any-return]
    return _composite(aten.dropout.default, inputs, p, train)  # type: ignore[no-any-return]


def batch_norm(
    inputs: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, *settings: Any
) -> Tensor:
    """Normalizes in cuDNN where it can (Normalization.cpp, _select_batch_norm_backend)."""
    variance, training, momentum, eps, _ = settings
    types = {inputs.dtype} | ({weight.dtype} if weight is not None else set())
    in_cudnn = (
        torch.backends.cudnn.enabled
        and weight is not None
        and bias is not None
        and torch.bfloat16 not in types
        and (inputs.dtype is not torch.float16 or weight.dtype is torch.float32)
        and (mean is None) == (variance is None)
        and (mean is not None or training)
        and inputs.dim() >= 3
        and inputs.shape[0] <= (880801 if training else 65535)
        and eps >= 1e-5
        and 0 < inputs.numel() < 2**31 - 1
    )
    if not in_cudnn:
        return _composite(aten.batch_norm.default, inputs, weight, bias, mean, *settings)  # type: ignore[no-any-return]
    inputs = inputs.contiguous(memory_format=suggest_memory_format(inputs))
    return aten.cudnn_batch_norm(inputs, weight, bias, mean, variance, training, momentum, eps)[0]  # type: ignore[no-any-return]


def attention_backend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, grouped: bool
) -> str:
    """Returns "cudnn", "flash", "efficient" or "math" (transformers/cuda/sdp_utils.cpp, select_sdp_backend)."""
    flags: Any = torch.backends.cuda
    sizes = query.shape[-1], value.shape[-1]
    same_heads = query.dim() == 4 and query.shape[1] == key.shape[1] == value.shape[1]
    dense = (
        query.dim() == key.dim() == value.dim() == 4
        and min(query.numel(), key.numel(), value.numel()) > 0
        and query.shape[0] == key.shape[0] == value.shape[0]
        and all(tensor.stride(-1) == 1 for tensor in (query, key, value, query if mask is None else mask))
        and (same_heads or grouped)
    )
    in_half = dense and query.dtype in _HALF
    if (
        in_half
        and flags.cudnn_sdp_enabled()
        and not torch.are_deterministic_algorithms_enabled()
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
        and p * 16 == int(p * 16)
        and max(sizes) <= 128
        and all(size % 8 == 0 for size in sizes)
        and key.shape[2] > 1
        and (p == 0.0 or query.shape[2] > 1)
    ):
        return "cudnn"
    if (
        in_half
        and flags.flash_sdp_enabled()
        and mask is None
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and (not causal or query.shape[2] == key.shape[2])
    ):
        return "flash"
    aligned = 8 if query.dtype in _HALF else 4
    if (
        dense
        and same_heads
        and flags.mem_efficient_sdp_enabled()
        and (query.dtype in _HALF or query.dtype is torch.float32)
        and query.shape[-1] == key.shape[-1]
        and all(size % aligned == 0 for size in sizes)
    ):
        return "efficient"
    return "math"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Computes scaled dot product attention by the kernel that a GPU takes (transformers/attention.cpp)."""
    backend = attention_backend(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    width = value.shape[-1]
    trains = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
    if backend == "math":
        results = aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )
    elif backend == "flash":
        scale = width**-0.5 if scale is None else scale
        if width % 8:
            query, key, value = (pad(each, (0, -width % 8)) for each in (query, key, value))
        results = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    elif backend == "cudnn":
        results = aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, trains, dropout_p, is_causal, False, scale=scale
        )
    else:
        if attn_mask is not None:
            if attn_mask.stride(-1) != 1 or any(step % 8 for step in attn_mask.stride()[:-1]):
                steps = attn_mask.shape[-1]
                attn_mask = pad(attn_mask, (0, 8 - steps % 8))[..., :steps]
            attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
        results = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, trains, dropout_p, is_causal, scale=scale
        )
    outputs: Tensor = results[0]
    return outputs if outputs.shape[-1] == width else outputs[..., :width]


def _cudnn_rnn(
    name: str,
    inputs: Tensor,
    hx: Sequence[Tensor] | Tensor,
    weights: Sequence[Tensor],
    settings: tuple[bool, int, float, bool, bool],
    *,
    batch_first: bool = False,
    batch_sizes: Sequence[int] = (),
) -> tuple[Tensor, ...]:
    """Runs all layers of a recurrent network in one call (cudnn/RNN.cpp, _cudnn_impl).

    ``settings`` are has_biases, num_layers, dropout, train and bidirectional of torch.lstm. The weights lie in one
    buffer, as `torch.nn.RNNBase.flatten_parameters` puts them. Under autocast they are copied
    (native/RNN.cpp, _cudnn_rnn_cast_reflatten).
    """
    biases, layers, p, train, bidirectional = settings
    states = [hx] if isinstance(hx, Tensor) else list(hx)
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        inputs, states = inputs.to(dtype), [state.to(dtype) for state in states]
        weights = [weight.to(dtype) for weight in weights]
    h, c = states[0], states[1] if len(states) > 1 else None
    hidden = h.shape[2] if c is None else c.shape[2]
    projected = h.shape[2] if h.shape[2] != hidden else 0
    count = (4 if biases else 2) + (1 if projected else 0)
    with torch.autocast("cpu", enabled=False):
        buffer, sizes = weights[0].detach(), (CELLS.index(name), hidden, projected, layers)
        others = batch_first, p, train, bidirectional, list(batch_sizes), None
        results = aten._cudnn_rnn(inputs, list(weights), count, buffer, h, c, *sizes, *others)
    return tuple(results[: 2 if c is None else 3])


def padded_rnn(name: str, inputs: Tensor, hx: Any, params: Any, *settings: Any) -> Any:
    """Runs a recurrent network over padded sequences."""
    return _cudnn_rnn(name, inputs, hx, params, settings[:-1], batch_first=settings[-1])


def packed_rnn(name: str, data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, *settings: Any) -> Any:
    """Runs a recurrent network over packed sequences."""
    sizes = lengths_of(batch_sizes, len(data) // len(batch_sizes))
    return _cudnn_rnn(name, data, hx, params, settings, batch_sizes=sizes)


def lstm_cell(
    inputs: Tensor, hx: Sequence[Tensor], ih: Tensor, hh: Tensor, bias: Tensor | None, more: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Computes the gates of a step in one kernel (RNN.cpp, LSTMCell)."""
    h, c, _ = aten._thnn_fused_lstm_cell(inputs @ ih.t(), hx[0] @ hh.t(), hx[1], bias, more)
    return h, c


def gru_cell(
    inputs: Tensor, hx: Tensor, ih: Tensor, hh: Tensor, bias: Tensor | None, more: Tensor | None
) -> Tensor:
    """Computes the gates of a step in one kernel (RNN.cpp, GRUCell)."""
    return aten._thnn_fused_gru_cell(inputs @ ih.t(), hx @ hh.t(), hx, bias, more)[0]  # type: ignore[no-any-return]


_STAND_INS: dict[str, Callable[..., Any]] = {
    "dropout": dropout,
    "batch_norm": batch_norm,
    "scaled_dot_product_attention": attention,
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    **STAND_INS,
    **{f"{name}.input": functools.partial(padded_rnn, name) for name in CELLS},
    **{f"{name}.data": functools.partial(packed_rnn, name) for name in CELLS},
}
"""Stand-ins by the name of the function's overload."""


def _composite(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def _choose(function: Any, stand_in: Callable[..., Any], first: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Runs a stand-in for fake tensors; real ones, as of other threads, run PyTorch's own function."""
    if isinstance(first, FakeTensor):
        return stand_in(first, *args, **kwargs)
    return _composite(function, first, *args, **kwargs)


@contextmanager
def standing_in(stand_ins: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Lets stand-ins run for fake tensors within the context, by the name of the function's overload."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name, stand_in in stand_ins.items():
        packet, _, overload = name.partition(".")
        function = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, functools.partial(_choose, function, stand_in), "AutogradCPU")
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Lets fake tensors of the CPU take the path of a GPU within the context; optimizers update all tensors at once."""
    devices = _foreach_utils._get_foreach_kernels_supported_devices
    kinds: Any = [*_foreach_utils._foreach_supported_types, FakeTensor]
    with standing_in(_STAND_INS), ExitStack() as stack:
        for module in (importlib.import_module("torch.optim.optimizer"), _foreach_utils):
            on_cpu = {"_get_foreach_kernels_supported_devices": lambda: [*devices(), "cpu"]}
            stack.enter_context(patched(module, **on_cpu, _foreach_supported_types=kinds))
        yield
