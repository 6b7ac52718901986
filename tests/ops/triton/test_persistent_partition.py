"""How walks of an LSTM layer are parted: within the limits of every device, or not at all."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton

from econmt_ops.backends.triton.partition import Partition, candidates, divide, launches_of
from econmt_ops.dispatch.device_limits import H200, DeviceLimits

A100 = DeviceLimits(108, 166_912, (8, 0), 40 << 30)
RTX_3090 = DeviceLimits(82, 101_376, (8, 6), 24 << 30)
DEVICES = {
    "H200": H200,
    "A100": A100,
    "RTX 3090": RTX_3090,
    "a seventh of an H200": H200._replace(multiprocessors=16),
    "a seventh of an A100": A100._replace(multiprocessors=14),
    "RTX 3050": RTX_3090._replace(multiprocessors=20),
    "RTX 4060": RTX_3090._replace(multiprocessors=24, capability=(8, 9)),
    "RTX 5070": RTX_3090._replace(multiprocessors=48, capability=(12, 0)),
    "RTX 5090": RTX_3090._replace(multiprocessors=170, capability=(12, 0)),
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
            found = divide(batch, hidden, products, limits, back=back, directions=directions)
            if found is None:
                assert hidden >= 250
                continue
            terms, outputs = (4 * hidden, found.units) if back else (hidden, 4 * found.units)
            assert found.shared(terms, outputs, products.itemsize) <= limits.shared
            assert found.chunk * found.split * found.chunks(terms) * found.team >= terms
            parts = found.parts(hidden)
            served = set()
            for programs, first_direction, first_group, groups in launches_of(
                found, directions, batch, hidden
            ):
                assert programs <= limits.multiprocessors
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
        ((256, 1024), (16, 128, 8), (16, 128, 8)),
    ):
        for backward, wanted in ((False, ahead), (True, back)):
            assert divide(batch, hidden, torch.bfloat16, H200, back=backward)[:3] == wanted


def test_groups_share_the_rows_evenly() -> None:
    partition = Partition(16, 64, 8, 512, 132)
    expected = {1: (1, 1), 64: (1, 64), 65: (2, 33), 80: (2, 40), 129: (3, 43)}
    assert {batch: (partition.groups(batch), partition.span(batch)) for batch in expected} == expected


def test_what_fits_no_device_is_not_served() -> None:
    assert divide(64, 1601, torch.bfloat16, H200, back=False) is None
    assert divide(64, 1024, torch.bfloat16, DEVICES["a seventh of an H200"], back=True) is None
    assert divide(64, 1024, torch.bfloat16, DEVICES["RTX 3090"], back=False) is None
    assert not list(candidates(2048, torch.bfloat16, H200, back=True))


def test_directions_together_or_apart() -> None:
    for multiprocessors, launches in ((132, 1), (20, 2)):
        limits = H200._replace(multiprocessors=multiprocessors)
        found = divide(64, 512, torch.bfloat16, limits, back=False, directions=2)
        assert found.launches(2, 64, 512) == launches


def test_launches_in_turn_where_not_all_rows_fit() -> None:
    partition = Partition(16, 16, 4, 512, 132)
    assert list(launches_of(partition, 1, 128, 512)) == [(128, 0, 0, 4), (128, 0, 4, 4)]
    assert list(launches_of(partition, 2, 64, 512)) == [(128, 0, 0, 4), (128, 1, 0, 4)]


@pytest.mark.parametrize(
    ("multiprocessors", "largest"),
    [(20, 320), (24, 384), (28, 448), (34, 512), (46, 512), (82, 640), (170, 704)],
)
def test_the_largest_layers_of_small_cards(multiprocessors: int, largest: int) -> None:
    """Of layers with 32 rows; larger ones run step by step."""
    limits = RTX_3090._replace(multiprocessors=multiprocessors)
    served = [
        hidden
        for hidden in range(64, 1025, 64)
        if all(divide(32, hidden, torch.bfloat16, limits, back=back) for back in (False, True))
    ]
    assert max(served) == largest
    assert served == list(range(64, largest + 1, 64))


def test_walks_that_would_take_longer_than_single_steps_are_not_divided() -> None:
    """384 rows of 512 units need a launch for every 32 of them on a card with 34 multiprocessors."""
    limits = RTX_3090._replace(multiprocessors=34)
    assert divide(32, 512, torch.bfloat16, limits, back=False) is not None
    assert divide(384, 512, torch.bfloat16, limits, back=False) is None


@pytest.mark.parametrize("device", ["RTX 3050", "RTX 4060", "RTX 5070", "A100"])
def test_two_directions_have_a_partition_where_one_has(device: str) -> None:
    for batch, hidden, back in itertools.product((17, 64, 100, 384), range(32, 800, 96), (False, True)):
        one, both = (
            divide(batch, hidden, torch.bfloat16, DEVICES[device], back=back, directions=count)
            for count in (1, 2)
        )
        assert one is None or both is not None


def test_programs_of_other_tensor_cores_do_not_split_products_and_take_all_registers() -> None:
    for limits in (RTX_3090, A100, DEVICES["RTX 5070"]):
        for back in (False, True):
            for each in candidates(256, torch.bfloat16, limits, back=back):
                assert each.split == 1
                assert each.registers == 255
                assert each.chunks(1024 if back else 256) == 1 or each.chunk >= 64
    assert {each.registers for each in candidates(256, torch.bfloat16, H200, back=True)} == {None}
