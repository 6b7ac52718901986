"""Every implementation of every op gives the values of a naive definition, and the gradients of every tensor.

Padding holds NaN or infinity, rows may be empty, and tensors need not be contiguous; `checking.check` has the comparison.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import econmt_ops
from econmt_ops import additive_attention
from econmt_ops.backends import c as native
from econmt_ops.core import chunks
from econmt_ops.layers.op import OPS
from tests.ops import helpers
from tests.ops.cases import CASES, Sizes
from tests.ops.checking import DROPOUT, VARIATIONS, Variation, check, variants

LOOPS = [name for name, case in CASES.items() if case.takes("stash") and not case.takes("decay")]
"""Cases with stash levels."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch, poisoned_memory: None) -> None:
    """Workspaces of a few steps, of a row of attention and two of values; new memory holds NaN."""
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 3 * 2 * 4 * 7 * 8)
    monkeypatch.setattr(chunks, "_PART_BYTES", 2 * 3 * 4 * 4)
    monkeypatch.setattr("econmt_ops.layers.scanned._BLOCK_BYTES", 64)


def test_every_layer_has_a_case() -> None:
    assert set(OPS) <= {case.op.__name__ for case in CASES.values()}


@pytest.mark.parametrize(("name", "variation"), variants())
def test_values_and_gradients(name: str, variation: str, device: str) -> None:
    case = CASES[name]
    check(case, VARIATIONS[variation], torch.float64, device, case.implementations(device))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(
            name,
            dtype,
            marks=[pytest.mark.thorough] if (k + n) % (9 if name.startswith("attentional") else 2) else [],
        )
        for n, name in enumerate(CASES)
        for k, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))
    ],
    ids=str,
)
def test_types(name: str, dtype: torch.dtype, device: str) -> None:
    """In float32 by the variation with two directions and masks, in 16 bits with lengths alone."""
    case = CASES[name]
    variation = VARIATIONS["variational" if dtype == torch.float32 else "ragged"]
    check(case, variation, dtype, device, case.implementations(device), _most_error(name, dtype, device))


def _most_error(name: str, dtype: torch.dtype, device: str = "cpu") -> float:
    """Layer normalisation of a few units enlarges rounding to 16 bits: errors of autograd alone reach 0.16.

    The tanh of cuDNN's narrow layers in float32 errs by 7e-6; PyTorch's own tests of them allow 5e-5, too.
    """
    if dtype == torch.float32 and device == "cuda" and (name in ("gru", "lstm") or "unfed" in name):
        return 5e-5
    normalises = "lnlstm" in name or "norm" in name
    return helpers.TOLERANCE[dtype] * (2.0 if normalises and dtype.itemsize == 2 else 1.0)


