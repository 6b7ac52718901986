"""An LSTM layer on a GPU under autograd without torch.library, whose calls take the host longer than small layers take.

Eager calls on ordinary tensors go through one `torch.autograd.Function` a layer; whatever looks into a call, such as
torch.compile, fake tensors or function transforms, goes through the operators.

Shapes: D directions, B batch, T steps, I input size, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from econmt_ops.core.precision import MatmulTF32
from econmt_ops.dispatch.rule import is_transformed
from econmt_ops.lstm.direction import LSTMResults
from econmt_ops.lstm.persistent_layer import LayerPlan
from econmt_ops.lstm.persistent_operands import LayerOperands, LayerTensors

_PLAIN = (Tensor, nn.Parameter)


def is_plain(tensors: Iterable[object]) -> bool:
    """Returns True if an operation on these tensors runs eagerly and nothing else sees it."""
    return (
        all(type(tensor) in _PLAIN for tensor in tensors)
        and not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and not is_transformed()
        and torch._C._get_tracing_state() is None
    )


class _PlainProducts(MatmulTF32):
    """Context without autocast in which float32 products on a GPU have the precision of a layer's recurrence.

    `torch.autocast` takes ten times as long.
    """

    def __init__(self, plan: LayerPlan, device_type: str) -> None:
        super().__init__(plan.products == torch.float16)
        self._device_type, self._autocast = device_type, torch.is_autocast_enabled(device_type)
        self._has_float32 = plan.dtype == torch.float32 and device_type == "cuda"

    def __enter__(self) -> None:
        if self._autocast:
            torch.set_autocast_enabled(self._device_type, False)
        if self._has_float32:
            super().__enter__()

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036  as that of the base class
        super().__exit__(*error)
        if self._autocast:
            torch.set_autocast_enabled(self._device_type, True)


def _forward(plan: LayerPlan, tensors: LayerTensors) -> tuple[LSTMResults, LayerOperands, Tensor]:
    """Returns the results, the operands, and the outputs (B, T, D H)."""
    first = tensors.weights[0]
    width = plan.directions * plan.hidden
    # Time comes first in memory; the tensor that is returned is no view, so that it may be changed in place.
    outputs = torch.empty_strided(
        (plan.batch, plan.steps, width), (width, plan.batch * width, 1), dtype=plan.dtype, device=first.device
    )
    with _PlainProducts(plan, first.device.type):
        results, operands = plan.forward(tensors, outputs)
    return results, operands, outputs


class _LayerFunction(torch.autograd.Function):
    """One layer in one or both directions: outputs (B, T, D H), last h and last c (D, B, H)."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: LayerPlan,
        lengths: Tensor | None,
        resets: Tensor | None,
        inputs: Tensor,
        h: Tensor | None,
        c: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Runs a layer from its first h and c; None: zeros."""
        state = None if h is None or c is None else (h, c)
        tensors = LayerTensors(inputs.transpose(0, 1), weights, state, lengths, None, resets)
        results, operands, outputs = _forward(plan, tensors)
        ctx.plan = plan
        ctx.operands = plan.operands_for_backward(operands) if plan.keeps_operands else None
        ctx.set_materialize_grads(False)
        read = operands.rows if plan.keeps_rows else inputs
        ctx.save_for_backward(lengths, resets, read, outputs, results.cells, results.gates, h, c, *weights)
        return outputs, results.last_h, results.last_c

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return _backward(ctx, *incoming)
        with torch.no_grad():
            gradients = _backward(ctx, *incoming)
        # A second derivative is an error, and not a wrong result.
        told = b"the layer has no second derivative; name implementation='reference', which has"
        error: Any = torch._C._functions.DelayedError(told, len(gradients))
        leaves = [None if part is None else part.detach().requires_grad_() for part in gradients]
        guarded: tuple[Any, ...] = error(*leaves)
        return guarded


def _backward(
    ctx: Any, doutputs: Tensor | None, last_h: Tensor | None, last_c: Tensor | None
) -> tuple[Any, ...]:
    """Returns the gradients of all arguments of `_LayerFunction.forward`."""
    plan: LayerPlan = ctx.plan
    lengths, resets, read, outputs, cells, sums, h, c, *weights = ctx.saved_tensors
    if doutputs is None and last_h is None and last_c is None:
        return (None,) * len(ctx.needs_input_grad)
    needs = ctx.needs_input_grad[3], *ctx.needs_input_grad[6:]
    inputs, rows = (None, read) if plan.keeps_rows else (read.transpose(0, 1), None)
    tensors = LayerTensors(inputs, weights, None if h is None else (h, c), lengths, None, resets)
    results = LSTMResults(outputs.transpose(0, 1), cells, sums, outputs, outputs)
    incoming = None if doutputs is None else doutputs.transpose(0, 1), last_h, last_c
    operands, ctx.operands = ctx.operands, None  # its zeros serve one backward pass
    with _PlainProducts(plan, outputs.device.type):
        gradients = plan.backward(tensors, results, incoming, needs, rows, operands)
    dinputs = None if gradients.inputs is None else gradients.inputs.transpose(0, 1)
    first: tuple[Any, Any] = (None, None)
    if h is not None:
        first = torch.stack(gradients.first_h).to(h.dtype), gradients.first_c.to(c.dtype)
    return None, None, None, dinputs, *first, *gradients.weights


def run_eagerly(
    plan: LayerPlan,
    inputs: Tensor,
    state: tuple[Tensor, Tensor] | None,
    lengths: Tensor | None,
    weights: Sequence[Tensor],
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs one layer in one or both directions, recorded by autograd if its plan keeps what a backward pass needs.

    Takes inputs (B, T, I) and other arguments as in `LayerTensors`; inputs and states may have any floating point type.
    Returns outputs (B, T, D H), and h and c after each row's last step, (D, B, H); c is float32.
    """
    for weight in weights:
        if not weight.is_contiguous():  # as the kernels that read weights expect
            weights = [part.contiguous() for part in weights]
            break
    if plan.keep:
        results: tuple[Tensor, Tensor, Tensor] = _LayerFunction.apply(  # type: ignore[no-untyped-call]
            plan, lengths, resets, inputs, *(state or (None, None)), *weights
        )
        return results
    tensors = LayerTensors(inputs.transpose(0, 1), weights, state, lengths, None, resets)
    made, _, outputs = _forward(plan, tensors)
    return outputs, made.last_h, made.last_c
