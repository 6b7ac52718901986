"""The kernels of every op give the values of the naive definitions, and the gradients of every tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from econmt_ops.backends.triton import cells, scan_cells
from econmt_ops.core import chunks
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.layers import stepped
from tests.ops.cases import CASES, CELLS, SCANS, Sizes
from tests.ops.checking import DROPOUT, Variation, check
from tests.ops.helpers import Make, assert_close, assert_same_function, scatter_strides, to
from tests.ops.test_cells import TINY_GATES, check_closed_gates, check_tiny_shares

NAMES = [
    name
    for name, case in CASES.items()
    if "triton" in implementations_of(case.op.__name__) and not case.takes("decay")
]
FEW = [*SCANS, "gru", "lnlstm", "lnlstm-per-gate"]
"""Cells other than the LSTM."""
SMALL = {
    "ragged": Variation(Sizes(3, 3, 4, 3, 5, 7, 4, 1)),
    "reverse": Variation(Sizes(3, 3, 4, 3, 5, 7, 4, 2), options={"reverse": True}, scattered=True),
    "full": Variation(Sizes(1, 2, 3, 5, 5, 6, 3, 2), ragged=False, state=False, options=DROPOUT),
    "repeated": Variation(Sizes(3, 3, 4, 4, 6, 7, 5, 2), repeated=True),
    "wide": Variation(Sizes(2, 2, 3, 3, 33, 17, 12, 1)),
}


def variants(*, decoders: bool) -> list[tuple[str, str, str]]:
    """Names of cases, variations and stash levels, which follow one another."""
    return [
        (name, each, chunks.STASHES[(number + k) % len(chunks.STASHES)])
        for number, name in enumerate(NAMES)
        for k, each in enumerate(SMALL)
        if SMALL[each].serves(CASES[name])
        and name.startswith("attentional") == decoders
        and (each != "repeated" or decoders or "lstm" in name)
    ]


@pytest.fixture(autouse=True)
def _poisoned(poisoned_memory: None) -> None:
    """Memory that nobody has written shows."""


def options_of(name: str, stash: str) -> dict[str, str]:
    return {"stash": stash} if CASES[name].takes("stash") else {}


@pytest.mark.parametrize(
    ("name", "variation", "stash"),
    [
        pytest.param(*each, marks=[] if "lstm" in each[0] or each[1] == "ragged" else [pytest.mark.thorough])
        for each in variants(decoders=False)
    ],
)
@pytest.mark.sampled(20)
def test_layers(name: str, variation: str, stash: str, device: str) -> None:
    """In float32, at any stash level."""
    check(CASES[name], SMALL[variation], torch.float32, device, ["triton"], **options_of(name, stash))


@pytest.mark.sampled(14)
@pytest.mark.parametrize(("name", "variation", "stash"), variants(decoders=True))
def test_decoders(name: str, variation: str, stash: str, device: str) -> None:
    check(CASES[name], SMALL[variation], torch.float32, device, ["triton"], **options_of(name, stash))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_16_bits(name: str, dtype: torch.dtype, device: str) -> None:
    check(CASES[name], SMALL["ragged"], dtype, device, ["triton"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCANS)
def test_scans_in_float64(name: str, device: str) -> None:
    check(CASES[name], SMALL["reverse"], torch.float64, device, ["triton"])


@pytest.mark.parametrize(
    "kind", ["tanh", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("sum", "gru"))]
)
def test_a_first_coverage_of_any_layout(kind: str, device: str) -> None:
    """No step reads a coverage that it has begun to write."""
    case = CASES[f"attentional-lstm-{kind}-additive"]
    tensors = case.tensors

    def turned(make: Make, sizes: Sizes) -> dict[str, Any]:
        found = tensors(make, sizes)
        coverage = found["state"].coverage.transpose(0, 1).contiguous().transpose(0, 1)
        return {**found, "state": found["state"]._replace(coverage=coverage)}

    check(case._replace(tensors=turned), SMALL["ragged"], torch.float32, device, ["triton"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("part", [0, 1], ids=["outputs", "states"])
@pytest.mark.parametrize("name", FEW)
def test_one_result_may_be_asked_for_alone(name: str, part: int, device: str) -> None:
    case = CELLS[name]
    given = scatter_strides(case.tensors(Make(device), Sizes(2, 3, I=2, H=4, L=1)))
    assert_same_function(
        lambda **tensors: case.op(**tensors, implementation="triton")[part],
        lambda **tensors: case.op(**tensors, implementation="reference")[part],
        given,
        torch.float32,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SCANS)
def test_dropout_and_weights_of_another_type(name: str, device: str) -> None:
    """float32 weights under bfloat16 inputs: their gradients have their type."""
    given = to(torch.float32, CELLS[name].tensors(Make(device), Sizes(2, 4)))
    low = {**given, "inputs": given["inputs"].to(torch.bfloat16)}
    layers = [part.requires_grad_() for layer in low["layers"] for part in layer]
    found = []
    for implementation in ("triton", "recompute"):
        outputs, _ = CELLS[name].op(**low, dropout=0.4, dropout_seed=9, implementation=implementation)
        found.append(torch.autograd.grad(outputs.float().square().sum(), layers))
        assert all(part.dtype == torch.float32 for part in found[-1])
    assert_close(found[0], found[1], 6e-2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["gilr_lstm", "sru", "min_lstm"])
def test_chunks_of_steps(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of two blocks, the last one shorter; but for one cell, rows that end in the first."""
    monkeypatch.setattr(scan_cells, "_chunks", lambda *_: 3)
    sizes = Sizes(1 if name == "gilr_lstm" else 3, 40, I=2, H=3, L=1)
    check(CASES[name], Variation(sizes, ragged=sizes.B > 1), torch.float64, device, ["triton"])


@pytest.mark.thorough
def test_units_of_many_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_cells, "_UNITS", 4)
    check(CASES["sru"], Variation(Sizes(3, 5, I=10, H=10, L=1)), torch.float64, device, ["triton"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["gru", "lnlstm", "lnlstm-per-gate"])
def test_blocks_of_steps(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of two steps, by programs of four units, where no launch runs all steps."""
    monkeypatch.setattr(stepped, "gru_products", lambda *_: None)
    monkeypatch.setattr(
        stepped, "split_blocks", lambda steps, *_, **__: [(k, min(k + 2, steps)) for k in range(0, steps, 2)]
    )
    monkeypatch.setattr(cells, "_UNITS", 4)
    for ragged in (True, False):
        check(CASES[name], Variation(Sizes(3, 5, I=3, H=6, L=1), ragged), torch.float32, device, ["triton"])


@TINY_GATES
def test_min_lstm_divides_gates_too_small_for_a_float(
    dtype: torch.dtype, f: float, i: float, device: str
) -> None:
    check_tiny_shares("triton", device, dtype, f, i)


def test_min_lstm_has_gates_that_are_closed_and_passes_nan_on(device: str) -> None:
    check_closed_gates("triton", device)