@pytest.mark.parametrize("library", [True, False], ids=["library", "tensors"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stash", chunks.STASHES)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.sampled(24)
@pytest.mark.usefixtures("small_blocks")
def test_stash_levels_in_blocks(name: str, stash: str, dtype: torch.dtype, library: bool) -> None:
    """Sequences that are cut into blocks, by rows that repeat, with and without the C library."""
    number = chunks.STASHES.index(stash)
    options = {**DROPOUT, "reverse": number % 2 == 0}
    variation = Variation(Sizes(3, 4, 3, 6, 7, 9), options=options, repeated=number % 2 == 1)
    with nullcontext() if library else native.without():
        check(CASES[name], variation, dtype, "cpu", ["recompute"], _most_error(name, dtype), stash=stash)


@pytest.mark.parametrize("attention", ["additive", "layer_norm", "general", "dot"])
@pytest.mark.parametrize("steps", [1, 3])
def test_finite_padding_need_not_be_cleaned(steps: int, attention: str, device: str) -> None:
    case, lengths = CASES[f"attentional-lstm-{attention}"], torch.tensor([5, 1, 0, 4])
    given = case.tensors(helpers.Make(device), Sizes(4, steps, 5))
    for name in case.implementations(device):
        expected, found = (
            helpers.values_and_gradients(
                lambda name=name, clean=clean, **tensors: case.op(
                    **tensors, **case.options, lengths=lengths, clean=clean, implementation=name
                ),
                given,
            )
            for clean in (False, True)
        )
        helpers.assert_close(found[0], expected[0], 0.0)
        helpers.assert_close(found[1], expected[1], 1e-12)
    broken = {**given, "values": helpers.poisoned(given["values"], lengths)}
    outputs = case.op(**broken, **case.options, lengths=lengths, clean=True, implementation="reference")[0]
    assert not outputs.isfinite().all()  # the promise is relied on


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["lstm", "attentional-lstm-additive", "attentional-lstm-additive-unfed"])
def test_cell_states_are_not_rounded_between_steps(name: str, dtype: torch.dtype, device: str) -> None:
    """The forget gate is open and 0.001 is added in every step: in bfloat16 the sum would stop at 0.25."""
    case = CASES[name]
    given = helpers.to(dtype, case.tensors(helpers.Make(device), Sizes(1, 500, 1, 1, 1, 1, 1, 1)))
    given["state"] = None
    layers = given["layers"] if name == "lstm" else given["weights"].layers
    zeros = {part: torch.zeros_like(getattr(layers[0], part)) for part in ("input", "hidden")}
    bias = torch.tensor([50.0, 50.0, 0.001, 50.0], device=device, dtype=dtype)
    changed = {"layers": (layers[0]._replace(**zeros, bias=bias),)}
    given |= changed if name == "lstm" else {"weights": given["weights"]._replace(**changed)}
    for implementation in case.implementations(device):
        *_, state = case.op(**given, **case.options, lengths=None, implementation=implementation)
        ((_, c),) = state if name == "lstm" else state.layers
        assert float(c) == pytest.approx(500 * float(bias[2].float().tanh()), rel=1e-4)


def test_one_layer_has_no_dropout(device: str) -> None:
    for name in ("lstm", "gru", "sru", "attentional-lstm-additive"):
        case = CASES[name]
        given = {**case.tensors(helpers.Make(device), Sizes(L=1)), "lengths": None}
        for implementation in case.implementations(device):
            dropped = case.op(**given, dropout=0.9, dropout_seed=1, implementation=implementation)
            assert dropped[0].equal(case.op(**given, implementation=implementation)[0])


@helpers.each_implementation("additive_attention")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_accumulate_in_float32(dtype: torch.dtype, implementation: str, device: str) -> None:
    # One score is 1024 times 1/256, the other 0; a sum in bfloat16 would stop at 1.
    keys = torch.tensor([50.0, 0.0], dtype=dtype, device=device).view(1, 2, 1).expand(1, 2, 1024)
    weight = torch.full((1024,), 2.0**-8, dtype=dtype, device=device)
    query = torch.zeros(1, 1, 1024, dtype=dtype, device=device)
    _, weights = additive_attention(query, keys, keys, weight, lengths=None, implementation=implementation)
    helpers.assert_close([weights[0, 0]], [torch.tensor([4.0, 0.0], device=device).softmax(0)], 4e-3)


def test_gradients_of_many_blocks_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step adds about as much to a weight; in bfloat16 the sum would stop at 256 steps."""
    monkeypatch.setattr(chunks, "_BLOCK_BYTES", 1)
    wanted = []
    for dtype, implementation in ((torch.float32, "auto"), (torch.bfloat16, "recompute")):
        parts = [torch.full(shape, 0.25, dtype=dtype) for shape in ((6, 1), (6, 2), (6,), (6,))]
        weights = econmt_ops.GRUWeights(*(part.requires_grad_() for part in parts))
        inputs = torch.ones(1, 400, 1, dtype=dtype)
        outputs, _ = econmt_ops.gru(inputs, (weights,), implementation=implementation)
        wanted.append([part.float() for part in torch.autograd.grad(outputs.sum(), parts)])
    for exact, found in zip(*wanted, strict=True):
        torch.testing.assert_close(found, exact, rtol=0.0, atol=0.1 * float(exact.max()))
