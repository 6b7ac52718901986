"""``python -m scripts.bench language-model``: times training of language models, econmt against PyTorch.

The comparison of EcoRNN (Zheng and others, 2018; its LSTM layer trained on PTB and WikiText-2): an embedding, two LSTM
layers and an output layer as wide as it, truncated backpropagation through time with carried state, plain SGD and the
gradient's norm bounded. Every contender has the same sizes, the same random ids, no dropout, and does all that an
update does. On a GPU each one's update is a CUDA graph if it can be captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.bench.rows import Row, Say, in_graph, save_figure, time_in_turns
from econmt.cli.measuring import BenchSession, Seconds
from econmt.cli.option_groups import option, with_option_groups
from econmt.config import limits
from econmt.config.recipe import Recipe, parse_recipe
from econmt.engine.graphs import GraphedStep
from econmt.engine.precision import Precision, precision_of
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.tasks.language_model import LanguageModelTask
from econmt.tasks.protocol import Shape, random_ids
from econmt.training.choice import settle
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.dispatch.capture import first_error
from econmt_ops.dispatch.rule import can_run, captured
from econmt_ops.dispatch.traits import implementations_of

HIDDEN, BATCHES, VOCABULARIES = (200, 650, 1500), (32, 64, 128), (10_000, 33_278)
"""The published grid; the vocabularies are those of PTB and WikiText-2."""

DEFAULT, BY_TORCH, COMPILED, COMPILED_LOOP, AUTO = (
    "step loop",
    "torch.nn.LSTM",
    "torch.compile",
    "torch.compile of the loop",
    "econmt auto",
)
"""Contenders; the first is what EcoRNN calls Default. Others of econmt have the names of implementations."""

_CLIP = 0.25
_RATE = 1.0
_WARM_UP = 2
"""Updates before the first that is timed."""


class Problem(NamedTuple):
    """Sizes of the model and of a batch."""

    vocabulary: int
    hidden: int
    batch: int
    bptt: int
    layers: int


class _Stepwise(nn.Module):
    """LSTM layers as a loop of single steps, each of its operations by itself."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(hidden, 4 * hidden) for _ in range(layers))
        self.states = nn.ModuleList(nn.Linear(hidden, 4 * hidden, bias=False) for _ in range(layers))

    def forward(self, inputs: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Computes outputs and last states from inputs (B, T, H), h and c (L, B, H), like torch.nn.LSTM."""
        last = []
        for number, (reads, goes_on) in enumerate(zip(self.inputs, self.states, strict=True)):
            h, c = (part[number] for part in state)
            outputs = []
            for position in inputs.unbind(1):
                i, f, g, o = (reads(position) + goes_on(h)).chunk(4, dim=1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                outputs.append(h)
            inputs = torch.stack(outputs, 1)
            last.append((h, c))
        h, c = (torch.stack(parts) for parts in zip(*last, strict=True))
        return inputs, (h, c)


class _Plain(nn.Module):
    """The language model in plain PyTorch."""

    def __init__(self, problem: Problem, layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(problem.vocabulary, problem.hidden)
        self.layers = layers
        self.output = nn.Linear(problem.hidden, problem.vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the mean loss of ids (B, T), and the states after them."""
        outputs, (h, c) = self.layers(self.embedding(inputs), (h, c))
        logits = self.output(outputs).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten()), h.detach(), c.detach()


Update = Callable[[], object]


