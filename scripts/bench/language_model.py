"""Times training of language models against PyTorch.

    python -m scripts.bench language-model --hidden 200 --batch 32
    python -m scripts.bench language-model --device cuda --csv lm.csv

The comparison of EcoRNN (Zheng and others, 2018; its LSTM layer trained on PTB and WikiText-2): an embedding, two LSTM
layers and an output layer as wide as it, truncated backpropagation through time with carried state, plain SGD and the
gradient's norm bounded. Every contender has the same sizes, the same random ids, no dropout, and does all that an
update does: embedding, LSTM layers, output layer, backward pass, bounded gradient, SGD. On a GPU each one's update is a
CUDA graph if it can be captured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from econmt.bench.rows import Row, Say, draw
from econmt.config.recipe import Recipe, parse_recipe
from econmt.engine.devices import reproducible
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
from scripts.bench.frame import Bench, Call, in_graph, in_turns, ratio_of

HIDDEN, BATCHES, VOCABULARIES = (200, 650, 1500), (32, 64, 128), (10_000, 33_278)
"""The published grid; the vocabularies are those of PTB and WikiText-2."""

BPTT, LAYERS = 35, 2
"""Published tokens of a row that an update reads, and LSTM layers."""

DEFAULT, BY_TORCH, COMPILED = "step loop", "torch.nn.LSTM", "torch.compile"
AUTO = "econmt auto"
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


MakeUpdate = Callable[[list[str]], Call]


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


class Contest:
    """Contenders that train a model of the same sizes on the same batch.

    Args:
        sizes: Sizes of the model and of the batch.
        device: Device that computes.
        precision: Precision of products.
    """

    def __init__(self, sizes: Sizes, device: torch.device, precision: Precision) -> None:
        self.sizes, self.device, self.precision = sizes, device, precision
        self._task = LanguageModelTask(recipe_of(sizes), sizes.vocabulary)
        self._shape = Shape(sizes.batch, 1, BPTT)

    def plain_update(self, layers: nn.Module, *, compiled: bool) -> Call:
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

    def own_update(self, chosen: Implementations, notes: list[str]) -> Call:
        """Returns an update of econmt's training step, as a run makes it."""
        model = self._task.build_model().to(self.device).train()
        step = TrainingStep(self._task, model, self.precision, implementations=chosen)
        batch = self._task.example(self._shape)
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

    def contenders(self, only: Sequence[str]) -> dict[str, tuple[MakeUpdate, str]]:
        """Returns by name a function that makes a contender's update, and its implementations.

        The function takes a list to which it adds the reason if econmt's update cannot be captured in a CUDA graph.

        Args:
            only: Parts of names, of which a contender's name contains one; all if it is empty.
        """
        hidden = self.sizes.hidden
        loop = partial(_Stepwise, hidden, LAYERS)
        library = partial(nn.LSTM, hidden, hidden, LAYERS, batch_first=True)

        def plain(make: Callable[[], nn.Module], *, compiled: bool = False) -> tuple[MakeUpdate, str]:
            return lambda _: self.plain_update(make(), compiled=compiled), ""

        def own(chosen: Implementations) -> tuple[MakeUpdate, str]:
            ops = f"lstm {chosen.encoder}, stash {chosen.stash}, output {chosen.output}"
            return partial(self.own_update, chosen), ops

        task, device = self._task, self.device
        auto = settle(task, lambda: task.build_model().to(device), self._shape, device, self.precision)[0]
        everyone = {DEFAULT: plain(loop), BY_TORCH: plain(library)}
        if has_compiler():
            everyone[COMPILED] = plain(library, compiled=True)
        everyone |= {f"econmt {name}": own(auto._replace(encoder=name)) for name in self.own_names()}
        everyone[AUTO] = own(auto)
        parts = [part.lower() for part in only or [""]]
        return {name: each for name, each in everyone.items() if any(part in name.lower() for part in parts)}

    def rows(self, contenders: Mapping[str, tuple[MakeUpdate, str]], seconds: float, say: Say) -> list[Row]:
        """Returns a row for each contender, timed in turns for ``seconds`` after the first updates."""
        updates: dict[str, Call] = {}
        rows: dict[str, Row] = {}
        for name, (make, ops) in contenders.items():
            say(f"{', '.join(f'{what} {value:,}' for what, value in self.sizes._asdict().items())}: {name}")
            rows[name] = row = {**self.sizes._asdict(), "contender": name, "ops": ops}
            began = time.perf_counter()
            notes: list[str] = []
            try:
                update = make(notes)
                for _ in range(_WARM_UP):
                    update()
                updates[name] = update
                if self.device.type == "cuda" and not name.startswith("econmt"):
                    updates[name] = in_graph(update, self.device)
            except RuntimeError as error:
                reason = str(first_error(error)).strip().splitlines()[0]
                row["failure"] = reason if name not in updates else f"not in a graph: {reason}"
            if notes:
                row["failure"] = f"not in a graph: {notes[0]}"
            row["first updates, s"] = time.perf_counter() - began
        timings = in_turns(updates, self.device, seconds=seconds) if updates else {}
        for name, timing in timings.items():
            rows[name]["milliseconds"] = 1e3 * timing.median
            rows[name]["words/s"] = self.sizes.batch * BPTT / timing.median
            if BY_TORCH in timings:
                rows[name]["x nn.LSTM"] = str(ratio_of(timings[BY_TORCH].samples, timing.samples))
        return list(rows.values())


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto", seconds=10.0)
    add = bench.add_argument
    add("--hidden", type=int, action="append", help=f"units of an LSTM layer; may be repeated {HIDDEN}")
    add("--batch", type=int, action="append", help=f"rows of a batch; may be repeated {BATCHES}")
    add("--vocabulary", type=int, action="append", help=f"words; may be repeated {VOCABULARIES}")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="precision (%(default)s)")
    add("--contender", action="append", default=[], help="only those whose names contain this")
    add("--plot", type=Path, help="picture of words a second")
    given = bench.begin(words)
    precision = precision_of(given.dtype, given.device)
    grid = product(given.vocabulary or VOCABULARIES, given.hidden or HIDDEN, given.batch or BATCHES)

    def rows() -> Iterator[Row]:
        for sizes in grid:
            contest = Contest(Sizes(*sizes), given.device, precision)
            contenders = contest.contenders(given.contender)
            yield from contest.rows(contenders, given.seconds, bench.say)

    bench.print_header(given.dtype)
    columns = ("vocabulary", "hidden", "batch", "contender", "words/s", "x nn.LSTM")
    with reproducible(given.device, given.threads):
        bench.report(rows(), f"training words/s: {LAYERS} x LSTM, bptt {BPTT}", columns)
    for pick in sorted({str(row["ops"]) for row in bench.rows if row["contender"] == AUTO}):
        print(f"auto picks {pick}")
    if given.plot is not None:
        draw(bench.rows, given.plot, label=columns[:4], value="words/s", title="training words/s")
