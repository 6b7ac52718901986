"""Slices of a vocabulary by kernels add up to the output layer of all of it in float64."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.parallel.pipeline.output import Slice, split_cross_entropy
from econmt_ops.backends.triton.sliced_cross_entropy import Labels
from econmt_ops.linear_cross_entropy import row_chunks
from econmt_ops.linear_cross_entropy.row_chunks import losses_of_slice
from tests.ops.helpers import assert_close
from tests.ops.triton.test_cross_entropy import TOLERANCE, arguments, by_torch, results


class _Told:
    """What ranks told, in order; in the first round nobody knows the others' numbers, in the second all."""

    def __init__(self) -> None:
        self.numbers: list[list[Tensor]] = []

    def rank(self, number: int) -> Any:
        """Its way to gather."""
        if number == len(self.numbers):
            self.numbers.append([])
        given = iter(range(10_000))

        def gather(tensor: Tensor) -> Any:
            chunk = next(given)
            if len(self.numbers[number]) == chunk:
                self.numbers[number].append(tensor.clone())
            return _Waiting(self, number, chunk)

        return gather


class _Waiting:
    def __init__(self, told: _Told, rank: int, chunk: int) -> None:
        self._told, self._rank, self._chunk = told, rank, chunk

    def wait(self) -> Tensor:
        own = self._told.numbers[self._rank][self._chunk]
        given = [
            each[self._chunk] if self._chunk < len(each) else torch.zeros_like(own)
            for each in self._told.numbers
        ]
        return torch.stack(given)


def _shares(given: dict[str, Any], sizes: list[int], smoothing: float, scale: Tensor) -> list[list[Tensor]]:
    """Of every rank the losses and its gradients; two rounds, since ranks run one after the other here."""
    told = _Told()
    hidden, weight, bias = given["hidden"], given["weight"], given["bias"]
    found: list[list[Tensor]] = []
    for _ in range(2):
        found = []
        for rank, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
            rows = slice(end - size, end)
            labels = Labels(given["targets"], rows.start, len(weight), max(sizes), smoothing, -7)
            own_bias = None if bias is None else bias[rows]
            gradients = (
                torch.empty_like(hidden).fill_(math.nan),
                torch.empty_like(weight[rows]).fill_(math.nan),
                None if own_bias is None else torch.empty_like(own_bias).fill_(math.nan),
            )
            losses = losses_of_slice(
                hidden, weight[rows], own_bias, labels, told.rank(rank), scale, gradients
            )
            found.append([losses, *(part for part in gradients if part is not None)])
    return found


def _check(
    device: str, rows: int, sizes: list[int], smoothing: float, bias: bool, dtype: torch.dtype = torch.float32
) -> None:
    given = arguments(rows, 6, sum(sizes), bias, dtype)
    options = {"label_smoothing": smoothing, "ignore_index": -7, "reduction": "none"}
    expected = results(by_torch, given, torch.tensor(0.3, dtype=torch.float64), dtype=dtype, **options)
    here = {name: None if value is None else value.to(device) for name, value in given.items()}
    found = _shares(here, sizes, smoothing, torch.tensor(0.3, device=device))
    for losses, *_ in found:
        torch.testing.assert_close(losses, found[0][0])
    sums = [found[0][0], sum(each[1].double() for each in found)]
    sums += [torch.cat([each[place] for each in found]) for place in range(2, len(found[0]))]
    assert_close(sums, expected, TOLERANCE[dtype])
    assert sums[1][2::3].eq(0).all()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("rows", "sizes"), [(1, [1]), (4, [3, 4]), (5, [1, 4097, 64])], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_slices_add_up(device: str, rows: int, sizes: list[int], smoothing: float, bias: bool) -> None:
    _check(device, rows, sizes, smoothing, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(device: str, dtype: torch.dtype) -> None:
    _check(device, 5, [40, 41], 0.1, True, dtype)


def test_chunks_are_those_of_the_widest_slice(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of 30 and 70 rows lie in buffers of 96 columns, not of 32, and are cut alike: five rows by two."""
    monkeypatch.setattr(row_chunks, "_ROUND_ROWS", 2)
    monkeypatch.setattr(row_chunks, "CHUNK_BYTES", 2 * 96 * 4)
    _check(device, 5, [30, 70], 0.1, True)


def test_a_pipeline_uses_them(device: str) -> None:
    """Of one rank the shares are all there is, and what they are times the scale."""
    given = arguments(6, 5, 9, True)
    here = {name: value.to(device) for name, value in given.items()}
    told = _Told()
    layer = Slice(here["weight"], here["bias"], 0, 9, 9)
    scale = torch.tensor(0.3, device=device)
    options: dict[str, Any] = {"label_smoothing": 0.1, "ignore_index": -7}
    found = split_cross_entropy(here["hidden"], here["targets"], layer, told.rank(0), scale=scale, **options)
    assert len(told.numbers[0]) == 1
    options["reduction"] = "sum"
    expected = results(by_torch, given, torch.tensor(0.3).double(), dtype=torch.float32, **options)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs.double(), rtol=1e-5, atol=1e-5)
