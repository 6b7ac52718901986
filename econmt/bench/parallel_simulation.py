"""What the model of :mod:`econmt.parallel.cost_model` predicts, as rows; the seed's four cards among it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from econmt.bench.rows import Row, save_figure
from econmt.config.recipe import Recipe, load_recipe
from econmt.parallel.cost_layers import Batch, Division, Profile
from econmt.parallel.cost_model import Kind, Prediction, best, predict
from econmt.parallel.cost_network import Machine

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

SEED_RECIPE = (
    "ptb",
    (
        "model.layers=8",
        "model.size=400",
        "model.embedding=200",
        "model.weight_tying=none",
        "training.batch.size=20",
        "data.subwords.size=10000",
    ),
)
"""The model that Lin and Wu trained: eight layers on the Penn Treebank; the sizes are those of
the example of model-parallel LSTMs in github.com/apache/mxnet, whose generated buckets are theirs."""

PUBLISHED = {("derived", 1): 3.3, ("none", 4): 2.3, ("derived", 4): 5.3}
"""By buckets and stages: times one card without either (Lin & Wu, "Performance optimization of LSTM training on GPU",
poster of CMU 15-418, paperzz.com/doc/7698105)."""

MUST, AIM = 5.3, 8.0
"""What a pipeline of four with derived buckets is to reach on the seed's hardware."""


def seed_recipe() -> Recipe:
    """The seed's model as a recipe."""
    name, changes = SEED_RECIPE
    return load_recipe(name, list(changes))


def rows(
    profile: Profile,
    machine: Machine,
    batches: Mapping[str, Sequence[Batch]],
    ranks: Sequence[int],
    kinds: Sequence[Kind],
    *,
    grown: bool = False,
    sharded: bool = False,
    micro_batches: bool = False,
) -> Iterator[Row]:
    """The best division of each kind for each number of ranks.

    Args:
        profile: the model on one rank. machine: the ranks.
        batches: the shapes of updates by what buckets they come from; ``scaling`` counts from one rank with the last.
        ranks: how many. kinds: divisions that are looked at.
        grown: whether the batch has as many times the rows as there are ranks.
        sharded: whether each rank keeps the state of its share of the parameters alone.
        micro_batches: whether pipelines may cut rows, too.
    """
    alone = predict(profile, machine, Division(), list(batches.values())[-1])
    for buckets, shapes in batches.items():
        for count in ranks:
            whole = [shape.grown(count) for shape in shapes] if grown else shapes
            for kind in kinds:
                found = best(
                    profile, machine, count, kind, whole, sharded=sharded, micro_batches=micro_batches
                )
                if found is not None:
                    yield _row(
                        found, kind, buckets, machine, found.tokens_per_second / alone.tokens_per_second
                    )


def _row(found: Prediction, kind: Kind, buckets: str, machine: Machine, scaling: float) -> Row:
    return {
        "bench": "parallel-simulation",
        "machine": machine.name,
        "buckets": buckets,
        "ranks": found.division.ranks,
        "kind": kind,
        "division": str(found.division),
        "chunks": found.division.cuts,
        "milliseconds": 1e3 * found.seconds,
        "tokens/s": found.tokens_per_second,
        "scaling": scaling,
        "exchange %": 100.0 * found.communication,
        "idle %": 100.0 * found.idle,
        "MB sent": found.wire / 1e6,
        "MB held": found.memory / 1e6,
    }


def fastest(found: Sequence[Row]) -> list[str]:
    """One line for each run of numbers of ranks that have the same kind of division as their best."""
    winners = [
        max((row for row in found if row["ranks"] == count), key=lambda row: float(row["scaling"]))
        for count in sorted({int(row["ranks"]) for row in found} - {1})
    ]
    lines: list[str] = []
    first = 0
    for place, row in enumerate(winners):
        if place + 1 < len(winners) and winners[place + 1]["kind"] == row["kind"]:
            continue
        begin = winners[first]
        span = str(row["ranks"]) if first == place else f"{begin['ranks']} to {row['ranks']}"
        gains = (
            f"{float(row['scaling']):.3g}x"
            if first == place
            else (f"{float(begin['scaling']):.3g}x to {float(row['scaling']):.3g}x")
        )
        lines.append(f"fastest for {span} ranks: {row['kind']}, {gains}; there {row['division']}")
        first = place + 1
    return lines


def seed_verdict(found: Sequence[Row]) -> str:
    """What the seed's four cards gain beside what is published, from rows of both kinds of buckets."""
    gains = {
        (str(row["buckets"]), int(row["ranks"])): float(row["scaling"])
        for row in found
        if row["kind"] == ("data" if row["ranks"] == 1 else "pipeline")
    }
    parts = [f"{gains[key]:.2f}x ({value}x published)" for key, value in PUBLISHED.items()]
    both = gains["derived", 4]
    reached = "beyond the aim of" if both >= AIM else "reaches the" if both >= MUST else "misses the"
    bound = AIM if both >= AIM else MUST
    return (
        f"over one card without buckets: derived buckets {parts[0]}, pipeline of four {parts[1]}, both {parts[2]}: "
        f"{reached} {bound}x"
    )


def draw(found: Sequence[Mapping[str, str | int | float]], path: Path, title: str) -> None:
    """Draws scaling against ranks, a line for each kind of division and buckets.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    names = dict.fromkeys((str(row["kind"]), str(row["buckets"])) for row in found)
    several = len({buckets for _, buckets in names}) > 1
    for kind, buckets in names:
        own = [row for row in found if (row["kind"], row["buckets"]) == (kind, buckets)]
        places = [int(row["ranks"]) for row in own]
        label = f"{kind}, buckets: {buckets}" if several else kind
        axes.plot(places, [float(row["scaling"]) for row in own], marker="o", label=label)
    ends = sorted({int(row["ranks"]) for row in found})
    axes.plot(ends, ends, color="#999999", linestyle=":", label="as many times as ranks")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("ranks")
    axes.set_ylabel("tokens/s, times those of one rank")
    axes.set_title(title)
    axes.legend()
    save_figure(figure, path)