def _plain_update(
    problem: Problem, layers: nn.Module, device: torch.device, precision: Precision, *, compiled: bool
) -> Update:
    """Returns an update of a model in plain PyTorch, on the same batch each time, with its state carried."""
    model = _Plain(problem, layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    # As econmt's example: no more different words than text has.
    inputs, targets = (
        random_ids(problem.vocabulary, problem.batch, problem.bptt).to(device) for _ in range(2)
    )
    h, c = (torch.zeros(problem.layers, problem.batch, problem.hidden, device=device) for _ in range(2))
    loss_of: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.compile(model) if compiled else model

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        with precision.products(device):
            with precision.autocast(device):
                loss, last_h, last_c = loss_of(inputs, targets, h, c)
            torch.autograd.backward(loss)
        h.copy_(last_h)
        c.copy_(last_c)
        nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        optimizer.step()

    return update


def recipe_of(problem: Problem) -> Recipe:
    """Returns the recipe of a problem."""
    return parse_recipe(
        f"""
name: bench
task: language_model
output: bench
data: {{text: txt, train: [train], valid: valid, subwords: {{type: words, size: {problem.vocabulary}}}}}
model: {{embedding: {problem.hidden}, layers: {problem.layers}, size: {problem.hidden}}}
training:
  batch: {{size: {problem.batch}}}
  bptt: {problem.bptt}
  optimizer: {{name: sgd, learning_rate: {_RATE}}}
  gradient_clipping: {{threshold: {_CLIP}}}
  max_updates: 1
""",
        "the bench's recipe",
    )


def _own_update(
    problem: Problem, chosen: Implementations, device: torch.device, precision: Precision, notes: list[str]
) -> Update:
    """Returns an update of econmt's training step, as a run makes it."""
    task = LanguageModelTask(recipe_of(problem), problem.vocabulary)
    model = task.build_model().to(device).train()
    step = TrainingStep(task, model, precision, implementations=chosen)
    batch = task.example(Shape(problem.batch, 1, problem.bptt))
    run = GraphedStep(step, note=notes.append) if device.type == "cuda" else step

    def update() -> None:
        run([batch])
        if device.type == "cuda":
            return
        step.clear()

    return update


def _own_names(device: torch.device, precision: Precision) -> list[str]:
    """Returns the implementations of an LSTM that can run here without minutes of compiling."""
    with captured(device.type == "cuda"):
        return [
            name
            for name, each in implementations_of("lstm").items()
            if can_run(each.traits, device.type, precision.dtype) and not each.traits.warms_up
        ]


def chosen_by_auto(problem: Problem, device: torch.device, precision: Precision) -> Implementations:
    """Returns the implementations that a run chooses."""
    task = LanguageModelTask(recipe_of(problem), problem.vocabulary)
    shape = Shape(problem.batch, 1, problem.bptt)
    return settle(task, lambda: task.build_model().to(device), shape, device, precision)[0]


class _Contender(NamedTuple):
    """Name of a contender, the function that makes its update, and its implementations."""

    name: str
    make: Callable[[list[str]], Update]
    ops: str = ""


def _contenders(
    problem: Problem, device: torch.device, precision: Precision, *, compile_loop: bool
) -> list[_Contender]:
    def plain(layers: Callable[[], nn.Module], *, compiled: bool = False) -> Callable[[list[str]], Update]:
        return lambda _: _plain_update(problem, layers(), device, precision, compiled=compiled)

    def loop() -> nn.Module:
        return _Stepwise(problem.hidden, problem.layers)

    def library() -> nn.Module:
        return nn.LSTM(problem.hidden, problem.hidden, problem.layers, batch_first=True)

    def own(chosen: Implementations) -> Callable[[list[str]], Update]:
        return lambda notes: _own_update(problem, chosen, device, precision, notes)

    auto = chosen_by_auto(problem, device, precision)
    found = [_Contender(DEFAULT, plain(loop)), _Contender(BY_TORCH, plain(library))]
    if has_compiler():
        found.append(_Contender(COMPILED, plain(library, compiled=True)))
        found += [_Contender(COMPILED_LOOP, plain(loop, compiled=True))] if compile_loop else []
    for name in _own_names(device, precision):
        chosen = auto._replace(encoder=name)
        found.append(_Contender(f"econmt {name}", own(chosen), _told(chosen)))
    return [*found, _Contender(AUTO, own(auto), _told(auto))]


def _told(chosen: Implementations) -> str:
    return f"lstm {chosen.encoder}, stash {chosen.stash}, output {chosen.output}"


def grid(
    hidden: Sequence[int], batches: Sequence[int], vocabularies: Sequence[int], bptt: int, layers: int
) -> list[Problem]:
    """Returns all problems, the small ones first."""
    return [
        Problem(vocabulary, size, batch, bptt, layers)
        for vocabulary in vocabularies
        for size in hidden
        for batch in batches
    ]


def rows(
    problems: Sequence[Problem],
    device: torch.device,
    precision: Precision,
    seconds: float,
    say: Say,
    *,
    only: Sequence[str] = (),
    compile_loop: bool = False,
) -> Iterator[Row]:
    """Yields a row for each contender of each problem, timed in turns.

    ``seconds`` are those of each problem without its first updates. ``only`` keeps the contenders whose names contain
    one of its parts; ``compile_loop`` adds torch.compile of the step loop, which compiles for minutes.
    """
    for problem in problems:
        contenders = [
            each
            for each in _contenders(problem, device, precision, compile_loop=compile_loop)
            if not only or any(part.lower() in each.name.lower() for part in only)
        ]
        yield from _measured(problem, contenders, device, precision, seconds, say)


def _measured(
    problem: Problem,
    contenders: Sequence[_Contender],
    device: torch.device,
    precision: Precision,
    seconds: float,
    say: Say,
) -> Iterator[Row]:
    updates: dict[str, Update] = {}
    found: dict[str, Row] = {}
    for each in contenders:
        say(f"{', '.join(f'{name} {value:,}' for name, value in problem._asdict().items())}: {each.name}")
        row: Row = {"bench": "language-model", "precision": precision.name, **problem._asdict()}
        found[each.name] = row
        row |= {"contender": each.name, "ops": each.ops}
        began = time.perf_counter()
        notes: list[str] = []
        try:
            update = each.make(notes)
            for _ in range(_WARM_UP):
                update()
            updates[each.name] = update
            if device.type == "cuda" and not each.name.startswith("econmt"):
                updates[each.name] = in_graph(update, device)
        except RuntimeError as error:
            reason = str(first_error(error)).strip().splitlines()[0]
            row["failure" if each.name not in updates else "not in a graph"] = reason
        if notes:
            row["not in a graph"] = notes[0]
        row["first updates, s"] = time.perf_counter() - began
    timings = time_in_turns(updates, seconds, device) if updates else {}
    words = problem.batch * problem.bptt
    library = timings.get(BY_TORCH)
    for name, row in found.items():
        if name in timings:
            timing = timings[name]
            row |= {"milliseconds": 1e3 * timing.median, "words/s": words / timing.median}
            if library is not None:
                row["x nn.LSTM"] = library.median / timing.median
        yield row


def draw(rows: Sequence[Mapping[str, str | int | float]], path: Path) -> None:
    """Draws words a second as bars: a panel for each vocabulary and batch, a group for each hidden size."""
    from matplotlib.figure import Figure

    known = [row for row in rows if row.get("words/s", "") != ""]
    panels = sorted({(int(row["vocabulary"]), int(row["batch"])) for row in known})
    names = list(dict.fromkeys(str(row["contender"]) for row in known))
    across = max(1, len({batch for _, batch in panels}))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(max(7.5, 4.0 * across), 2.8 * down + 0.8), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False).flatten()
    for axis, (vocabulary, batch) in zip(axes, panels, strict=False):
        mine = [row for row in known if (int(row["vocabulary"]), int(row["batch"])) == (vocabulary, batch)]
        sizes = sorted({int(row["hidden"]) for row in mine})
        for number, name in enumerate(names):
            heights = {int(row["hidden"]): float(row["words/s"]) for row in mine if row["contender"] == name}
            # Heights by that of torch.nn.LSTM, since words a second of small and large layers are far apart.
            base = {int(row["hidden"]): float(row["words/s"]) for row in mine if row["contender"] == BY_TORCH}
            places = [sizes.index(size) + (number + 0.5) / len(names) * 0.8 - 0.4 for size in heights]
            values = [height / base.get(size, height) for size, height in heights.items()]
            axis.bar(places, values, 0.8 / len(names), label=name)
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axis.set_title(f"vocabulary {vocabulary:,}, batch {batch}", fontsize=9)
        axis.set_xlabel("hidden size")
        axis.set_ylabel("words/s by torch.nn.LSTM's")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if panels:
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    save_figure(figure, path)


