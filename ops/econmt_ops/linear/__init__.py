"""A linear layer whose matrix product may be laid out in memory either way."""

from __future__ import annotations

from torch import Tensor

from econmt_ops.checks import Shapes
from econmt_ops.precision import compute_dtype, explicit_casts
from econmt_ops.select import implementations, resolve

_IMPLEMENTATIONS = implementations(__name__, "linear")
_LAYOUTS = ("auto", "row", "column")


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
        inputs: (..., I), of any number of dimensions from one up.
        weight: (O, I).
        bias: (O,) or None.
        layout: "row" computes Y = X W^T, rows of Y contiguous; "column" computes Y^T = W X^T and returns its
            transpose, a view whose columns are
            contiguous; "auto" leaves the choice to the library.
        implementation: "auto" or the name of one.

    Returns:
        (..., O).

    Raises:
        ValueError: shapes or types do not fit, or the layout or the implementation is unknown.
    """
    function = resolve("linear", implementation, _IMPLEMENTATIONS, (inputs, weight, bias)).function
    if layout not in _LAYOUTS:
        raise ValueError(f"linear: unknown layout {layout!r}; available: {', '.join(_LAYOUTS)}")
    check = Shapes("linear")
    check("weight", weight, "O I")
    if inputs.dim() == 0 or inputs.shape[-1] != check.sizes["I"]:
        raise ValueError(
            f"linear: inputs must be (..., I) with I={check.sizes['I']}, got {tuple(inputs.shape)}"
        )
    check("inputs", inputs.reshape(-1, check.sizes["I"]), "N I")
    if bias is not None:
        check("bias", bias, "O")
    dtype = compute_dtype(inputs)
    with explicit_casts(inputs):
        outputs: Tensor = function(
            inputs.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), layout=layout
        )
    return outputs
