"""Predictions of updates on many ranks, by hand and in their limits."""

from __future__ import annotations

from typing import Any

import pytest

from econmt.parallel.pipeline.partition import Link, Piece
from econmt.parallel.reduction import BUCKET_BYTES
from scripts.bench.cost_model import Network, Stack, StepProfile, best, divisions, predict

FREE = Link(0.0, 0.0)


def profile(**changes: Any) -> StepProfile:
    """A step of 1 s of which 0.1 s are shared by stages, and four layers of 0.2 s."""
    pieces = [Piece(f"layer {number}", 0.02, 0.0, 0.0) for number in range(4)]
    found = StepProfile(1.0, (1, 8), (0.125, 1.0), 0.1, 1e6, (Stack(pieces, 10),))
    return found._replace(**changes)


def network(**changes: Any) -> Network:
    return Network(8, FREE, FREE, False)._replace(**changes)


def test_time_between_and_beyond_the_rows_that_were_timed() -> None:
    found = profile(rows=(2, 4, 8), seconds=(1.0, 2.0, 6.0))
    assert [found.update(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    assert profile(rows=(4,), seconds=(1.0,)).update(8) == 2.0
    falling = profile(rows=(2, 4), seconds=(1.0, 0.5))
    assert falling.update(100) == 1.0, "more rows never take less time"


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 2), (3, 4), (8, 14)])
def test_a_ring_by_hand(ranks: int, steps: int) -> None:
    one = network(within=Link(0.5, 0.25))
    assert one.all_reduce(64.0, ranks) == pytest.approx(steps * (0.5 + 0.25 * 64.0 / ranks))


def test_hosts_exchange_the_sums_of_their_ranks() -> None:
    two = network(ranks_per_host=4, within=Link(1.0, 0.0), between=Link(0.0, 1.0))
    assert two.all_reduce(80.0, 8) == pytest.approx(2 * 3 * 1.0 + 2 * 1 * 20.0 / 2)
    assert two.all_reduce(80.0, 2) == pytest.approx(2.0)
    assert two.all_reduce(80.0, 2, apart=4) == pytest.approx(2 * 80.0 / 2), "each on a host of its own"


def test_over_many_hosts_a_tree_is_taken() -> None:
    many = network(ranks_per_host=1, between=Link(1.0, 0.5))
    assert many.all_reduce(4.0, 1024) == pytest.approx(2 * (10 * 1.0 + 0.5 * 4.0))
    assert many.all_reduce(1000.0, 4) == pytest.approx(2 * 3 * (1.0 + 0.5 * 250.0))


@pytest.mark.parametrize("ranks", [2, 8])
def test_free_links_scale_perfectly_with_a_grown_batch(ranks: int) -> None:
    found = predict(profile(), network(), ranks, 1, 8 * ranks)
    assert (found.seconds, found.exchange) == (pytest.approx(1.0), 0.0)


def test_data_parallel_by_hand() -> None:
    slow = network(within=Link(0.0, 1e-7))
    found = predict(profile(), slow, 2, 1, 8)
    assert found.seconds == pytest.approx(profile().update(4) + 0.1)
    assert (found.exchange, found.sent) == (pytest.approx(0.1), pytest.approx(1e6))
    overlapping = predict(profile(gradient_bytes=4.0 * BUCKET_BYTES), slow._replace(overlaps=True), 2, 1, 16)
    travel = 4.0 * BUCKET_BYTES * 1e-7
    assert overlapping.exchange == pytest.approx(max(travel / 4, travel - 0.5)), (
        "the last bucket is never hidden"
    )
    single = predict(profile(), slow._replace(overlaps=True), 2, 1, 16)
    assert single.exchange == pytest.approx(0.1), "one bucket leaves when the backward pass ends"


def test_crowded_ranks_compute_more_slowly() -> None:
    crowded = profile(alone=0.5)
    assert predict(crowded, network(), 1, 1, 8).seconds == pytest.approx(0.5)
    assert predict(crowded, network(), 8, 1, 64).seconds == pytest.approx(1.0)
    assert predict(crowded, network(ranks_per_host=3), 2, 1, 16).seconds == pytest.approx(0.75)


def test_a_pipeline_by_hand() -> None:
    found = predict(profile(), network(), 1, 2, 8)
    # Two stages of 0.4 s in 10 chunks: 0.4 s and a tenth; 0.1 s not divided; half of the 0.1 s that are shared.
    assert found.chunks == (10,)
    assert found.seconds == pytest.approx(0.8 / 2 * 1.1 + 0.1 + 0.05)


def test_both_exchange_the_gradients_of_their_stage() -> None:
    slow = network(within=Link(0.0, 1e-7))
    both, data = (predict(profile(), slow, replicas, stages, 8) for replicas, stages in ((2, 2), (4, 1)))
    assert both.exchange == pytest.approx(0.05)
    assert both.sent == pytest.approx(0.5e6)
    assert data.sent == pytest.approx(1.5e6)


@pytest.mark.parametrize(("replicas", "stages"), [(2, 1), (1, 4), (2, 2)])
def test_slower_links_never_help(replicas: int, stages: int) -> None:
    pieces = [Piece("layer", 0.02, 0.0, 1e3) for _ in range(4)]
    given = profile(stacks=(Stack(pieces, 10),))
    times = [
        predict(given, network(within=Link(latency, latency / 1e3)), replicas, stages, 8).seconds
        for latency in (0.0, 1e-3, 1e-2, 1e-1)
    ]
    assert times == sorted(times)


def test_divisions_of_eight_ranks() -> None:
    assert list(divisions(8, "data", 4)) == [(8, 1)]
    assert list(divisions(8, "both", 4)) == [(4, 2), (2, 4)]
    assert list(divisions(8, "pipeline", 4)) == []
    assert list(divisions(4, "pipeline", 4)) == [(1, 4)]
    assert list(divisions(1, "data", 4)) == [(1, 1)]


def test_the_best_is_the_fastest_and_has_a_row_for_each_replica() -> None:
    found = best(profile(), network(), 8, "both", 8)
    assert found is not None
    assert (found.replicas, found.stages) == (4, 2)
    assert best(profile(), network(), 1024, "data", 8) is None
    assert best(profile(), network(), 1024, "data", 8 * 1024) is not None
    assert best(profile(stacks=()), network(), 2, "pipeline", 8) is None
