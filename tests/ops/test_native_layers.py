"""Kernels of the C library for searches, at every instruction set: scores of dots, layers, products by owner."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch
from torch import Tensor

from econmt_ops import GateWeights, GRUWeights, LSTMWeights
from econmt_ops.backends import c as native
from econmt_ops.backends.c.search import SearchWeight
from econmt_ops.core.int8 import rounded
from econmt_ops.core.weights import LayerNormLSTMWeights, LayerNormPerGateLSTMWeights
from tests.ops import definitions
from tests.ops.test_native import (  # noqa: F401
    LEVELS,
    NAN,
    Random,
    Use,
    assert_frame_untouched,
    assert_near,
    dtypes,
    each_size,
    framed,
    poison,
    threads,
)

pytestmark = pytest.mark.skipif(
    native.library_path() is None, reason="econmt_ops was installed without its C library"
)
CELLS = {"lstm": 4, "gru": 3, "ssru": 2, "lnlstm": 4, "lnglstm": 4}
"""Gates of the cells, in the order of kernels.h."""
COUNTS = [17, 100, 1, 16, 33, 64]
"""Outputs of each owner's weight."""
OWNERS = {"one owner": [1], "some without rows": [0, 0, 0, 2, 4, 4, 5]}
OWNERS["many rows"] = [1] * 70 + [3] * 5 + [4] * 2


@dtypes
@each_size
def test_dots_do_not_depend_on_the_positions_beside_them(size: int, dtype: torch.dtype, use: Use) -> None:
    make = Random(dtype)
    query, keys = make(3, size, scale=1.0 / math.sqrt(size)), make(3, 9, size)
    for _ in map(use, LEVELS):
        for positions in range(1, 10):
            padding = torch.arange(9).expand(3, 9) >= positions
            expected = torch.softmax(
                torch.einsum("bh,bsh->bs", query.double(), keys[:, :positions].double()), 1
            )
            alone = native.attention_forward(query, keys[:, :positions].contiguous(), None, None)
            assert_near(alone, expected, torch.float32)
            beside = native.attention_forward(
                query, keys.masked_fill(padding.unsqueeze(2), NAN), None, padding
            )
            assert beside[:, :positions].equal(alone)
            assert not beside[:, positions:].any()


def steps_of(cell: str, reads: Tensor, recurrent: Tensor, bias: Tensor, vectors: Tensor) -> Tensor:
    """The outputs (T, H) of one row's steps, from the inputs' shares (T, G H)."""
    hidden = recurrent.shape[1]
    parts = vectors.split([*[4 * hidden] * (len(vectors) // hidden // 4), hidden, hidden])
    one, zero = torch.eye(reads.shape[1]).double(), reads.new_zeros(reads.shape[1])
    weights = {
        "lstm": LSTMWeights(one, recurrent, zero),
        "gru": GRUWeights(one, recurrent, zero, bias),
        "ssru": GateWeights(one, zero),
        "lnlstm": LayerNormLSTMWeights(one, recurrent, *parts) if cell == "lnlstm" else None,
        "lnglstm": LayerNormPerGateLSTMWeights(one, recurrent, zero, *parts) if cell == "lnglstm" else None,
    }[cell]
    step: definitions.Step = getattr(definitions, f"{cell.replace('lng', 'ln')}_step")
    state: definitions.State = (reads.new_zeros(hidden),) * (1 + ("lstm" in cell))
    outputs = []
    for read in reads:
        h, state = step(read, weights, state)
        outputs.append(h)
    return torch.stack(outputs)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("backwards", [False, True], ids=["ahead", "back"])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kind", [torch.float32, torch.int8], ids=["float32", "int8"])
def test_layers_equal_their_definition(
    kind: torch.dtype,
    cell: str,
    count: int,
    backwards: bool,
    use: Use,
    threads: Use,  # noqa: F811
) -> None:
    make, lengths = Random(torch.float32), torch.tensor([3, 1, 5, 4, 5])
    for level in LEVELS:
        for hidden in (5, 16, 33):
            use(level)
            threads(count)
            width = CELLS[cell] * hidden
            table, places = make(40, width), torch.randint(0, 40, (5, 5), generator=make.generator)
            recurrent, bias = make(width, hidden, scale=1.0 / math.sqrt(hidden)), make(width)
            vectors = make((14 if cell == "lnlstm" else 10) * hidden)
            weight = SearchWeight(recurrent, bias if cell == "gru" else None, kind)
            structure = weight.structure()
            outputs, last = poison(torch.float32, 25, hidden), poison(torch.float32, 5, hidden)
            native.call(
                "layer_sequence", 10_000, rows=5, positions=5, hidden=hidden, cell=list(CELLS).index(cell),
                backwards=backwards, recurrent=None if cell == "ssru" else ctypes.addressof(structure),
                vectors=vectors, table=table, places=places, lengths=lengths, outputs=outputs, last=last,
            )  # fmt: skip
            for row, length in enumerate(lengths.tolist()):
                order = range(length - 1, -1, -1) if backwards else range(length)
                reads = torch.stack([table[places[t, row]] for t in order]).double()
                expected = steps_of(cell, reads, recurrent.double(), bias.double(), vectors.double())
                found = torch.stack([outputs[t * 5 + row] for t in order])
                # In 8 bits weights and h are rounded by 1 in 127 of their largest values.
                tolerance = (
                    (1e-5 if "ln" in cell else 2e-6) if kind == torch.float32 or cell == "ssru" else 0.05
                )
                torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)
                assert last[row].equal(found[-1])
                assert outputs.view(5, 5, hidden)[length:, row].isnan().all()
            assert int(last._base.isnan().logical_not().sum()) == last.numel()


def definition(left: Tensor, weight: Tensor, kind: torch.dtype) -> Tensor:
    """The product in float64 of the values as the kind of weight rounds them."""
    if kind != torch.int8:
        return left.to(kind).double() @ weight.to(kind).double().t()
    (a, steps), (b, scales) = rounded(left), rounded(weight)
    return (a.double() @ b.double().t()) * steps.double()[:, None] * scales.double()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("owners", OWNERS.values(), ids=OWNERS)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("most", [max(COUNTS), 107])
def test_each_row_is_multiplied_with_its_owners_weight(
    kind: torch.dtype,
    owners: list[int],
    count: int,
    most: int,
    use: Use,
    threads: Use,  # noqa: F811
) -> None:
    make = Random(torch.float32)
    for inputs in (5, 66, 256):
        weights = [make(outputs, inputs, scale=1.0 / math.sqrt(inputs)) for outputs in COUNTS]
        biases, left = [make(outputs) for outputs in COUNTS], make(len(owners), inputs)
        pieces = [SearchWeight(*pair, kind) for pair in zip(weights, biases, strict=True)]
        structures = [piece.structure() for piece in pieces]
        array = (type(structures[0]) * len(structures))(*structures)
        for _ in map(use, LEVELS):
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
