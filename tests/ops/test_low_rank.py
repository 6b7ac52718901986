"""LSTMs whose matrices are factorised never multiply the factors; their compiled steps give what eager ones give."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

import econmt_ops
from econmt_ops.lstm import unrolled
from tests.ops.cases import Parts, Sizes, low_rank
from tests.ops.helpers import Make, assert_close, values_and_gradients

each_way = pytest.mark.parametrize("implementation", ["reference", "recompute"])


class _Shapes(TorchDispatchMode):
    """The shapes of everything that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OPDEFS.get(func._schema.name)
        if own is not None:
            with self:  # or what the operator does inside would not be seen
                return own._init_fn(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self.seen.add(tuple(made.shape))
        return result


@pytest.mark.parametrize(
    "mode", [_Shapes, pytest.param(nullcontext, marks=[pytest.mark.thorough, pytest.mark.slow])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_equals_recompute(
    dtype: torch.dtype, mode: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps go into one function and the fifth is made in place; in a dispatch mode nothing is compiled."""
    monkeypatch.setattr(unrolled, "_TOGETHER", 2)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    tensors = low_rank(Make("cpu", dtype), Sizes(B=3, T=5, I=4, H=6, L=1))
    lengths = torch.tensor([5, 1, 4])
    with mode():
        for stash, reverse in (("outputs", True), ("gates", False)):
            options = {"lengths": lengths, "stash": stash, "reverse": reverse}
            runs = (
                partial(econmt_ops.lstm, **options, implementation=way) for way in ("recompute", "compiled")
            )
            results = [values_and_gradients(run, tensors) for run in runs]
            assert_close(results[1][0], results[0][0], tolerance)
            assert_close(results[1][1], results[0][1], tolerance)
        with torch.no_grad():
            alone, _ = econmt_ops.lstm(**tensors, lengths=lengths, implementation="compiled")
            expected, _ = econmt_ops.lstm(**tensors, lengths=lengths, implementation="reference")
        assert_close([alone], [expected], tolerance)


@each_way
@pytest.mark.parametrize("fed", [None, True], ids=["lstm", "fed"])
def test_the_product_of_the_factors_is_never_made(implementation: str, fed: bool | None) -> None:
    sizes = Sizes(B=3, T=5, I=11, H=13, L=1)
    tensors = low_rank(Make("cpu"), sizes) if fed is None else Parts("low-rank").tensors(Make("cpu"), sizes)
    op = econmt_ops.lstm if fed is None else econmt_ops.attentional_lstm
    more = {} if fed is None else {"lengths": None}
    watch = _Shapes()
    with watch:
        values_and_gradients(lambda **tensors: op(**tensors, **more, implementation=implementation), tensors)
    assert (15, 52) in watch.seen or (3, 52) in watch.seen
    wide = {(52, 11), (52, 13), (52, 24), (11, 52), (13, 52), (24, 52)}
    assert not watch.seen & wide
