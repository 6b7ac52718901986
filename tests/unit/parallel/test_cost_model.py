"""What the cost model predicts, against sums by hand and against what must hold of any machine."""

from __future__ import annotations

from math import inf

import pytest

from econmt.parallel.cost_layers import (
    Batch,
    Division,
    Layer,
    Profile,
    Side,
    balanced,
    partition,
    value_at,
)
from econmt.parallel.cost_model import KINDS, best, divisions, memory_bytes, predict
from econmt.parallel.cost_network import (
    FREE,
    Group,
    Link,
    Machine,
    all_gather_seconds,
    all_reduce_bytes,
    all_reduce_seconds,
)
from econmt.parallel.cost_schedule import BUCKET

LINK = Link("link", 1e-3, 1e6)
SLOW = Link("slow", 5e-3, 1e5)
MACHINE = Machine("test", 8, LINK, SLOW)
BATCH = Batch(8, 0, 12, 8 * 12.0)


def recurrent(
    name: str, side: Side = "target", *, whole: bool = False, call: float = 0.0, waits: bool = False
) -> Layer:
    """2 ms a step and 1 ms a row and step forward, twice that backward; 1,000 parameters.

    Where weights' gradients wait these are 1 ms a row and step of the backward pass, and 5 ms beside.
    """
    forward, backward = ((0.0, 2e-3), (10.0, 12e-3)), ((0.0, 4e-3), (10.0, 24e-3))
    node = "encoder" if side == "source" else "decoder"
    made = Layer(name, side, node, 1000, "steps", forward, backward, (call, call), whole, 10, 40.0)
    if not waits:
        return made
    return made._replace(backward=((0.0, 4e-3), (10.0, 14e-3)), gather=((0.0, 0.0), (10.0, 10e-3)), once=5e-3)


def output(parameters: float = 2000.0) -> Layer:
    """0.1 ms a position forward, 0.2 backward."""
    return Layer(
        "output",
        "target",
        "output",
        parameters,
        "positions",
        ((0.0, 0.0), (1e3, 0.1)),
        ((0.0, 0.0), (1e3, 0.2)),
    )


def profile(layers: int = 4, *, call: float = 0.0) -> Profile:
    return Profile((*(recurrent(f"layer {n}", call=call) for n in range(layers)), output()), update=1e-6)


def translation(*, whole: bool = False) -> Profile:
    below = [recurrent("encoder 1", "source", whole=whole), recurrent("encoder 2", "source")]
    return Profile((*below, recurrent("decoder 1"), recurrent("decoder 2"), output()), update=1e-6)


LAYER_SECONDS = 3 * 12 * 10e-3
"""Of one layer, both ways, with 8 rows: 12 steps of 2 + 8 ms, three times."""


def alone(layers: int = 4) -> float:
    """Seconds of :func:`profile` on one rank: layers, 96 positions of the output layer, the update."""
    return layers * LAYER_SECONDS + 96 * 0.3e-3 + (layers * 1000 + 2000) * 1e-6


def test_a_function_goes_on_beyond_its_points() -> None:
    points = ((1.0, 2.0), (3.0, 6.0), (5.0, 7.0))
    assert value_at(points, 2.0) == pytest.approx(4.0)
    assert value_at(points, 3.0) == pytest.approx(6.0)
    assert value_at(points, 4.0) == pytest.approx(6.5)
    assert value_at(points, 9.0) == pytest.approx(9.0)
    assert value_at(points, 0.5) == pytest.approx(1.0)
    assert value_at(points, 0.0) == 0.0
    assert value_at(((1.0, 2.0), (2.0, 6.0)), 0.0) == 0.0, "no time is less than none"
    assert value_at(((4.0, 2.5),), 100.0) == 2.5


