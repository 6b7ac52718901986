"""Products of rows with the weights of their sentences, by the C library at every instruction set."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import SearchWeight
from econmt_ops.core.int8 import rounded
from tests.ops.test_native import (  # noqa: F401
    LEVELS,
    Random,
    Use,
    assert_frame_untouched,
    framed,
    library_path,
    poison,
    threads,
    use,
)

pytestmark = pytest.mark.skipif(
    library_path() is None, reason="econmt_ops was installed without its C library"
)
COUNTS = [17, 100, 1, 16, 33, 64]
"""Outputs of each owner's weight."""
OWNERS = {
    "one owner": [1],
    "some without rows": [0, 0, 0, 2, 4, 4, 5],
    "many rows": [1] * 70 + [3] * 5 + [4] * 2,
}
KINDS = [torch.float32, torch.bfloat16, torch.int8]


def definition(left: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
    """The product in float64 of the values as the kind of weight rounds them."""
    if kind != torch.int8:
        return left.to(kind).double() @ weight.to(kind).double().t()
    (a, steps), (b, scales) = rounded(left), rounded(weight)
    return (a.double() @ b.double().t()) * steps.double()[:, None] * scales.double()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("most", [max(COUNTS), 107])
def test_each_row_is_multiplied_with_its_owners_weight(
    kind: torch.dtype,
    owners: list[int],
    count: int,
    most: int,
    use: Use,  # noqa: F811
    threads: Use,  # noqa: F811
) -> None:
    make = Random(torch.float32)
    for inputs in (5, 66, 256):
        weights = [make(outputs, inputs, scale=1.0 / math.sqrt(inputs)) for outputs in COUNTS]
        biases, left = [make(outputs) for outputs in COUNTS], make(len(owners), inputs)
        pieces = [SearchWeight(*pair, kind) for pair in zip(weights, biases, strict=True)]
        structures = [piece.structure() for piece in pieces]
        array = (type(structures[0]) * len(structures))(*structures)
        for level in LEVELS:
            use(level)
            threads(count)
            found = poison(torch.float32, len(owners), most)
            native.call(
                "products_by_owner", 10_000, rows=len(owners), most=most, left=framed(left),
                weights=ctypes.addressof(array), owners=torch.tensor(owners), output=found,
            )  # fmt: skip
            for row, owner in enumerate(owners):
                expected = definition(left[row : row + 1], weights[owner], kind)[0] + biases[owner].double()
                result = found[row, : COUNTS[owner]].double()
                torch.testing.assert_close(result, expected, rtol=1e-5, atol=2e-5)
                assert (found[row, COUNTS[owner] :] == -math.inf).all()
            assert_frame_untouched(found)
