"""Fused linear output layer and cross-entropy loss."""

from __future__ import annotations

from torch import Tensor

from econmt_ops.backends.triton import on_kernels
from econmt_ops.core.arguments import CrossEntropyArguments
from econmt_ops.core.precision import compute_dtype, explicit_casts
from econmt_ops.core.shapes import Shapes
from econmt_ops.dispatch.select import Candidate, Problem, run
from econmt_ops.dispatch.traits import implementations
from econmt_ops.linear_cross_entropy import recompute, reference

implementations(
    "linear_cross_entropy",
    reference,
    recompute,
    triton=on_kernels(recompute.linear_cross_entropy, recompute.TRAITS),
)
_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    implementation: str = "auto",
) -> Tensor:
    """Computes a linear layer and the cross entropy of its softmax without storing all N x V logits.

    Equal to `cross_entropy(linear(hidden, weight, bias), targets, ...)` of `torch.nn.functional`.

    Args:
        hidden: (N, H).
        weight: (V, H).
        targets: (N,) int64, each in [0, V) or `ignore_index`.
        bias: (V,) or None.
        label_smoothing: fraction in [0, 1] of the target distribution that is spread evenly over all V classes (Szegedy
            et al. 2016).
        ignore_index: rows with this target have loss 0, no gradient, and are not counted in the mean.
        reduction: "mean" over the counted rows, "sum", or "none".
        implementation: "auto" or the name of an implementation.

    Returns:
        The loss in float32, or in float64 for float64 `hidden`: a scalar, or (N,) for "none". As in torch, with no
        counted row "mean" is NaN and "sum" is 0.

    Raises:
        ValueError: shapes or types do not fit, a target on the CPU is out of range, or the reduction or the
            implementation is unknown.
    """
    check = Shapes("linear_cross_entropy")
    if reduction not in _REDUCTIONS:
        raise ValueError(f"{check.op}: unknown reduction {reduction!r}; available: {', '.join(_REDUCTIONS)}")
    if not isinstance(label_smoothing, (int, float)) or not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{check.op}: label_smoothing must be from 0 to 1, got {label_smoothing!r}")
    check("hidden", hidden, "N H")
    check("weight", weight, "V H")
    check.indices("targets", targets, "N")
    check.bounded("targets", targets, len(weight) - 1, ignore_index)
    if bias is not None:
        check("bias", bias, "V")
    dtype = compute_dtype(hidden)

    def call(candidate: Candidate, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with explicit_casts(hidden):
            loss: Tensor = candidate.function(
                CrossEntropyArguments(
                    hidden.to(dtype), weight, targets, bias, label_smoothing, ignore_index, reduction
                )
            )
        return loss

    problem = Problem("linear_cross_entropy", (hidden, weight, bias), dtype, check.sizes, reduction)
    return run(problem, call, implementation)