@pytest.mark.parametrize(("ranks", "steps"), [(1, 0), (2, 2), (3, 4), (8, 14)])
def test_a_ring_by_hand(ranks: int, steps: int) -> None:
    machine = Machine("one host", 8, Link("", 1.0, 10.0), SLOW)
    found = all_reduce_seconds(80.0, Group.of(machine, ranks))
    assert found == pytest.approx(steps * (1.0 + 8.0 / ranks))
    assert all_gather_seconds(80.0, Group.of(machine, ranks)) == pytest.approx(found / 2.0)
    assert all_reduce_bytes(80.0, ranks) == pytest.approx(steps * 80.0 / ranks)


def test_hosts_exchange_what_is_summed_inside() -> None:
    machine = Machine("hosts", 2, Link("", 1.0, 10.0), Link("", 3.0, 5.0))
    group = Group.of(machine, 6)
    assert (group.local, group.hosts, group.size) == (2, 3, 6)
    inside = 2 * (1.0 + 40.0 / 10.0)
    between = 4 * (3.0 + 40.0 / 3 / 5.0)  # a ring over three hosts of what one of two ranks has
    assert all_reduce_seconds(80.0, group) == pytest.approx(inside + between)


def test_over_many_hosts_a_tree_is_taken() -> None:
    machine = Machine("hosts", 1, FREE, Link("", 1.0, 10.0))
    group = Group.of(machine, 64)
    assert all_reduce_seconds(10.0, group) == pytest.approx(2 * 6 * 1.0 + 2.0)
    assert all_reduce_seconds(1e6, group) == pytest.approx(126 * 1.0 + 2e5 * 63 / 64)


def test_stages_of_pipelines_are_neighbours_so_their_groups_spread() -> None:
    assert Group.of(MACHINE, 4, stride=4)[:2] == (2, 2)
    assert Group.of(MACHINE, 4, stride=16)[:2] == (1, 4)


@pytest.mark.parametrize("batch", [BATCH, Batch(3, 0, 7, 20.0)])
def test_one_rank_takes_its_own_time(batch: Batch) -> None:
    found = predict(profile(), MACHINE, Division(), [batch])
    layers = 4 * 3 * batch.target * (2 + batch.rows) * 1e-3
    assert found.seconds == pytest.approx(layers + batch.rows * batch.target * 0.3e-3 + 6000e-6)
    assert (found.communication, found.idle, found.wire) == (0.0, 0.0, 0.0)
    assert found.tokens_per_second == pytest.approx(batch.tokens / found.seconds)


def test_shapes_count_by_their_share_of_the_updates() -> None:
    short, long = Batch(8, 0, 6, 40.0, share=3.0), Batch(8, 0, 12, 90.0, share=1.0)
    seconds = [predict(profile(), MACHINE, Division(), [each]).seconds for each in (short, long)]
    found = predict(profile(), MACHINE, Division(), [short, long])
    assert found.seconds == pytest.approx((3 * seconds[0] + seconds[1]) / 4)
    assert found.tokens == pytest.approx((3 * 40.0 + 90.0) / 4)


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
def test_free_links_scale_perfectly_with_a_grown_batch(ranks: int) -> None:
    free = MACHINE.without_exchanges()
    found = predict(profile(), free, Division(ranks), [BATCH.grown(ranks)])
    one = predict(profile(), free, Division(), [BATCH])
    assert found.tokens_per_second == pytest.approx(ranks * one.tokens_per_second)


def test_a_fixed_batch_gains_less_than_ranks_since_a_step_has_a_latency() -> None:
    found = predict(profile(), MACHINE.without_exchanges(), Division(4), [BATCH])
    # Two rows a rank: 12 steps of 4 ms instead of 10.
    assert found.seconds == pytest.approx(4 * 3 * 12 * 4e-3 + 24 * 0.3e-3 + 6000e-6)


