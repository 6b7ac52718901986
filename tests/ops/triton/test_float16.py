"""The kernels in float16 under a loss scale, as `tests/ops/test_float16.py` for implementations without kernels."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from econmt_ops.dispatch.traits import implementations_of
from tests.ops.every_op import calls, each_op
from tests.ops.helpers import TOLERANCE, assert_close, to
from tests.ops.test_float16 import HALF, scaled_gradients, without_dropout
from tests.ops.triton.kernel_device import DEVICE


@pytest.mark.sampled(2)
@each_op
def test_gradients_are_those_of_float64_or_show_an_overflow(op: str, device: str) -> None:
    call = calls(device, torch.float64)[op]
    implementation = implementations_of(op.partition("-")[0]).get("triton")
    if implementation is None or not implementation.traits.runs_on("cuda", HALF) or device != DEVICE:
        pytest.skip("no kernels")
    arguments = without_dropout(call)
    function = partial(call.function, implementation="triton")
    expected = scaled_gradients(call.function, arguments, 1.0)
    with torch.autocast(device, HALF):
        found = scaled_gradients(function, to(torch.float32, arguments), 16.0)
        overflowing = scaled_gradients(function, to(HALF, arguments), 1e5)
    assert_close([part / 16.0 for part in found], expected, TOLERANCE[HALF])
    assert not all(bool(part.isfinite().all()) for part in overflowing)
