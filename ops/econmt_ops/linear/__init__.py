"""Linear layer with a choice of the memory layout of its matrix product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from econmt_ops.core.precision import compute_dtype, explicit_casts
from econmt_ops.core.shapes import Shapes, check_tensor
from econmt_ops.dispatch.rule import is_transformed
from econmt_ops.dispatch.select import Candidate, Problem, run
from econmt_ops.dispatch.traits import Traits, implementations
from econmt_ops.products.packed import packed_linear

LAYOUTS = ("row", "column", "transposed", "packed")


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, *, layout: str) -> Tensor:
    """Implements `linear` for checked and cast arguments, with a layout that is not "auto"."""
    if layout == "row" or (layout == "packed" and is_transformed()):
        return functional.linear(inputs, weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    if layout == "packed":
        outputs = packed_linear(rows, weight, bias)
    elif layout == "transposed":
        turned = weight.t().contiguous()
        outputs = rows @ turned if bias is None else torch.addmm(bias, rows, turned)
    else:
        columns = rows.t()
        outputs = weight @ columns if bias is None else torch.addmm(bias.unsqueeze(1), weight, columns)
        outputs = outputs.t()
    shaped: Tensor = outputs.reshape(*inputs.shape[:-1], weight.shape[0])
    return shaped


implementations("linear", reference=(_linear, Traits()))


def linear(
    inputs: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    layout: str = "auto",
    implementation: str = "auto",
) -> Tensor:
    """Computes `inputs weight^T + bias`, as `torch.nn.functional.linear`.

    Args:
        inputs: Inputs, (..., I), with at least one dimension.
        weight: Weight, (O, I).
        bias: Bias, (O,), or None.
        layout: "row" computes Y = X W^T with contiguous rows of Y. "column" computes Y^T = W X^T and returns its
            transpose, a view with contiguous columns. "transposed" computes Y = X V with V = W^T stored by rows, which
            is free if `weight` is the transposed view of such a V and otherwise copies W. "packed" lets oneDNN pack W
            (on the CPU in float32 and bfloat16, elsewhere as "row"). "auto" selects the layout that was measured to be
            fastest (see `econmt_ops.dispatch.select`), or "row".
        implementation: "auto" or the name of an implementation.

    Returns:
        Outputs, (..., O).

    Raises:
        ValueError: If shapes or types do not fit, or the layout or the implementation is unknown.
    """
    if layout != "auto" and layout not in LAYOUTS:
        raise ValueError(f"linear: unknown layout {layout!r}; available: {', '.join(('auto', *LAYOUTS))}")
    check = Shapes("linear")
    check("weight", weight, "O I")
    check_tensor("linear", "inputs", inputs)
    if inputs.dim() == 0 or inputs.shape[-1] != check.sizes["I"]:
        raise ValueError(
            f"linear: inputs must be (..., I) with I={check.sizes['I']}, got {tuple(inputs.shape)}"
        )
    check("inputs", inputs.reshape(-1, check.sizes["I"]), "N I")
    if bias is not None:
        check("bias", bias, "O")
    dtype = compute_dtype(inputs)

    def call(candidate: Candidate, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with explicit_casts(inputs):
            outputs: Tensor = candidate.function(
                inputs.to(dtype),
                weight.to(dtype),
                None if bias is None else bias.to(dtype),
                **candidate.options,
            )
        return outputs

    detail = "" if bias is None else "bias"
    problem = Problem("linear", (inputs, weight, bias), dtype, check.sizes, detail)
    options = [{"layout": each} for each in (LAYOUTS if layout == "auto" else (layout,))]
    return run(problem, call, implementation, options=options)