def test_data_parallel_by_hand_without_overlap() -> None:
    machine = MACHINE._replace(overlaps=False)
    found = predict(profile(), machine, Division(2), [BATCH])
    computing = 4 * 3 * 12 * 6e-3 + 48 * 0.3e-3 + 6000e-6
    exchanges = [2 * (1e-3 + size / 2 / 1e6) for size in (4 * 2000, 4 * 4000, 8, 8)]
    assert found.seconds == pytest.approx(computing + sum(exchanges))
    assert found.communication == pytest.approx(sum(exchanges) / found.seconds)
    assert found.wire == pytest.approx(4 * 6000)


def test_the_output_layers_gradient_travels_while_the_layers_go_back() -> None:
    apart = predict(profile(), MACHINE._replace(overlaps=False), Division(2), [BATCH]).seconds
    found = predict(profile(), MACHINE, Division(2), [BATCH]).seconds
    assert apart - found == pytest.approx(2 * (1e-3 + 4 * 2000 / 2 / 1e6)), "all but that one is waited for"


def test_overlap_hides_no_more_than_the_backward_pass() -> None:
    slow = MACHINE._replace(within=Link("", 0.0, 1.0))
    found = predict(profile(), slow, Division(2), [BATCH])
    total = all_reduce_seconds(4 * 6000, Group.of(slow, 2)) + 2 * all_reduce_seconds(8, Group.of(slow, 2))
    assert total <= found.seconds <= total + 4 * 3 * 12 * 6e-3 + 48 * 0.3e-3 + 6000e-6


def test_large_gradients_travel_in_buckets() -> None:
    large = profile()._replace(layers=(*profile().body, output(2.5 * BUCKET / 4)))
    machine = MACHINE._replace(overlaps=False)
    one = predict(large, machine._replace(within=LINK._replace(latency=0.0)), Division(2), [BATCH]).seconds
    found = predict(large, machine, Division(2), [BATCH]).seconds
    assert found - one == pytest.approx(2e-3 * (3 + 1 + 2)), "three buckets, the layers, two small exchanges"


def test_a_wavefront_by_hand() -> None:
    free = MACHINE.without_exchanges()
    found = predict(profile(), free, Division(1, 4, chunks=6), [BATCH])
    # A layer's chunk takes 2 steps of 10 ms; the last stage ends after 6 + 3 of them, and back twice as long.
    assert found.seconds == pytest.approx(3 * (6 + 3) * 20e-3 + 96 * 0.3e-3 / 4 + 1500e-6)
    busiest = LAYER_SECONDS + 96 * 0.3e-3 / 4 + 1500e-6
    assert found.idle == pytest.approx((found.seconds - busiest) / found.seconds)


def test_without_chunks_a_pipeline_of_one_micro_batch_gains_only_the_output_layer() -> None:
    found = predict(profile(), MACHINE.without_exchanges(), Division(1, 2), [BATCH])
    assert found.seconds == pytest.approx(4 * LAYER_SECONDS + 96 * 0.3e-3 / 2 + 3000e-6)


def test_micro_batches_of_rows_pay_the_latency_of_a_step_again() -> None:
    found = predict(profile(), MACHINE.without_exchanges(), Division(1, 2, micro_batches=2), [BATCH])
    # Two layers of 12 steps with 4 rows each, three such times forward, and back twice as long.
    assert found.seconds == pytest.approx(3 * (3 * 2 * 12 * 6e-3) + 96 * 0.3e-3 / 2 + 3000e-6)


