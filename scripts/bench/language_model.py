"""``python -m scripts.bench language-model``: times training of language models, econmt against PyTorch.

The comparison of EcoRNN (Zheng and others, 2018; its LSTM layer trained on PTB and WikiText-2): an embedding, two LSTM
layers and an output layer as wide as it, truncated backpropagation through time with carried state, plain SGD and the
gradient's norm bounded. Every contender has the same sizes, the same random ids, no dropout, and does all that an
update does. On a GPU each one's update is a CUDA graph if it can be captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.bench.rows import Row, Say, in_graph, time_in_turns
from econmt.cli.measuring import BenchSession, Seconds
from econmt.config.recipe import Recipe, parse_recipe
from econmt.engine.graphs import GraphedStep
from econmt.engine.precision import Precision, precision_of
from econmt.engine.step import TrainingStep
from econmt.model import Implementations
from econmt.options.option_groups import option, with_option_groups
from econmt.tasks.language_model import LanguageModelTask
from econmt.tasks.protocol import Shape, random_ids
from econmt.training.choice import settle
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.dispatch.capture import first_error
from econmt_ops.dispatch.rule import can_run, captured
from econmt_ops.dispatch.traits import implementations_of

HIDDEN, BATCHES, VOCABULARIES = (200, 650, 1500), (32, 64, 128), (10_000, 33_278)
"""The published grid; the vocabularies are those of PTB and WikiText-2."""

BPTT, LAYERS = 35, 2
"""Published tokens of a row that an update reads, and LSTM layers."""

DEFAULT, BY_TORCH, COMPILED = "step loop", "torch.nn.LSTM", "torch.compile"
COMPILED_LOOP, AUTO = "torch.compile of the loop", "econmt auto"
"""Contenders; the first is what EcoRNN calls Default. Others of econmt have the names of implementations."""

_CLIP = 0.25
_RATE = 1.0
_WARM_UP = 2
"""Updates before the first that is timed."""


class Sizes(NamedTuple):
    """Sizes of the model and of a batch."""

    vocabulary: int
    hidden: int
    batch: int


class _Stepwise(nn.Module):
    """LSTM layers as a loop over the steps in plain PyTorch."""

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

    def __init__(self, sizes: Sizes, layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = layers
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the mean loss of ids (B, T), and the states after them."""
        outputs, (h, c) = self.layers(self.embedding(inputs), (h, c))
        logits = self.output(outputs).flatten(0, 1)
        return functional.cross_entropy(logits.float(), targets.flatten()), h.detach(), c.detach()


Update = Callable[[], object]


def recipe_of(sizes: Sizes) -> Recipe:
    """Returns the recipe of a language model."""
    return parse_recipe(
        f"""
name: bench
task: language_model
output: bench
data: {{text: txt, train: [train], valid: valid, subwords: {{type: words, size: {sizes.vocabulary}}}}}
model: {{embedding: {sizes.hidden}, layers: {LAYERS}, size: {sizes.hidden}}}
training:
  batch: {{size: {sizes.batch}}}
  bptt: {BPTT}
  optimizer: {{name: sgd, learning_rate: {_RATE}}}
  gradient_clipping: {{threshold: {_CLIP}}}
  max_updates: 1
""",
        "the bench's recipe",
    )


class _Contender(NamedTuple):
    """Name of a contender, the function that makes its update, and its implementations.

    The function takes a list to which it adds the reason if econmt's update cannot be captured in a CUDA graph.
    """

    name: str
    make: Callable[[list[str]], Update]
    ops: str = ""


