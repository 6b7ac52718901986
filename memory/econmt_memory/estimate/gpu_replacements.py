"""Results of PyTorch's operators on a GPU, where they differ from what fake tensors show.

Each function allocates an operator's results, and the workspaces that the operator frees. It names the file of
PyTorch 2.11, below aten/src/ATen/native, that allocates the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from econmt_memory.estimate.allocator import round_up

aten = torch.ops.aten


def _by_position(query: Tensor, width: int) -> Tensor:
    """Creates an output (B, H, T, D) that is contiguous as (B, T, H, D)."""
    rows, heads, steps = query.shape[:3]
    return query.new_empty(rows, steps, heads, width).transpose(1, 2)


def _efficient_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Computes gradients contiguous as (B, T, H, D) (transformers/cuda/attention_backward.cu)."""
    gradient = gradient.transpose(1, 2).contiguous()
    results = [_by_position(each, each.shape[-1]) for each in (query, key, value)]
    rows, heads, steps = query.shape[:3]
    if query.dtype is torch.float32:
        products = gradient * others[1].transpose(1, 2)  # with the outputs
        sums = products.sum(-1)
        del products
        delta = sums.transpose(1, 2).contiguous()
    else:
        delta = query.new_empty(rows, heads, steps, dtype=torch.float32)
    del delta
    return results[0], results[1], results[2], None


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
    """Keeps the logarithm of each row's sum (transformers/cuda/flash_attn/flash_api.cpp, mha_fwd)."""
    outputs = _by_position(query, value.shape[-1])
    sums = query.new_empty(query.shape[:3], dtype=torch.float32)
    seeds = [query.new_empty(1, dtype=torch.int64) for _ in range(2)]
    return outputs, sums, None, None, query.shape[2], key.shape[2], *seeds, query.new_empty(0)


def _flash_attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, outputs: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Sums the gradient of queries in float32 (transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)."""
    gradient, outputs = gradient.transpose(1, 2).contiguous(), outputs.transpose(1, 2).contiguous()
    results = [_by_position(each, each.shape[-1]) for each in (query, key, value)]
    rows, heads, steps, size = query.shape
    steps, size = -(-steps // 128) * 128, -(-size // 32) * 32
    sums = query.new_empty(rows, heads, steps, dtype=torch.float32)
    accumulated = query.new_empty(rows, steps, heads, size, dtype=torch.float32)
    del sums, accumulated
    return results[0], results[1], results[2]


def _time_first(inputs: Tensor, batch_first: bool) -> Tensor:
    return inputs.transpose(0, 1).contiguous() if batch_first else inputs.contiguous()


class _Recurrent:
    """Sizes of a recurrent network in cuDNN (cudnn/RNN.cpp)."""

    def __init__(self, inputs: Tensor, settings: Sequence[Any]) -> None:
        mode, hidden, projected, layers, batch_first, _, self.trains, bidirectional, sizes, _ = settings
        self.batch_first = batch_first and not sizes
        if sizes:
            self.steps, self.batch = len(sizes), sizes[0]
        else:
            self.steps, self.batch = inputs.shape[:2][:: -1 if batch_first else 1]
        self.positions = self.steps * self.batch  # padding counts, as cuDNN has it
        self.gates = (1, 1, 4, 3)[mode]
        self.is_gru = mode == 3
        self.hidden, self.layers, self.directions = int(hidden), int(layers), 2 if bidirectional else 1
        self.outputs = projected or hidden
        self.inputs = inputs.shape[-1]

    def reserve(self, width: int) -> int:
        """Returns the bytes that cuDNN keeps for the backward pass, of values of ``width`` bytes.

        They are of each step the gates and the cell state (of an LSTM 5 values, of a GRU 6), and of all layers but
        the last the outputs; as measured on an H100 with cuDNN 9.19, in 95 shapes.
        """
        kept = {1: 1, 3: 6, 4: 5}[self.gates] * self.layers + self.layers - 1
        return round_up(self.positions * self.directions * kept * self.hidden * width, 64) + 256

    def workspace(self, width: int) -> int:
        """Returns the bytes that cuDNN needs during a pass, as measured on an H100 with cuDNN 9.19.

        They are for each layer and direction 8 MiB, a copy of the weights and two states per gate, and for each step
        values that depend on the kernel: float32 layers of up to 128 units have larger ones.
        """
        state = self.batch * self.hidden * width
        total = 3 * state + 512
        for layer in range(self.layers):
            size = self.directions * self.outputs if layer else self.inputs
            weights = self.gates * self.hidden * (size + self.hidden) * width
            total += self.directions * ((8 << 20) + 2 * self.gates * state + weights)
        small = width == 4 and self.hidden <= 128
        if self.is_gru:
            size = self.inputs if self.layers == 1 else max(self.inputs, self.directions * self.outputs)
            values = (18 if small else 4) * self.hidden + 2 * size
        else:
            values = (21 if small else 5) * self.hidden + self.inputs
        values += (self.directions - 1) * (6 if self.is_gru else 9) * self.hidden
        return int(total + self.positions * values * width)


def _cudnn_rnn(inputs: Tensor, _weights: list[Tensor], _: int, *others: Any) -> tuple[Tensor, ...]:
    buffer, h, c, *settings = others
    sizes, width = _Recurrent(inputs, settings), inputs.element_size()
    inputs = _time_first(inputs, sizes.batch_first)
    outputs = inputs.new_empty(*inputs.shape[:-1], sizes.directions * sizes.outputs)
    last_h = torch.empty_like(h)
    last_c = h.new_empty(0) if c is None else torch.empty_like(c)
    workspace = inputs.new_empty(sizes.workspace(width), dtype=torch.uint8)
    reserve = inputs.new_empty(sizes.reserve(width) if sizes.trains else 0, dtype=torch.uint8)
    del workspace
    if sizes.batch_first:
        outputs = outputs.transpose(0, 1)
    return outputs, last_h, last_c, reserve, buffer


def _cudnn_rnn_backward(
    inputs: Tensor, weights: list[Tensor], _: int, _buffer: Tensor, h: Tensor, c: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
    outputs, gradient, dh, dc, *settings = others
    sizes, width = _Recurrent(inputs, settings[:-2]), inputs.element_size()
    gradient = torch.zeros_like(outputs) if gradient is None else gradient
    dh = torch.zeros_like(h) if dh is None else dh
    dc = torch.zeros_like(c) if dc is None and c is not None else dc
    read, incoming = _time_first(inputs, sizes.batch_first), _time_first(gradient, sizes.batch_first)
    result, before_h = torch.empty_like(read), torch.empty_like(h)
    before_c = None if c is None else torch.empty_like(c)
    workspace = inputs.new_empty(sizes.workspace(width), dtype=torch.uint8)
    del workspace, read, incoming
    parts: list[Tensor] = []
    if settings[-1][3]:
        read = _time_first(inputs, sizes.batch_first)
        flat = inputs.new_zeros(sum(weight.numel() for weight in weights))
        workspace = inputs.new_empty(sizes.workspace(width), dtype=torch.uint8)
        del workspace, read
        for weight in weights:
            begin = sum(part.numel() for part in parts)
            parts.append(flat[begin : begin + weight.numel()].view(weight.shape))
    return result.transpose(0, 1) if sizes.batch_first else result, before_h, before_c, parts


def _gru_cell(_gates: Tensor, _more: Tensor, h: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Keeps five values of each unit (cuda/RNN.cu)."""
    return torch.empty_like(h), h.new_empty(*h.shape[:-1], 5 * h.shape[-1])