def test_each_chunk_pays_for_its_call() -> None:
    free = MACHINE.without_exchanges()
    cheap = predict(profile(), free, Division(1, 4, chunks=6), [BATCH]).seconds
    dear = predict(profile(call=7e-3), free, Division(1, 4, chunks=6), [BATCH]).seconds
    assert dear - cheap == pytest.approx(2 * 9 * 7e-3)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_gradients_of_weights_are_made_once_after_the_last_chunk(micro_batches: int) -> None:
    layers = tuple(recurrent(f"layer {number}", waits=True) for number in range(4))
    model = Profile((*layers, output()), update=1e-6)
    free = MACHINE.without_exchanges()
    alone_there = predict(model, free, Division(), [BATCH]).seconds
    assert alone_there == pytest.approx(alone() + 4 * 5e-3), "alone it makes no difference when"
    found = predict(model, free, Division(1, 4, 6, micro_batches), [BATCH])
    # Chunks of two steps: 10 ms forward, 12 backward, with half of the rows 6 and 8; then the first stage's gradients.
    chunk = 2 * (10e-3 + 12e-3) if micro_batches == 1 else 2 * (6e-3 + 8e-3)
    waiting = 12 * 8e-3 + 5e-3
    rest = 96 * 0.3e-3 / 4 + 1500e-6
    assert found.seconds == pytest.approx((6 * micro_batches + 3) * chunk + waiting + rest)
    whole = (recurrent("both ways", "source", whole=True, waits=True), *layers[:1], output())
    batch = Batch(8, 12, 12, 96.0)
    both = predict(Profile(whole, update=0.0), free, Division(1, 2, 6), [batch]).seconds
    # Each direction of the first layer, its gradients in it, has a rank of its own.
    assert both == pytest.approx((12 * 30e-3 + 5e-3) / 2 + 12 * 22e-3 + waiting + 96 * 0.3e-3 / 2)


def test_chunks_travel_while_the_next_one_is_computed() -> None:
    link = Link("", 1e-3, inf)
    found = predict(profile(), MACHINE._replace(within=link), Division(1, 4, chunks=6), [BATCH]).seconds
    free = predict(profile(), MACHINE.without_exchanges(), Division(1, 4, chunks=6), [BATCH]).seconds
    # Three hops each way are waited for, once; the output layer's hidden vectors take three hops there and back, the
    # sums a ring of 6, the loss and the tokens one each.
    assert found - free == pytest.approx((2 * 3 + 2 * 3 + 6 + 2 * 6) * 1e-3)


def test_a_rank_that_cannot_do_two_things_pays_for_every_message() -> None:
    link = Link("", 1e-3, inf)
    overlapping = predict(profile(), MACHINE._replace(within=link), Division(1, 2, chunks=6), [BATCH]).seconds
    machine = MACHINE._replace(within=link, overlaps=False)
    assert predict(profile(), machine, Division(1, 2, chunks=6), [BATCH]).seconds > overlapping + 5e-3


def test_the_decoder_waits_for_the_whole_encoder() -> None:
    batch = Batch(8, 12, 12, 96.0)
    free = MACHINE.without_exchanges()
    found = predict(translation(), free, Division(1, 2, chunks=6), [batch]).seconds
    assert found == pytest.approx(2 * 3 * (6 + 1) * 20e-3 + 96 * 0.3e-3 / 2 + 3000e-6)


def test_a_layer_that_reads_from_both_ends_stops_the_wavefront() -> None:
    batch = Batch(8, 12, 12, 96.0)
    free = MACHINE.without_exchanges()
    found = predict(translation(whole=True), free, Division(1, 2, chunks=6), [batch]).seconds
    encoder = 3 * (12 / 2 + 12) * 10e-3  # a direction a rank
    assert found == pytest.approx(encoder + 3 * (6 + 1) * 20e-3 + 96 * 0.3e-3 / 2 + 3000e-6)


def test_crowded_ranks_compute_more_slowly() -> None:
    machine = MACHINE.without_exchanges()._replace(crowding=((1.0, 1.0), (2.0, 1.2)))
    crowded = predict(profile(), machine, Division(2), [BATCH]).seconds
    alone_there = predict(profile(), machine, Division(), [BATCH]).seconds
    free = predict(profile(), MACHINE.without_exchanges(), Division(2), [BATCH]).seconds
    assert crowded == pytest.approx(1.2 * free)
    assert alone_there == pytest.approx(alone())
    many = predict(profile(), machine, Division(8), [BATCH]).seconds
    assert many == pytest.approx(
        1.2 * predict(profile(), MACHINE.without_exchanges(), Division(8), [BATCH]).seconds
    )


