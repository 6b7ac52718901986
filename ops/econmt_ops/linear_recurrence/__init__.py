"""The linear recurrence h_t = decay_t h_{t-1} + inputs_t."""

from __future__ import annotations

from torch import Tensor

from econmt_ops.core.precision import accumulate_dtype, explicit_casts
from econmt_ops.core.shapes import Shapes
from econmt_ops.dispatch.select import Candidate, Problem, implementations, run

_IMPLEMENTATIONS = implementations(__name__, "linear_recurrence")


def linear_recurrence(
    decay: Tensor,
    inputs: Tensor,
    *,
    initial: Tensor | None = None,
    reverse: bool = False,
    implementation: str = "auto",
) -> Tensor:
    """Computes `h_t = decay_t h_{t-1} + inputs_t` for every row and unit (Martin and Cundy 2018).

    Args:
        decay: (B, T, H).
        inputs: (B, T, H).
        initial: h before the first step, (B, H); zeros if None.
        reverse: walk from the last position to the first: `h_t = decay_t h_{t+1} + inputs_t`, with `initial`
            after the last position.
        implementation: "auto" or the name of one.

    Returns:
        h, (B, T, H), in the type of `inputs`; it is accumulated in float32, or in float64 for float64. There
        is no matrix product here,
        so autocast changes nothing.

    Raises:
        ValueError: shapes or types do not fit, or the implementation is unknown.
    """
    check = Shapes("linear_recurrence")
    check("decay", decay, "B T H")
    check("inputs", inputs, "B T H")
    check.not_empty("inputs", inputs)
    if initial is not None:
        check("initial", initial, "B H")
    exact = accumulate_dtype(inputs.dtype)
    start = (
        decay.new_zeros(check.sizes["B"], check.sizes["H"], dtype=exact)
        if initial is None
        else initial.to(exact)
    )

    def call(candidate: Candidate, inputs: Tensor, decay: Tensor, start: Tensor) -> Tensor:
        with explicit_casts(inputs):
            outputs: Tensor = candidate.function(
                decay.to(inputs.dtype), inputs, initial=start, reverse=reverse
            )
        return outputs

    problem = Problem("linear_recurrence", (inputs, decay, start), inputs.dtype, check.sizes)
    return run(problem, call, _IMPLEMENTATIONS, implementation)
