"""The schedule of a stack of LSTM layers: how its products and pointwise passes are made, and in what order."""

from __future__ import annotations

from typing import NamedTuple

import torch

from econmt_ops.core.gemm import LAYOUTS
from econmt_ops.core.precision import accumulate_dtype

POINTWISE = ("in-place", "compiled")
ORDERS = ("layers", "wavefront")
DIRECTIONS = ("apart", "together", "streams")

_LITTLE = 16 << 20
"""Bytes of gates up to which what a layer keeps counts for little."""

_WIDE = 1024
"""Units from which on the CPU oneDNN's LSTM takes longer to lay out its weights than a loop of a few steps takes."""

_FEW_STEPS = 16
"""Steps up to which a loop in 16-bit types gains nothing from laying out its weights."""


class Schedule(NamedTuple):
    """How the recomputing LSTM goes through its cells; the result does not depend on it.

    The four gates of a cell are always one product, the input's products of all steps of a layer are one, and the
    gradients of the weights wait for large products after the loop: nothing was faster without these.

    Attributes:
        pointwise: what is not a product: "in-place", or "compiled" into one pass by torch.compile.
        weights: how the weights of the small products lie in memory: "row" as they are, "transposed", or "packed"
            into the blocks that oneDNN reads; see `econmt_ops.core.gemm`.
        order: "layers", one after the other, or "wavefront": the cells (layer l, step t) with equal l + t together, in
            one batched product.
        directions: of a layer that reads both ways: "apart", one after the other; "together", the n-th steps of both in
            one batched product and one pointwise pass; "streams", apart, but on a GPU at the same time.
    """

    pointwise: str = "in-place"
    weights: str = "packed"
    order: str = "layers"
    directions: str = "apart"

    @property
    def text(self) -> str:
        """The schedule as one word for an operator's argument."""
        return "/".join(self)

    @staticmethod
    def parse(text: str) -> Schedule:
        """The schedule that `text` names.

        Raises:
            ValueError: it does not.
        """
        parts = text.split("/")
        known = (POINTWISE, LAYOUTS, ORDERS, DIRECTIONS)
        if len(parts) != len(known) or any(
            part not in names for part, names in zip(parts, known, strict=True)
        ):
            choices = "/".join("|".join(names) for names in known)
            raise ValueError(f"lstm: unknown schedule {text!r}; it must be {choices}")
        return Schedule(*parts)


def default_schedule(compiled: bool) -> Schedule:
    """The best schedule found, with or without torch.compile."""
    return Schedule(pointwise="compiled" if compiled else "in-place")


def is_light(batch: int, steps: int, hidden: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a layer keeps little and is faster by the reference than by recomputing; see README.md.

    Args:
        batch, steps, hidden: B, T and H.
        dtype: the compute type.
        device: where.
    """
    if device.type != "cpu" or torch.compiler.is_compiling():
        return False
    exact = accumulate_dtype(dtype)
    if batch * steps * 4 * hidden * exact.itemsize > _LITTLE:
        return False
    return hidden < _WIDE if exact == dtype else steps < _FEW_STEPS