@pytest.mark.parametrize(
    "division", [Division(4), Division(1, 4, 6), Division(2, 2, 3, 2), Division(4, sharded=True)]
)
@pytest.mark.parametrize("overlaps", [True, False])
def test_slower_links_never_help(division: Division, overlaps: bool) -> None:
    def seconds(link: Link) -> float:
        return predict(profile(), Machine("", 8, link, SLOW, overlaps), division, [BATCH]).seconds

    latencies = [seconds(Link("", latency, 1e6)) for latency in (0.0, 1e-4, 1e-3, 1e-2)]
    bandwidths = [seconds(Link("", 1e-4, bandwidth)) for bandwidth in (inf, 1e8, 1e6, 1e4)]
    assert latencies == sorted(latencies)
    assert latencies[0] < latencies[-1]
    assert bandwidths == sorted(bandwidths)
    assert bandwidths[0] < bandwidths[-1]


def test_memory_by_hand() -> None:
    whole = memory_bytes(profile(), Division(), BATCH)
    assert whole == pytest.approx(6000 * 16 + 4 * 40 * 96)
    assert memory_bytes(profile(), Division(2), BATCH) == pytest.approx(6000 * 20 + 4 * 40 * 48)
    assert memory_bytes(profile(), Division(2, sharded=True), BATCH) == pytest.approx(6000 * 16 + 4 * 40 * 48)
    assert memory_bytes(profile(), Division(1, 4), BATCH) == pytest.approx(6000 * (4 + 12 / 4) + 40 * 96)


def test_a_sharded_update_is_shared_and_gathered() -> None:
    machine = MACHINE._replace(overlaps=False)
    whole = predict(profile(), machine, Division(2), [BATCH])
    found = predict(profile(), machine, Division(2, sharded=True), [BATCH])
    assert found.seconds - whole.seconds == pytest.approx(-3000e-6 + (1e-3 + 4 * 3000 / 1e6))
    assert found.wire - whole.wire == pytest.approx(4 * 3000)


