"""The simulated caching allocator cuts, joins and rounds as PyTorch's does."""

from __future__ import annotations

import random

from econmt_memory.estimate.allocator import BLOCK, CachingAllocator

MIB = 1 << 20


def test_one_request() -> None:
    for size, allocated, reserved in (
        *((1, 512, 2 * MIB), (512, 512, 2 * MIB), (513, 1024, 2 * MIB), (MIB, MIB, 2 * MIB)),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        # A segment of its own; the rest of up to 1 MiB stays part of the block.
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB + 512, 12 * MIB, 12 * MIB),
        (12 * MIB + 512, 12 * MIB + 512, 14 * MIB),
    ):
        allocator = CachingAllocator()
        allocator.allocate(size)
        assert (allocator.allocated, allocator.reserved) == (allocated, reserved), size


def test_segments_are_shared_and_kept() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(MIB // 2) for _ in range(5)]
    assert allocator.reserved == 4 * MIB
    for block in blocks:
        allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, 4 * MIB)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (5 * MIB // 2, 4 * MIB)
    allocator.allocate(MIB)
    assert allocator.reserved == 4 * MIB  # the freed halves are one block again
    allocator.allocate(2 * MIB)
    assert allocator.reserved == 24 * MIB  # large requests have segments of their own kind


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    first, wall, second, _ = (allocator.allocate(size * BLOCK) for size in (10, 1, 4, 1))
    allocator.free(first)
    allocator.free(second)
    assert allocator.allocate(3 * BLOCK) == second
    assert allocator.allocate(5 * BLOCK) == first
    assert allocator.allocate(5 * BLOCK) == first + 5 * BLOCK
    allocator.free(wall)
    assert allocator.allocate(BLOCK) == wall  # the first of the smallest that are left
    assert allocator.allocate(BLOCK) == second + 3 * BLOCK


def test_fragments_do_not_help_a_large_request() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(2 * MIB) for _ in range(10)]
    assert allocator.reserved == 20 * MIB
    for block in blocks[::2]:
        allocator.free(block)
    allocator.allocate(3 * MIB)
    assert allocator.reserved == 40 * MIB
    assert allocator.peak_allocated == 20 * MIB


def test_other_pools_take_nothing_of_the_first_ones_and_give_back_what_is_theirs() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(2 * MIB), allocator.allocate(2 * MIB)
    allocator.free(first)
    allocator.begin_pools()
    other = allocator.allocate(2 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.free(second)
    assert allocator.allocate(2 * MIB) == other + 2 * MIB
    allocator.free(other)
    assert allocator.allocate(2 * MIB) == other
    assert (allocator.allocated, allocator.reserved) == (4 * MIB, 40 * MIB)


def test_blocks_never_overlap_and_everything_comes_back() -> None:
    generator = random.Random(1)
    allocator = CachingAllocator()
    used: dict[int, int] = {}
    for _ in range(2000):
        if used and generator.random() < 0.5:
            address = generator.choice(list(used))
            allocator.free(address)
            del used[address]
        else:
            size = generator.choice((1, 600, 5000, MIB - 7, MIB + 1, 7 * MIB, 30 * MIB))
            address = allocator.allocate(size)
            assert all(address + size <= begin or end <= address for begin, end in used.items())
            used[address] = address + size
        assert sum(end - begin for begin, end in used.items()) <= allocator.allocated <= allocator.reserved
    for address in used:
        allocator.free(address)
    assert allocator.allocated == 0
    reserved = allocator.reserved
    allocator.allocate(30 * MIB)
    assert allocator.reserved == reserved
