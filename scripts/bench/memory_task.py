"""Measures how cells learn to remember a first element.

    python -m scripts.bench memory-task --steps 256 --hidden 64 --limit 60
    python -m scripts.bench memory-task --steps 1024,1048576 --cell gilr

The task is that of Martin and Cundy (2018), after Hochreiter and Schmidhuber (1997). The first element is (1, 0, ...,
0) or (-1, 0, ..., 0), all others are random one-hot vectors, and the model must tell the first element after the last.
The only path of the gradient to it leads through all steps. Each update draws new sequences; the task is learnt when
`SURE` of them in a row were predicted right before the model was trained on them. The model is one layer with a logit
from its last output, trained by Adam, without state from one sequence to the next.

Two things make long sequences learnable. Gate biases are initialised as by Tallec and Ollivier (2018), so that units
forget over times between 1 and T steps. And half of an update's sequences begin with each of the two elements, as in
the code published with the figures: the symbol of the first element also occurs elsewhere in a sequence, some T /
symbols times, and with random labels these occurrences would dominate the gradient with a random sign.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import econmt_ops
from econmt.bench.rows import Row, Say
from econmt.engine.devices import reproducible
from econmt.errors import InputError
from scripts.bench.frame import Bench, in_graph

PUBLISHED = (128, 512)
"""Symbols and units."""

SURE = 1000
"""Sequences in a row that are answered right when the task is learnt."""

SERIAL = "lstm"
"""The cell that has to walk through the steps one by one, with which the others are compared."""

_LOOK = 10
"""Updates from one look at the device to the next."""


class GILR(nn.Module):
    """Gated impulse linear recurrence: g = sigmoid(U x + b), h_t = g h_{t-1} + (1 - g) tanh(V x + c).

    (Martin and Cundy 2018.)
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.both = nn.Linear(inputs, 2 * hidden)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the outputs (B, T, H) for inputs (B, T, I), and the last one."""
        gate, impulse = self.both(inputs).chunk(2, -1)
        gate = gate.sigmoid()
        outputs = econmt_ops.linear_recurrence(gate, (1 - gate) * impulse.tanh())
        return outputs, outputs[:, -1]


Bias = Callable[[nn.Module, int], Tensor]
"""Function of a module and its number of units that returns the bias of a gate."""


class Cell(NamedTuple):
    """Functions that make a layer from inputs and units, and return the biases of gates that keep or take in."""

    make: Callable[[int, int], nn.Module]
    keeps: Bias
    takes: Bias | None = None


def _part(name: str, part: int) -> Bias:
    """Returns a function that gives the values of a bias from ``part`` times H on, for H units."""

    def keeps(module: nn.Module, hidden: int) -> Tensor:
        bias = module.get_parameter(name).detach()
        return bias[part * hidden : (part + 1) * hidden]

    return keeps


CELLS: dict[str, Cell] = {
    "lstm": Cell(
        functools.partial(econmt_ops.LSTM, batch_first=True), _part("bias_ih_l0", 1), _part("bias_ih_l0", 0)
    ),
    "gilr": Cell(GILR, _part("both.bias", 0)),
    "gilr_lstm": Cell(econmt_ops.GILRLSTM, _part("bias_l0", 1), _part("bias_l0", 2)),
}
"""Cells by name."""


class Setting(NamedTuple):
    """Settings of a run: name of the cell, steps, units, sequences of an update, symbols, learning rate, seed."""

    cell: str
    steps: int
    hidden: int
    batch: int
    symbols: int = PUBLISHED[0]
    rate: float = 1e-2
    seed: int = 1


class Trial:
    """Model that learns the task, an update at a time; on a GPU the update is a CUDA graph."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        torch.manual_seed(setting.seed)
        self.setting = setting
        cell = CELLS[setting.cell]
        layer = cell.make(setting.symbols, setting.hidden)
        # A unit forgets to 1/e in about as many steps as exp(bias) says.
        times = torch.empty(setting.hidden).uniform_(1.0, max(2.0, setting.steps - 1.0))
        cell.keeps(layer, setting.hidden).copy_(times.log())
        if cell.takes is not None:
            cell.takes(layer, setting.hidden).copy_(-times.log())
        self.layer, self.readout = layer.to(device), nn.Linear(setting.hidden, 1).to(device)
        parameters = [*self.layer.parameters(), *self.readout.parameters()]
        self._optimizer = torch.optim.Adam(parameters, setting.rate, capturable=device.type == "cuda")
        self._parameters = parameters
        self._inputs = torch.zeros(setting.batch, setting.steps, setting.symbols, device=device)
        self._labels = torch.zeros(setting.batch, device=device)
        self._streak = torch.zeros((), dtype=torch.int64, device=device)
        self._draw = torch.Generator(device).manual_seed(setting.seed)
        self._update: Callable[[], object] = self._learn
        self.fill()
        if device.type == "cuda":
            self._update = in_graph(self._learn, device)

    def fill(self) -> None:
        """Draws sequences and their first elements."""
        ids = torch.randint(
            self.setting.symbols, self._inputs.shape[:2], generator=self._draw, device=self._inputs.device
        )
        self._inputs.zero_().scatter_(2, ids.unsqueeze(2), 1.0)
        device = self._labels.device
        order = torch.randperm(len(self._labels), generator=self._draw, device=device)
        first = torch.randint(2, (1,), generator=self._draw, device=device)
        self._labels.copy_((order + first) % 2)  # as many of each
        self._inputs[:, 0] = 0.0
        self._inputs[:, 0, 0] = 2.0 * self._labels - 1.0

    def _learn(self) -> None:
        outputs, _ = self.layer(self._inputs)
        logits = self.readout(outputs[:, -1]).squeeze(1)
        right = ((logits > 0) == (self._labels > 0.5)).all()
        self._streak.copy_(torch.where(right, self._streak + len(self._labels), 0))
        loss = functional.binary_cross_entropy_with_logits(logits, self._labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()

    def update(self) -> None:
        """Draws sequences, predicts and learns from them."""
        self.fill()
        self._update()

    @property
    def streak(self) -> int:
        """Number of right answers in a row; reading it waits for the device."""
        return int(self._streak)


def run(setting: Setting, device: torch.device, say: Say, *, limit: float, updates: int) -> Row:
    """Trains until the task is learnt, for at most ``limit`` seconds and ``updates`` updates.

    Returns updates, seconds, milliseconds an update and whether it was learnt; or the failure.
    """
    row: Row = {**setting._asdict()}
    try:
        began = time.perf_counter()
        trial = Trial(setting, device)
        _ = trial.streak  # all is set up
        start, done, streak = time.perf_counter(), 0, 0
        while streak < SURE and done < updates and time.perf_counter() - start < limit:
            for _ in range(min(_LOOK, updates - done)):
                trial.update()
                done += 1
            streak = trial.streak
            say(f"{setting.cell}, {setting.steps} steps, update {done}, {streak} right in a row")
    except torch.OutOfMemoryError:
        return row | {"failure": "memory"}
    seconds = time.perf_counter() - start
    figures: Row = {"learnt": "yes" if streak >= SURE else "no", "updates": done, "seconds": seconds}
    figures |= {"milliseconds": 1e3 * seconds / done, "set up, s": start - began}
    return row | figures


def rows(
    settings: Sequence[Setting], device: torch.device, say: Say, *, limit: float, updates: int
) -> Iterator[Row]:
    """Yields a row for each run, with an update's speed-up over the LSTM that ran at the same sizes before."""
    serial: dict[tuple[int, ...], Row] = {}
    for setting in settings:
        row = run(setting, device, say, limit=limit, updates=updates)
        sizes = setting.steps, setting.hidden, setting.batch, setting.seed
        if "milliseconds" in row:
            if setting.cell == SERIAL:
                serial[sizes] = row
            elif sizes in serial:
                row["speed-up"] = float(serial[sizes]["milliseconds"]) / float(row["milliseconds"])
        yield row


def lengths_of(text: str) -> list[int]:
    """Reads lengths such as "1024,8192"; raises ValueError for any other text."""
    lengths = [int(part) for part in text.split(",")]
    if min(lengths) < 1:
        raise ValueError(text)
    return lengths


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__, device="auto")
    add = bench.add_argument
    add("--steps", type=lengths_of, default=[1024], metavar="T[,T...]", help="lengths (1024)")
    add("--cell", default=",".join(CELLS), metavar="NAME[,NAME...]", help=f"cells: {', '.join(CELLS)}")
    add("--hidden", type=int, action="append", help=f"units; may be repeated ({PUBLISHED[1]})")
    add("--batch", type=int, default=8, help="sequences of an update (%(default)s)")
    add("--symbols", type=int, default=PUBLISHED[0], help="width of the one-hot vectors (%(default)s)")
    add("--rate", type=float, default=1e-2, help="learning rate of Adam (%(default)s)")
    add("--updates", type=int, default=1_000_000, help="most updates of a run (%(default)s)")
    add("--limit", type=float, default=1800.0, help="most seconds of a run (%(default)s)")
    given = bench.begin(words)
    names = sorted(given.cell.split(","), key=lambda name: name != SERIAL)
    if unknown := [name for name in names if name not in CELLS]:
        raise InputError(f"--cell '{unknown[0]}': give some of {', '.join(CELLS)}")
    settings = [
        Setting(name, length, size, given.batch, given.symbols, given.rate)
        for length, size, name in product(given.steps, given.hidden or PUBLISHED[1:], names)
    ]
    columns = ("steps", "cell", "hidden", "learnt", "updates", "seconds", "milliseconds")
    figures = ("set up, s", "speed-up", "failure")
    bench.print_header()
    with reproducible(given.device, given.threads), torch.enable_grad():
        measured = rows(settings, given.device, bench.say, limit=given.limit, updates=given.updates)
        bench.report(measured, f"memory task: {SURE} right in a row", (*columns, *figures))