@pytest.mark.parametrize(
    ("costs", "parts", "pieces"),
    [
        ([1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
        ([4, 1, 1, 1], 2, [(0, 1), (1, 4)]),
        ([1, 2, 3, 4], 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([5], 1, [(0, 1)]),
        ([], 0, []),
    ],
)
def test_neighbours_are_divided_evenly(costs: list[float], parts: int, pieces: list[tuple[int, int]]) -> None:
    assert balanced(costs, parts) == pieces


def test_every_layer_has_one_stage() -> None:
    embedding = Layer("embedding", "target", "embedding", 10, "positions", ((0, 0),), ((0, 0),))
    model = translation()._replace(layers=(*translation().layers[:2], embedding, *translation().layers[2:]))
    for stages in (1, 2):
        found = partition(model, stages, Batch(8, 12, 12, 96.0))
        assert sorted(layer.name for stage in found for layer in stage) == sorted(
            layer.name for layer in model.body
        )
    assert [layer.name for layer in found[0]] == ["encoder 1", "embedding", "decoder 1"]


def test_a_short_side_leaves_stages_to_the_other() -> None:
    model = Profile(
        (recurrent("encoder 1", "source"), *(recurrent(f"d{n}") for n in range(3)), output()), 1e-6
    )
    found = partition(model, 3, Batch(8, 12, 12, 96.0))
    assert [[layer.name for layer in stage] for stage in found] == [["encoder 1", "d0"], ["d1"], ["d2"]]
    assert model.most_stages() == 3


def test_divisions_of_eight_ranks() -> None:
    assert list(divisions(profile(), MACHINE, 8, "data")) == [(8, 1)]
    assert list(divisions(profile(), MACHINE, 8, "pipeline")) == []
    assert list(divisions(profile(), MACHINE, 4, "pipeline")) == [(1, 4)]
    assert list(divisions(profile(), MACHINE, 8, "both")) == [(4, 2), (2, 4)]
    assert list(divisions(profile(), MACHINE._replace(ranks_per_host=2), 8, "both")) == [(4, 2)]
    assert [list(divisions(profile(), MACHINE, 1, kind)) for kind in KINDS] == [[(1, 1)], [], []]


def test_the_best_is_no_slower_than_what_anyone_would_take() -> None:
    found = best(profile(), MACHINE, 4, "pipeline", [BATCH])
    assert found is not None
    for chunks in (1, 4, 12):
        assert found.seconds <= predict(profile(), MACHINE, Division(1, 4, chunks), [BATCH]).seconds
    assert best(profile(), MACHINE, 9, "data", [BATCH]) is None, "more ranks than rows"
    assert best(profile(), MACHINE, 8, "pipeline", [BATCH]) is None, "more ranks than layers"


def test_micro_batches_are_tried_only_if_asked_for() -> None:
    # A layer whose steps are all latency gains nothing from chunks of time if each call costs as much as all steps.
    dear = profile(2, call=0.5)
    for asked in (False, True):
        found = best(dear, MACHINE.without_exchanges(), 2, "pipeline", [BATCH], micro_batches=asked)
        assert found is not None
        assert found.division.micro_batches in ((1,) if not asked else (1, 2, 4, 8))


def test_divisions_in_words() -> None:
    words = [str(Division(*each)) for each in ((), (4,), (1, 4, 6), (2, 4, 6, 2))]
    assert words == ["alone", "4 data", "4 stages", "2 x 4 stages"]
    assert [Division(*each).cuts for each in ((4,), (1, 4, 6), (2, 4, 6, 2))] == ["", "6", "6 x 2"]


def tied() -> Profile:
    """A table of 3,000 parameters, which the output layer has too."""
    table = Layer("table", "target", "table", 3000, "positions", ((0, 0),), ((0, 0),), width=5)
    return Profile(
        (table, *(recurrent(f"layer {n}") for n in range(2)), output(0.0)), update=1e-6, tied="table"
    )


def test_attention_without_parameters_is_no_look_up() -> None:
    attention = tied().body[1]._replace(name="attention", parameters=0.0, unit="pairs")
    profile = tied()._replace(layers=(*tied().body, attention, tied().output))
    assert [layer.name for layer in profile.readers_of_tied] == ["table"]


def test_a_tied_table_is_divided_and_what_is_looked_up_goes_there_and_back() -> None:
    link = Link("", 1e-3, 1e6)
    found = predict(tied(), MACHINE._replace(within=link), Division(1, 2, chunks=6), [BATCH])
    plain = predict(
        tied()._replace(tied=""), MACHINE._replace(within=link), Division(1, 2, chunks=6), [BATCH]
    )
    # The vectors of 8 x 12 positions each way; the update of a stage has half a table instead of a whole one.
    size = 8 * 12 * 5 * 4
    assert found.seconds - plain.seconds == pytest.approx(2 * (1e-3 + size / 1e6) - 1500e-6)
    assert found.wire - plain.wire == pytest.approx(2 * size)
    halves = Division(1, 2, chunks=6, micro_batches=2)
    assert predict(tied(), MACHINE, halves, [BATCH]).wire - predict(
        tied()._replace(tied=""), MACHINE, halves, [BATCH]
    ).wire == pytest.approx(2 * size)
    assert memory_bytes(tied(), Division(1, 2), BATCH) == pytest.approx(5000 * 4 + 2500 * 12 + 40 * 96)
    assert memory_bytes(tied(), Division(), BATCH) == pytest.approx(5000 * 16 + 2 * 40 * 96)
