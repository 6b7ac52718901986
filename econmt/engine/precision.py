"""The precision of products and feature maps: what a recipe, ``auto``, a saved run and a device mean, in one rule.

Precisions differ by rounding, so a run that goes on must use the one that it began with: it is a part of its saved
state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from econmt.config.recipe import Recipe
from econmt.engine.measurement_cache import remembered
from econmt_ops.backends import c as native
from econmt_ops.core.gemm import Product
from econmt_ops.core.int8 import Int8Product
from econmt_ops.core.precision import autocast_to

LEAST_SIZE = 128
"""Hidden values of the smallest model whose products are worth casting for on a CPU: below, casts take what products
save."""

MARGIN = 1.3
"""Factor by which bfloat16 has to be faster on a CPU to be chosen.

Everything that is no product gains nothing, and casts cost; where bfloat16 is worth it it is twice as fast, so that no
noise of the measurement decides; what lies nearer together is computed in float32."""

_SIZES = (256, 512, 2048)
"""Rows, inputs and outputs of the timed product: the gates of an LSTM of 512, some milliseconds at most."""

_FEW = (5, 1024, 2048)
"""Sizes of a product for the hypotheses of one sentence, bound by reading the weight."""

_PROBE = (32, 256, 512)
"""Sizes of a product timed first: a CPU that emulates bfloat16 would take seconds for the large one."""

_REPEATS = 5

_BFLOAT16_SINCE = (8, 0)
"""The compute capability of the first GPUs whose tensor cores multiply bfloat16."""


class Precision(NamedTuple):
    """Precision of a model's products; its parameters are always float32.

    Attributes:
        dtype: of products and feature maps.
        allow_tf32: whether a GPU may round the factors of float32 products to TF32's 11 bits; else they are IEEE's.
        why: it is that one.
    """

    dtype: torch.dtype = torch.float32
    allow_tf32: bool = False
    why: str = ""

    @property
    def name(self) -> Literal["float32", "tf32", "bfloat16"]:
        """Name in recipes."""
        if self.dtype == torch.float32:
            return "tf32" if self.allow_tf32 else "float32"
        assert self.dtype == torch.bfloat16
        return "bfloat16"

    def autocast(self, device: torch.device) -> torch.autocast:
        """The context of a forward pass: products are made in the dtype."""
        return autocast_to(device, self.dtype)

    @contextmanager
    def products(self, device: torch.device) -> Iterator[None]:
        """The context of forward and backward passes: float32 products on a GPU are made as the precision says.

        By themselves cuDNN's may use TF32 and cuBLAS's not.
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


_NAMED = {
    "float32": Precision(),
    "tf32": Precision(allow_tf32=True),
    "bfloat16": Precision(torch.bfloat16, allow_tf32=True),
}


def precision_of(
    wanted: str, device: torch.device, recipes: Sequence[Recipe] = (), saved: str = ""
) -> Precision:
    """The precision that a name means.

    Args:
        wanted: "float32", "tf32", "bfloat16", or "auto": what a run began with, or what is faster on the device.
        device: that computes.
        recipes: of the models that compute together.
        saved: the name of the precision that the run began with; empty at its start.
    """
    if wanted != "auto":
        return _NAMED[wanted]._replace(why="as the recipe says")
    if saved:
        return _NAMED[saved]._replace(why="as the run began")
    if device.type == "cuda":
        # A prediction may be made where there is no GPU: it is of one that has bfloat16.
        there = torch.cuda.is_available()
        fast = not there or torch.cuda.get_device_capability(device) >= _BFLOAT16_SINCE
        why = "auto: the GPU has tensor cores for it" if fast else "auto: the GPU has no bfloat16"
        return _NAMED["bfloat16" if fast else "float32"]._replace(why=why)
    sizes = [recipe.model.widest for recipe in recipes]
    if sizes and max(sizes) < LEAST_SIZE:
        return Precision(why="auto: too small a model to gain")
    times = time_products()
    return _NAMED["bfloat16" if times.bfloat16_pays else "float32"]._replace(
        why=f"auto: a matrix product takes {times.float32 * 1e3:.2f} ms in float32, {times.bfloat16 * 1e3:.2f} ms in "
        f"bfloat16, which must be {MARGIN} times as fast; kept for today"
    )


def precision_of_run(recipe: Recipe, device: torch.device, saved: str = "") -> Precision:
    """The precision that a run trains with; see :func:`precision_of`."""
    return precision_of(recipe.training.precision, device, [recipe], saved)


class ProductTimes(NamedTuple):
    """Seconds that one product takes on the CPU."""

    float32: float
    bfloat16: float

    @property
    def bfloat16_pays(self) -> bool:
        """True if bfloat16 is faster by the margin."""
        return self.float32 > MARGIN * self.bfloat16


def time_products() -> ProductTimes:
    """The times of products on this CPU with as many threads as PyTorch has now, measured once a day."""
    return ProductTimes(**remembered("a product in two precisions", lambda: _timed()._asdict()))


def int8_pays() -> bool:
    """Returns True if 8-bit products for one sentence's hypotheses are faster on this CPU by the margin.

    Measured once a day; without the C library it does not.
    """
    if not native.is_built():
        return False
    times = remembered("a product of few rows, laid out", _timed_few)
    return min(times["float32"], times["bfloat16"]) > MARGIN * times["int8"]


def _timed_few() -> dict[str, float]:
    """The shortest of a few products of few rows, by the type of their weights, which are laid out."""
    rows, inputs, outputs = _FEW
    weight = torch.full((outputs, inputs), 0.5)
    times = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        whole = dtype == torch.int8
        product = Int8Product(weight) if whole else Product(weight.to(dtype))
        left = torch.full((rows, inputs), 0.5, dtype=torch.float32 if whole else dtype)
        product(left)  # the first call prepares
        seconds = []
        for _ in range(_REPEATS):
            began = time.perf_counter()
            product(left)
            seconds.append(time.perf_counter() - began)
        times[str(dtype).removeprefix("torch.")] = min(seconds)
    return times


def _timed() -> ProductTimes:
    """See :func:`time_products`."""
    for sizes in (_PROBE, _SIZES):
        times = ProductTimes(_seconds(sizes, torch.float32), _seconds(sizes, torch.bfloat16))
        if times.bfloat16 >= 2 * times.float32:
            break
    return times


def _seconds(sizes: tuple[int, int, int], dtype: torch.dtype) -> float:
    """The shortest of a few products (rows, inputs) x (outputs, inputs): others' work can only lengthen them."""
    rows, inputs, outputs = sizes
    left, right = (torch.full((size, inputs), 0.5, dtype=dtype) for size in (rows, outputs))
    seconds = []
    with torch.no_grad():
        functional.linear(left, right)  # the first call prepares
        for _ in range(_REPEATS):
            began = time.perf_counter()
            functional.linear(left, right)
            seconds.append(time.perf_counter() - began)
    return min(seconds)
