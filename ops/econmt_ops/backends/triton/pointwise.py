"""Functions of single values that several kernels use."""

from __future__ import annotations

import triton
import triton.language as tl

_TANH: tl.constexpr = tl.constexpr("tanh.approx.f32 $0, $1;")


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """tanh of float32 values, its relative error below 3e-7.

    Near zero by a polynomial (x + x^3 P(x^2), P fitted for the least largest relative error on |x| < 1/2), where
    (1 - exp(-2 |x|)) / (1 + exp(-2 |x|)) would lose what the subtraction cancels.
    """
    z = x * x
    series = -0.333331436 + z * (0.13325879 + z * (-0.0530454889 + z * 0.0172414817))
    tail = tl.exp(-2.0 * tl.abs(x))
    ratio = (1.0 - tail) / (1.0 + tail)
    return tl.where(z < 0.25, x + x * z * series, tl.where(x < 0.0, -ratio, ratio))


@triton.jit
def tanh_of(x: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """tanh; if FAST the GPU's own instruction, whose error of 5e-4 suits values of 16 bits, and which no CPU has."""
    if FAST:
        return tl.inline_asm_elementwise(_TANH, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tanh(x)
