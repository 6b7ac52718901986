"""How walks of an LSTM layer are parted: within the limits of every device, or not at all."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton

from econmt_ops.backends.triton.persistent import Limits, Partition, _launches, candidates, limits_of, plan

H200 = Limits(132, 232_448)
DEVICES = {
    "H200": H200,
    "A100": Limits(108, 166_912),
    "RTX 3090": Limits(82, 101_376),
    "a seventh of an H200": Limits(16, 232_448),
    "a seventh of an A100": Limits(14, 166_912),
    "RTX 3050": Limits(16, 101_376),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("back", [False, True])
def test_partitions_are_resident_at_once_and_serve_every_row(device: str, back: bool) -> None:
    limits = DEVICES[device]
    sizes = itertools.product(
        (1, 7, 64, 100, 384), (1, 5, 33, 256, 500, 512, 768, 1024, 1025, 1500, 1600, 1601), (1, 2)
    )
    for batch, hidden, directions in sizes:
        for products in (torch.bfloat16, torch.float32):
            found = plan(batch, hidden, products, limits, back=back, directions=directions)
            if found is None:
                assert hidden >= 250
                continue
            terms, outputs = (4 * hidden, found.units) if back else (hidden, 4 * found.units)
            assert found.shared(terms, outputs, products.itemsize) <= limits.shared
            assert found.chunk * found.split * found.chunks(terms) * found.team >= terms
            parts = found.parts(hidden)
            served = set()
            for programs, first_direction, first_group, groups in _launches(found, directions, batch, hidden):
                assert programs <= limits.processors
                assert programs % (parts * groups) == 0
                for direction in range(programs // (parts * groups)):
                    new = {(first_direction + direction, first_group + group) for group in range(groups)}
                    assert not new & served
                    served |= new
            assert len(served) == directions * found.groups(batch)
            assert found.groups(batch) == triton.cdiv(batch, found.span(batch))
            assert found.span(batch) <= found.rows


@pytest.mark.parametrize(("hidden", "units"), [(1, {16}), (16, {16}), (17, {16, 32})])
def test_no_program_has_more_than_twice_the_units_of_a_layer(hidden: int, units: set[int]) -> None:
    for back in (False, True):
        assert {each.units for each in candidates(hidden, torch.bfloat16, H200, back=back)} == units


def test_the_sizes_that_were_measured_get_the_best_partitions() -> None:
    for (batch, hidden), ahead, back in (
        ((64, 512), (16, 16, 8), (32, 8, 4)),
        ((128, 512), (16, 32, 8), (32, 16, 8)),
        ((64, 1024), (16, 32, 8), (16, 32, 8)),
        ((128, 1024), (16, 64, 8), (16, 64, 8)),
    ):
        for backward, wanted in ((False, ahead), (True, back)):
            found = plan(batch, hidden, torch.bfloat16, H200, back=backward)
            assert found is not None
            assert found[:3] == wanted


def test_groups_share_the_rows_evenly() -> None:
    partition = Partition(16, 64, 8, 512, 132)
    assert [(batch, partition.groups(batch), partition.span(batch)) for batch in (1, 64, 65, 80, 129)] == [
        (1, 1, 1),
        (64, 1, 64),
        (65, 2, 33),
        (80, 2, 40),
        (129, 3, 43),
    ]


def test_what_fits_no_device_is_not_served() -> None:
    assert plan(64, 1601, torch.bfloat16, H200, back=False) is None
    assert plan(64, 1024, torch.bfloat16, DEVICES["a seventh of an H200"], back=True) is None
    assert plan(64, 1024, torch.bfloat16, DEVICES["RTX 3090"], back=False) is None
    assert not list(candidates(2048, torch.bfloat16, H200, back=True))


def test_directions_together_or_apart() -> None:
    shared = {"products": torch.bfloat16, "limits": H200, "back": False, "directions": 2}
    together = plan(64, 512, together=True, **shared)  # type: ignore[arg-type]
    apart = plan(64, 512, together=False, **shared)  # type: ignore[arg-type]
    assert together is not None
    assert apart is not None
    assert together.launches(2, 64, 512) == 1
    assert apart.launches(2, 64, 512) == 2
    assert plan(128, 1024, together=True, **shared) is None  # type: ignore[arg-type]


def test_launches_in_turn_where_not_all_rows_fit() -> None:
    partition = Partition(16, 16, 4, 512, 132)
    assert list(_launches(partition, 1, 128, 512)) == [(128, 0, 0, 4), (128, 0, 4, 4)]
    assert list(_launches(partition, 2, 64, 512)) == [(128, 0, 0, 4), (128, 1, 0, 4)]


def test_without_a_gpu_limits_are_those_of_an_h200() -> None:
    assert limits_of(torch.device("cpu")) == H200
