"""Elementwise functions that several kernels use."""

from __future__ import annotations

import triton
import triton.language as tl

from econmt_ops.backends.triton import interpreted

_ON_DEVICE: tl.constexpr = tl.constexpr(not interpreted())
_INVERSE: tl.constexpr = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
_POWER: tl.constexpr = tl.constexpr("ex2.approx.ftz.f32 $0, $1;")
_TANH: tl.constexpr = tl.constexpr("tanh.approx.f32 $0, $1;")


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Computes tanh, of float32 values with a relative error below 4e-7.

    Their result is x P(x^2) / Q(x^2), with coefficients fitted to minimise the largest relative error (9e-9) on |x| <
    8.3; beyond, it is constant, within 1.2e-7 of 1. By exponentials it would take twice as many instructions, and their
    difference would lose the digits of small values.
    """
    if x.dtype == tl.float64:
        return 2.0 * tl.sigmoid(2.0 * x) - 1.0
    else:
        x = tl.clamp(x, -8.3, 8.3, propagate_nan=tl.PropagateNan.ALL)
        z = x * x
        over = 0.999999991 + z * (0.134258768 + z * (3.54917643e-3 + z * (2.15086093e-5 + z * 1.46484067e-8)))
        under = 1.0 + z * (0.467592016 + z * (0.0260799778 + z * (3.37396208e-4 + z * 8.2951709e-7)))
        if _ON_DEVICE:
            inverse = tl.inline_asm_elementwise(
                _INVERSE, "=f,f", [under], dtype=tl.float32, is_pure=True, pack=1
            )
        else:
            inverse = 1.0 / under
        return x * over * inverse


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """Computes the logistic function, in float32 with a relative error below 1e-6; denormal results become 0."""
    if _ON_DEVICE and x.dtype != tl.float64:
        power = tl.inline_asm_elementwise(
            _POWER, "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.inline_asm_elementwise(
            _INVERSE, "=f,f", [1.0 + power], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.sigmoid(x)


@triton.jit
def tanh_of(x: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """Computes tanh; with FAST on a GPU by its instruction, whose error of 5e-4 is sufficient for 16-bit values."""
    if FAST and _ON_DEVICE:
        return tl.inline_asm_elementwise(_TANH, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tanh(x)
