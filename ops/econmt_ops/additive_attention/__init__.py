"""Additive (MLP) attention of all queries to all keys."""

from __future__ import annotations

from torch import Tensor

from econmt_ops.additive_attention import recompute, reference
from econmt_ops.additive_attention.reference import AttentionArguments
from econmt_ops.backends.triton import on_kernels
from econmt_ops.core.precision import compute_dtype, explicit_casts
from econmt_ops.core.shapes import Shapes
from econmt_ops.dispatch.select import Candidate, Problem, run
from econmt_ops.dispatch.traits import implementations

implementations(
    "additive_attention",
    reference,
    recompute,
    triton=on_kernels(recompute.additive_attention, recompute.TRAITS),
)


def additive_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    score_weight: Tensor,
    *,
    lengths: Tensor | None,
    layer_norm: tuple[Tensor, Tensor] | None = None,
    implementation: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Attends from every query to every key (Bahdanau, Cho and Bengio 2015, equation 6 and appendix A.1.2).

    Computes `e_ts = score_weight . tanh(query_t + keys_s)`, `weights_t = softmax(e_t)` over s < length, and
    `context_t = sum_s weights_ts values_s`.

    Args:
        query: (B, T, A), already projected.
        keys: (B, S, A), already projected, including the bias if there is one.
        values: (B, S, E).
        score_weight: (A,).
        lengths: (B,) int64, on the CPU or the device; positions at or past a row's length are ignored. None: all rows
            are S long.
        layer_norm: (gain (A,), bias (A,)) of a layer normalisation, with epsilon 1e-5, applied to query + keys before
            tanh; None: no normalisation.
        implementation: "auto" or the name of an implementation.

    Returns:
        context (B, T, E) and weights (B, T, S); both are 0 for rows of length 0.

    Raises:
        ValueError: shapes or types do not fit, or the implementation is unknown.
    """
    check = Shapes("additive_attention")
    check("query", query, "B T A")
    check("keys", keys, "B S A")
    check("values", values, "B S E")
    check.not_empty("keys", keys)
    check("score_weight", score_weight, "A")
    check.norm(layer_norm)
    check.lengths(lengths, "S")
    dtype = compute_dtype(query)

    def call(
        candidate: Candidate,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        score_weight: Tensor,
        norm: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        tensors = query.to(dtype), keys.to(dtype), values.to(dtype), score_weight.to(dtype)
        given = AttentionArguments(*tensors, [part.to(dtype) for part in norm or ()], lengths)
        with explicit_casts(query):
            result: tuple[Tensor, Tensor] = candidate.function(given)
        return result

    arguments = (query, keys, values, score_weight, layer_norm)
    detail = "" if layer_norm is None else "norm"
    problem = Problem("additive_attention", arguments, dtype, check.sizes, detail)
    return run(problem, call, implementation)