@with_option_groups
def language_model_command(
    *,
    hidden: list[int] = option(
        list(HIDDEN), help="Units of a layer; may be repeated.", min=1, max=limits.WIDTH
    ),
    batches: list[int] = option(
        list(BATCHES), "--batch", help="Rows; may be repeated.", min=1, max=limits.BATCH
    ),
    vocabularies: list[int] = option(
        list(VOCABULARIES),
        "--vocabulary",
        help="Words; may be repeated.",
        min=5,
        max=limits.WORDS,
    ),
    bptt: int = option(35, help="Tokens of a row.", min=1, max=limits.POSITIONS),
    layers: int = option(2, help="Of the stack.", min=1, max=limits.LAYERS),
    dtype: Literal["float32", "bfloat16"] = option("float32", help="Precision of products."),
    only: list[str] | None = option(
        None, "--contender", help="Only those whose names contain this; may be repeated."
    ),
    compile_loop: bool = option(False, help="Also torch.compile of the step loop: minutes to compile."),
    seconds: Seconds = option(10.0, help="For each hidden size, batch and vocabulary."),
    session: BenchSession,
) -> None:
    """Time training of a language model end to end: a step loop, torch.nn.LSTM, torch.compile, ours, what auto picks.

    Embedding, LSTM layers, output layer, backward pass, bounded gradient, SGD; random ids, no dropout. On a GPU each
    update is a CUDA graph where it can be captured. Shapes that the file of --csv has already are left out, and drawn
    from there.

    \b
    Example:
      python -m scripts.bench language-model --hidden 200 --batch 32
      python -m scripts.bench language-model --device cuda --csv lm.csv
    """
    precision = precision_of(dtype, session.device)
    before = session.rows_before(
        {"bench": "language-model", "precision": dtype, "bptt": bptt, "layers": layers}
    )
    done = {(int(row["vocabulary"]), int(row["hidden"]), int(row["batch"])) for row in before}
    problems = [
        problem for problem in grid(hidden, batches, vocabularies, bptt, layers) if problem[:3] not in done
    ]
    with session.measuring() as say:
        found = rows(
            problems, session.device, precision, seconds, say, only=only or (), compile_loop=compile_loop
        )
        measured = session.kept(found)
    title = f"training words/s: {layers} x LSTM, bptt {bptt}, {dtype}"
    columns = ("vocabulary", "hidden", "batch", "contender", "words/s", "x nn.LSTM")
    session.print(measured, columns, title)
    for row in measured:
        for what in ("failure", "not in a graph"):
            if what in row:
                print(
                    f"{row['contender']}, hidden {row['hidden']}, batch {row['batch']}: {what}: {row[what]}"
                )
    picks = {str(row["ops"]) for row in measured if row["contender"] == AUTO}
    for pick in sorted(picks):
        print(f"auto picks {pick}")
    everything: list[Mapping[str, str | int | float]] = [*before, *measured]
    if session.plot is not None and everything:
        draw(everything, session.plot)