class Contest:
    """Contenders that train a model of the same sizes on the same batch.

    Args:
        sizes: Sizes of the model and of the batch.
        device: Device that computes.
        precision: Precision of products.
    """

    def __init__(self, sizes: Sizes, device: torch.device, precision: Precision) -> None:
        self.sizes, self.device, self.precision = sizes, device, precision

    def plain_update(self, layers: nn.Module, *, compiled: bool) -> Update:
        """Returns an update of a model in plain PyTorch, whose state is carried from one call to the next."""
        sizes, device, precision = self.sizes, self.device, self.precision
        model = _Plain(sizes, layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        # As econmt's example: no more different words than text has.
        inputs, targets = (random_ids(sizes.vocabulary, sizes.batch, BPTT).to(device) for _ in range(2))
        h, c = (torch.zeros(LAYERS, sizes.batch, sizes.hidden, device=device) for _ in range(2))
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

    def own_update(self, chosen: Implementations, notes: list[str]) -> Update:
        """Returns an update of econmt's training step, as a run makes it."""
        task = LanguageModelTask(recipe_of(self.sizes), self.sizes.vocabulary)
        model = task.build_model().to(self.device).train()
        step = TrainingStep(task, model, self.precision, implementations=chosen)
        batch = task.example(Shape(self.sizes.batch, 1, BPTT))
        if self.device.type == "cuda":
            graphed = GraphedStep(step, note=notes.append)
            return lambda: graphed([batch])

        def update() -> None:
            step([batch])
            step.clear()

        return update

    def own_names(self) -> list[str]:
        """Returns the implementations of an LSTM that can run here without minutes of compiling."""
        with captured(self.device.type == "cuda"):
            return [
                name
                for name, each in implementations_of("lstm").items()
                if can_run(each.traits, self.device.type, self.precision.dtype) and not each.traits.warms_up
            ]

    def chosen_by_auto(self) -> Implementations:
        """Returns the implementations that a run chooses."""
        task = LanguageModelTask(recipe_of(self.sizes), self.sizes.vocabulary)
        shape = Shape(self.sizes.batch, 1, BPTT)
        return settle(task, lambda: task.build_model().to(self.device), shape, self.device, self.precision)[0]

    def contenders(self, only: Sequence[str], *, compile_loop: bool) -> list[_Contender]:
        """Returns the contenders whose names contain one of ``only``; all if it is empty.

        ``compile_loop`` adds torch.compile of the step loop, which compiles for minutes.
        """
        hidden = self.sizes.hidden
        loop = partial(_Stepwise, hidden, LAYERS)
        library = partial(nn.LSTM, hidden, hidden, LAYERS, batch_first=True)

        def plain(make: Callable[[], nn.Module], *, compiled: bool = False) -> Callable[[list[str]], Update]:
            return lambda _: self.plain_update(make(), compiled=compiled)

        def own(name: str, chosen: Implementations) -> _Contender:
            ops = f"lstm {chosen.encoder}, stash {chosen.stash}, output {chosen.output}"
            return _Contender(name, partial(self.own_update, chosen), ops)

        auto = self.chosen_by_auto()
        everyone = [_Contender(DEFAULT, plain(loop)), _Contender(BY_TORCH, plain(library))]
        if has_compiler():
            everyone.append(_Contender(COMPILED, plain(library, compiled=True)))
            everyone += [_Contender(COMPILED_LOOP, plain(loop, compiled=True))] if compile_loop else []
        everyone += [own(f"econmt {name}", auto._replace(encoder=name)) for name in self.own_names()]
        everyone.append(own(AUTO, auto))
        parts = [part.lower() for part in only or [""]]
        return [each for each in everyone if any(part in each.name.lower() for part in parts)]

    def rows(self, contenders: Sequence[_Contender], seconds: float, say: Say) -> Iterator[Row]:
        """Yields a row for each contender, timed in turns for ``seconds`` after the first updates."""
        sizes = self.sizes._asdict()
        updates: dict[str, Update] = {}
        rows: dict[str, Row] = {}
        for each in contenders:
            say(f"{', '.join(f'{name} {value:,}' for name, value in sizes.items())}: {each.name}")
            row: Row = {"bench": "language-model", "precision": self.precision.name, **sizes}
            rows[each.name] = row
            row |= {"contender": each.name, "ops": each.ops}
            began = time.perf_counter()
            notes: list[str] = []
            try:
                update = each.make(notes)
                for _ in range(_WARM_UP):
                    update()
                updates[each.name] = update
                if self.device.type == "cuda" and not each.name.startswith("econmt"):
                    updates[each.name] = in_graph(update, self.device)
            except RuntimeError as error:
                reason = str(first_error(error)).strip().splitlines()[0]
                row["failure" if each.name not in updates else "not in a graph"] = reason
            if notes:
                row["not in a graph"] = notes[0]
            row["first updates, s"] = time.perf_counter() - began
        timings = time_in_turns(updates, seconds, self.device) if updates else {}
        words = self.sizes.batch * BPTT
        library = timings.get(BY_TORCH)
        for name, row in rows.items():
            if name in timings:
                timing = timings[name]
                row |= {"milliseconds": 1e3 * timing.median, "words/s": words / timing.median}
                if library is not None:
                    row["x nn.LSTM"] = library.median / timing.median
            yield row


@with_option_groups
def language_model_command(
    *,
    hidden: list[int] = option(list(HIDDEN), help="Units of an LSTM layer; may be repeated.", min=1),
    batches: list[int] = option(list(BATCHES), "--batch", help="Rows of a batch; may be repeated.", min=1),
    vocabularies: list[int] = option(
        list(VOCABULARIES), "--vocabulary", help="Words in the vocabulary; may be repeated.", min=5
    ),
    dtype: Literal["float32", "bfloat16"] = option("float32", help="Precision of matrix products."),
    only: list[str] | None = option(
        None, "--contender", help="Measure only contenders whose names contain this; may be repeated."
    ),
    compile_loop: bool = option(
        False, help="Also measure torch.compile of the step loop, which compiles for minutes."
    ),
    seconds: Seconds = option(10.0, help="Seconds for each hidden size, batch and vocabulary."),
    session: BenchSession,
) -> None:
    """Time training of a language model end to end: a step loop, torch.nn.LSTM, torch.compile, econmt.

    Embedding, LSTM layers, output layer, backward pass, bounded gradient, SGD; random ids, no dropout. On a GPU each
    update is a CUDA graph where it can be captured. Shapes that the file of --csv has already are left out, and drawn
    from there.

    \b
    Example:
      python -m scripts.bench language-model --hidden 200 --batch 32
      python -m scripts.bench language-model --device cuda --csv lm.csv
    """
    precision = precision_of(dtype, session.device)
    fixed: Row = {"bench": "language-model", "precision": dtype}
    before = session.rows_before(fixed)
    done = {(int(row["vocabulary"]), int(row["hidden"]), int(row["batch"])) for row in before}

    def rows(say: Say) -> Iterator[Row]:
        for vocabulary, size, batch in product(vocabularies, hidden, batches):
            if (vocabulary, size, batch) not in done:
                sizes = Sizes(vocabulary, size, batch)
                contest = Contest(sizes, session.device, precision)
                contenders = contest.contenders(only or (), compile_loop=compile_loop)
                yield from contest.rows(contenders, seconds, say)

    with session.measuring() as say:
        measured = session.kept(rows(say))
    title = f"training words/s: {LAYERS} x LSTM, bptt {BPTT}, {dtype}"
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
    known = [{**row, "words/s": float(row["words/s"])} for row in (*before, *measured) if row.get("words/s")]
    session.draw(known, label=columns[:4], value="words/s", title=title)