def _gru_cell_backward(gradient: Tensor, workspace: Tensor, biases: bool) -> tuple[Tensor | None, ...]:
    size = workspace.shape[-1] // 5
    gates = [workspace.new_empty(*workspace.shape[:-1], 3 * size) for _ in range(2)]
    before = torch.empty_like(gradient)
    return *gates, before, *((each.sum(0) for each in gates) if biases else (None, None))


_SORTED_FROM = 3072
"""Most indices whose gradients are added up without sorting them (cuda/Embedding.cu)."""
_ROWS_OF_THREAD = 10
"""Gradients that a thread adds up (cuda/EmbeddingBackwardKernel.cu)."""


def _embedding_backward(gradient: Tensor, indices: Tensor, rows: int, *_: Any) -> Tensor:
    """Adds up gradients, of many indices by sorting them (cuda/EmbeddingBackwardKernel.cu)."""
    gradient, indices = gradient.contiguous(), indices.contiguous()
    count, width = indices.numel(), gradient.shape[-1]
    if count <= _SORTED_FROM:
        return gradient.new_empty(rows, width)
    kept = [torch.empty_like(indices) for _ in range(2)]
    scratch = [torch.empty_like(indices) for _ in range(3)]  # their numbers, and two of the radix sort
    del scratch
    result = gradient.new_empty(rows, width)
    segments = min(count, rows)
    partial = count // _ROWS_OF_THREAD + segments
    kept += [indices.new_empty(size) for size in (count, segments, segments, partial)]
    sums = gradient.new_empty(partial, width, dtype=torch.promote_types(gradient.dtype, torch.float32))
    del kept, sums
    return result


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten._cudnn_rnn.default: _cudnn_rnn,
    aten._cudnn_rnn_backward.default: _cudnn_rnn_backward,
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
}
"""Replacements by operator."""
