"""Chooses the precision of matrix products and feature maps from recipe, saved run and device.

Precisions differ in rounding, so a resumed run keeps the precision that it began with, which is saved in its state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from econmt.config.recipe import Recipe
from econmt.engine.devices import shortest_seconds
from econmt.engine.machine import measured_today
from econmt_ops.backends import c as native
from econmt_ops.core.precision import autocast_to
from econmt_ops.dispatch.device_limits import limits_of
from econmt_ops.products.gemm import Product
from econmt_ops.products.int8 import Int8Product

LEAST_SIZE = 128
"""Smallest hidden size for which auto considers bfloat16 on a CPU; below it, casts cost what products save."""

MARGIN = 1.3
"""Factor by which bfloat16 must be faster than float32 on a CPU to be chosen.

Operations other than products gain nothing, and casts cost time. On CPUs that support bfloat16 its products are twice
as fast, so that measurement noise does not decide.
"""

_SIZES = (256, 512, 2048)
"""Rows, inputs and outputs of the timed product: the gates of an LSTM of size 512."""

_FEW_ROWS = (5, 1024, 2048)
"""Rows, inputs and outputs of a decoding step of one sentence, whose time is that of reading the weight."""

_SMALL_SIZES = (32, 256, 512)
"""Rows, inputs and outputs of a smaller product timed first, since a CPU that emulates bfloat16 would take seconds."""

_REPEATS = 5
_CPU = torch.device("cpu")

_BFLOAT16_SINCE, _FLOAT16_SINCE = (8, 0), (7, 0)
"""Lowest CUDA compute capability with tensor cores for the type."""


class Precision(NamedTuple):
    """Precision of a model's computation; its parameters are always float32.

    Attributes:
        dtype: Type of matrix products and feature maps.
        allow_tf32: True if a GPU may round the factors of float32 products to TF32; otherwise they are IEEE float32.
        why: Reason for the choice, for the log.
    """

    dtype: torch.dtype = torch.float32
    allow_tf32: bool = False
    why: str = ""

    @property
    def name(self) -> Literal["float32", "tf32", "bfloat16", "float16"]:
        """Name of the precision in a recipe."""
        if self.dtype == torch.float32:
            return "tf32" if self.allow_tf32 else "float32"
        assert self.dtype in (torch.bfloat16, torch.float16)
        return "bfloat16" if self.dtype == torch.bfloat16 else "float16"

    def autocast(self, device: torch.device) -> torch.autocast:
        """Returns the autocast context of a forward pass, in which products are computed in the dtype."""
        return autocast_to(device, self.dtype)

    @contextmanager
    def products(self, device: torch.device) -> Iterator[None]:
        """Sets TF32 for float32 products on a GPU, in forward and backward passes.

        PyTorch's defaults allow TF32 in cuDNN but not in cuBLAS.
        """
        if device.type != "cuda":
            yield
            return
        libraries: list[Any] = [torch.backends.cuda.matmul, torch.backends.cudnn]
        before = [library.allow_tf32 for library in libraries]
        try:
            for library in libraries:
                library.allow_tf32 = self.allow_tf32
            yield
        finally:
            for library, allowed in zip(libraries, before, strict=True):
                library.allow_tf32 = allowed


NAMED = {
    "float32": Precision(),
    "tf32": Precision(allow_tf32=True),
    "bfloat16": Precision(torch.bfloat16, allow_tf32=True),
    "float16": Precision(torch.float16, allow_tf32=True),
}


def precision_of(
    wanted: str, device: torch.device, recipes: Sequence[Recipe] = (), saved: str = ""
) -> Precision:
    """Returns the precision that a name stands for.

    Args:
        wanted: "float32", "tf32", "bfloat16", "float16" or "auto": the precision the run began with, or the faster one
            on the device.
        recipes: Recipes of the models that compute together.
        saved: Name of the precision that the run began with; empty at its start.
    """
    if wanted != "auto":
        no_tf32 = (
            "; a CPU has no TF32 and computes in float32" if (wanted, device.type) == ("tf32", "cpu") else ""
        )
        return NAMED[wanted]._replace(why=f"set by the recipe{no_tf32}")
    if saved:
        return NAMED[saved]._replace(why="as at the beginning of the run")
    if device.type == "cuda":
        capability = limits_of(device).capability
        for name, since in (("bfloat16", _BFLOAT16_SINCE), ("float16", _FLOAT16_SINCE)):
            if capability >= since:
                return NAMED[name]._replace(why=f"auto: the GPU has {name} tensor cores")
        return NAMED["float32"]._replace(why="auto: the GPU has no tensor cores")
    sizes = [recipe.model.widest for recipe in recipes]
    if sizes and max(sizes) < LEAST_SIZE:
        return Precision(why="auto: the model is too small for bfloat16 to be faster")
    times = time_products()
    return NAMED["bfloat16" if times.bfloat16_pays else "float32"]._replace(
        why=f"auto: a matrix product takes {times.float32 * 1e3:.2f} ms in float32, {times.bfloat16 * 1e3:.2f} ms in "
        f"bfloat16, which is chosen if {MARGIN} times as fast; measured once a day"
    )


def precision_of_run(recipe: Recipe, device: torch.device, saved: str = "") -> Precision:
    """Returns the precision that a run trains with; see :func:`precision_of`."""
    return precision_of(recipe.training.precision, device, [recipe], saved)


class ProductTimes(NamedTuple):
    """Seconds of one matrix product on the CPU, by precision."""

    float32: float
    bfloat16: float

    @property
    def bfloat16_pays(self) -> bool:
        """True if bfloat16 is faster than float32 by at least the margin."""
        return self.float32 > MARGIN * self.bfloat16


def time_products() -> ProductTimes:
    """Returns the times of a product on this CPU with PyTorch's current number of threads, measured once a day."""
    return ProductTimes(**measured_today("a product in two precisions", lambda: _time_products()._asdict()))


def int8_pays() -> bool:
    """Returns True if 8-bit products of a sentence's hypotheses are faster on this CPU by at least the margin.

    It is measured once a day. Without the C library the answer is False.
    """
    if not native.is_built():
        return False
    times = measured_today("a product of few rows, laid out", _time_few_rows)
    return min(times["float32"], times["bfloat16"]) > MARGIN * times["int8"]


def _time_few_rows() -> dict[str, float]:
    """Returns the shortest time in seconds of a product of few rows with prepacked weights, by the weights' type."""
    rows, inputs, outputs = _FEW_ROWS
    weight = torch.full((outputs, inputs), 0.5)
    times = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        is_int8 = dtype == torch.int8
        product = Int8Product(weight) if is_int8 else Product(weight.to(dtype))
        factor = torch.full((rows, inputs), 0.5, dtype=torch.float32 if is_int8 else dtype)
        call = partial(product, factor)  # the first call prepares the weights
        times[str(dtype).removeprefix("torch.")] = shortest_seconds(call, _CPU, _REPEATS)
    return times


def _time_products() -> ProductTimes:
    """Measures the times that :func:`time_products` returns."""
    for sizes in (_SMALL_SIZES, _SIZES):
        times = ProductTimes(_seconds(sizes, torch.float32), _seconds(sizes, torch.bfloat16))
        if times.bfloat16 >= 2 * times.float32:
            break
    return times


def _seconds(sizes: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Returns the shortest of several times of a product (rows, inputs) x (outputs, inputs)."""
    rows, inputs, outputs = sizes
    left, right = (torch.full((size, inputs), 0.5, dtype=dtype) for size in (rows, outputs))
    with torch.no_grad():
        return shortest_seconds(lambda: functional.linear(left, right), _CPU, _REPEATS)
