"""Both passes of the recomputing attentional LSTM, in float16 where float32 products may use TF32.

Float16 has the mantissa of TF32 in half the bytes, so that the kernels for 16-bit types serve float32 arguments, too.
Cells, gates, scores and sums of gradients remain float32. A power of two brings the incoming gradients into the range
of float16, and is divided out of those of the arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from econmt_ops.attentional_lstm import forward as stepwise
from econmt_ops.attentional_lstm import problem
from econmt_ops.attentional_lstm.backward import Backward
from econmt_ops.attentional_lstm.problem import AttentionalArguments, AttentionalProblem, Result
from econmt_ops.core.outer import ADDS_IN_FLOAT32
from econmt_ops.core.precision import matmul_tf32, narrowed
from econmt_ops.core.repeated import Inputs, values_of
from econmt_ops.dispatch.registration import Gradients, Incoming
from econmt_ops.dispatch.rule import device_of

_FEWEST_STEPS = 8
"""Steps from which on casting the weights takes little of the time of a call."""

_EXPONENT = 2
"""Largest incoming gradients are brought to between 2 and 4: float16 then holds sums of gradients up to 16,000 times as
large, and gradients a ten millionth as large."""


def narrows(inputs: Inputs, backend: str) -> bool:
    """Returns True if a call with these inputs, in float32 or not, is computed in float16."""
    steps = (inputs if isinstance(inputs, Tensor) else inputs.places).shape[1]
    values = values_of(inputs)
    fits = values.dtype == torch.float32 and backend == "triton" and steps >= _FEWEST_STEPS
    return fits and device_of(values) == "cuda" and ADDS_IN_FLOAT32 and matmul_tf32()


def _arguments(call: AttentionalArguments) -> AttentionalArguments:
    """Returns the arguments in float16; matrices, biases and cells are cast where they are used."""
    gain, shift = (None if part is None else narrowed(part) for part in (call.gain, call.shift))
    return call._replace(
        inputs=narrowed(call.inputs),
        keys=narrowed(call.keys),
        values=narrowed(call.values),
        gain=gain,
        shift=shift,
        first_h=[narrowed(h) for h in call.first_h],
        first_output=narrowed(call.first_output),
        narrows=False,
    )


def _wide(result: Result) -> Result:
    """Returns the result with all tensors that a caller sees in float32; the stash of h and gates remains float16."""
    outputs, attention, last_h = result.outputs.float(), result.attention.float(), result.last_h.float()
    return result._replace(outputs=outputs, attention=attention, last_h=last_h)


def forward(call: AttentionalArguments, keep: bool) -> Result:
    """Runs all steps of a call; ``keep``: a backward pass will follow."""
    if not call.narrows:
        return stepwise.forward(AttentionalProblem(call), keep)
    return _wide(stepwise.forward(AttentionalProblem(_arguments(call)), keep))


def empty_result(call: AttentionalArguments, keep: bool) -> Result:
    """Allocates tensors of the shapes and types of the result."""
    if not call.narrows:
        return problem.empty_result(call, keep)
    return _wide(problem.empty_result(_arguments(call), keep))


def backward(call: AttentionalArguments, stash: Result, incoming: Incoming) -> Gradients:
    """Returns the gradients by the names of the operator's arguments."""
    if not call.narrows:
        return Backward(AttentionalProblem(call), stash, incoming).run()
    given = [gradient for gradient in incoming.values() if gradient is not None]
    factor = _factor(given)
    scaled = {
        name: None
        if part is None
        else _times(part, factor, torch.float32 if name == "last_c" else torch.float16)
        for name, part in incoming.items()
    }
    attention = None
    if stash.attention is not None:
        attention = problem.empty_attention(call, torch.float16).copy_(stash.attention)
    call = call._replace(overwrites=True)  # gradients that are scaled are copies
    narrow = stash._replace(outputs=narrowed(stash.outputs), attention=attention)
    made = Backward(AttentionalProblem(_arguments(call)), narrow, scaled).run()
    inverse = factor.reciprocal()
    return {name: _unscaled(gradient, inverse) for name, gradient in made.items()}


def _factor(gradients: list[Tensor]) -> Tensor:
    """Returns the power of two (1,) that brings the largest of the gradients to 2 to 4."""
    largest = torch.stack([part.abs().amax() for part in gradients if part.numel()]).amax()
    exponents = largest.clamp(1e-30, 1e30).log2().ceil()
    return torch.exp2(_EXPONENT - exponents).unsqueeze(0)


def _times(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    product: Tensor = torch.mul(values, factor, out=values.new_empty(values.shape, dtype=dtype))
    return product


def _unscaled(gradient: Any, inverse: Tensor) -> Any:
    """Returns a gradient, or gradients of a list of arguments, times the inverse of the factor, in float32."""
    if gradient is None:
        return None
    if not isinstance(gradient, Tensor):
        return [_unscaled(part, inverse) for part in gradient]
    return (
        gradient.mul_(inverse)
        if gradient.dtype == torch.float32
        else _times(gradient, inverse, torch.float32)
    )
