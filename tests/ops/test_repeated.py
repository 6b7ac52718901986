"""Inputs given as distinct rows: everywhere what the inputs written out give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import econmt_ops
from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights, UniqueRows
from econmt_ops.core import chunks as blocks
from econmt_ops.dispatch.session import measuring
from econmt_ops.lstm import recompute
from econmt_ops.products.stack import StackOptions
from tests.ops.helpers import Make, assert_close, values_and_gradients

ROWS, BATCH, STEPS, WIDTH, HIDDEN = 4, 3, 5, 6, 7
LENGTHS = torch.tensor([4, 1, 2])
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["reference", "recompute"])
STASH = pytest.mark.parametrize("stash", blocks.STASHES)
KIND = pytest.mark.parametrize("low_rank", [False, True], ids=["whole", "low-rank"])
RAGGED = pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["full", "ragged"])


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workspaces so small that every sequence is cut into blocks."""
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 3 * 2 * 4 * 7 * 8)


def some_places() -> Tensor:
    """Row 3 stands nowhere within the lengths, row 2 nowhere at all."""
    places = torch.tensor([[0, 1, 1, 0, 3], [1, 3, 3, 3, 3], [0, 0, 3, 3, 1]])
    assert places.shape == (BATCH, STEPS)
    return places


def stack(make: Make, low_rank: bool, width: int, count: int) -> Any:
    return make.low_rank_layers(width, HIDDEN, count, 2) if low_rank else make.layers(width, HIDDEN, count)


def same(op: Callable[..., Any], arguments: dict[str, Any], **options: Any) -> None:
    """The op on rows, by one implementation, gives values and gradients of the reference on inputs written out."""
    places = some_places()

    def repeated(rows: Tensor, **others: Any) -> Any:
        return op(UniqueRows(rows, places), **others, **options)

    written = {name: value for name, value in options.items() if name not in ("implementation", "stash")}

    def definition(rows: Tensor, **others: Any) -> Any:
        return op(rows[places], **others, **written, implementation="reference")

    values, gradients = values_and_gradients(definition, arguments)
    made, made_gradients = values_and_gradients(repeated, arguments)
    assert_close(made, values, 1e-10)
    assert_close(made_gradients, gradients, 1e-10)


@pytest.mark.usefixtures("small_blocks")
@IMPLEMENTATIONS
@STASH
@KIND
@RAGGED
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_lstm(implementation: str, stash: str, low_rank: bool, lengths: Tensor | None, reverse: bool) -> None:
    make = Make("cpu")
    arguments = {
        "rows": make(ROWS, WIDTH),
        "layers": stack(make, low_rank, WIDTH, 2),
        "state": make.state(BATCH, HIDDEN, 2),
    }
    same(
        econmt_ops.lstm,
        arguments,
        lengths=lengths,
        reverse=reverse,
        residual=True,
        dropout=0.4,
        dropout_seed=3,
        stash=stash,
        implementation=implementation,
    )


@pytest.mark.usefixtures("small_blocks")
@IMPLEMENTATIONS
@STASH
@KIND
@RAGGED
def test_bidirectional_lstm(implementation: str, stash: str, low_rank: bool, lengths: Tensor | None) -> None:
    make = Make("cpu")
    forward, backward = stack(make, low_rank, WIDTH, 1)[0], stack(make, low_rank, WIDTH, 1)[0]
    arguments = {"rows": make(ROWS, WIDTH), "forward": forward, "backward": backward}
    same(
        econmt_ops.bidirectional_lstm, arguments, lengths=lengths, stash=stash, implementation=implementation
    )


@pytest.mark.usefixtures("small_blocks")
@IMPLEMENTATIONS
@STASH
@KIND
@pytest.mark.parametrize("input_feeding", [True, False], ids=["fed", "not-fed"])
@pytest.mark.parametrize("layers", [1, 2])
def test_attentional_lstm(
    implementation: str, stash: str, low_rank: bool, input_feeding: bool, layers: int
) -> None:
    make = Make("cpu")
    width = WIDTH + HIDDEN if input_feeding else WIDTH
    arguments = {
        "rows": make(ROWS, WIDTH),
        "keys": make(BATCH, 4, 9),
        "values": make(BATCH, 4, 8),
        "weights": AttentionalLSTMWeights(
            stack(make, low_rank, width, layers),
            make(9, HIDDEN),
            make(9),
            make(HIDDEN, HIDDEN + 8, scale=0.5),
            make(HIDDEN),
        ),
        "state": AttentionalLSTMState(make.state(BATCH, HIDDEN, layers), make(BATCH, HIDDEN)),
    }
    same(
        econmt_ops.attentional_lstm,
        arguments,
        lengths=LENGTHS,
        input_feeding=input_feeding,
        dropout=0.4 if layers > 1 else 0.0,
        dropout_seed=3,
        stash=stash,
        implementation=implementation,
    )


@RAGGED
def test_kept_gates(lengths: Tensor | None) -> None:
    make = Make("cpu")
    layers, state = make.layers(WIDTH, HIDDEN, 2), make.state(BATCH, HIDDEN, 2)
    both = [make.layer(WIDTH, HIDDEN) for _ in range(2)]

    def run(read: Any) -> list[Tensor]:
        outputs, _ = recompute.lstm(read, layers, state, StackOptions(lengths), stash="gates")
        others, _ = recompute.bidirectional_lstm(read, *both, lengths=lengths, stash="gates")
        return [outputs, others]

    rows = make(ROWS, WIDTH).requires_grad_()
    made, expected = run(UniqueRows(rows, some_places())), run(rows[some_places()])
    assert_close(made, expected, 1e-12)
    gradients = [
        torch.autograd.grad(sum(part.square().sum() for part in parts), rows) for parts in (made, expected)
    ]
    assert_close(gradients[0], gradients[1], 1e-12)


@IMPLEMENTATIONS
def test_what_only_padding_reads_has_no_influence(implementation: str) -> None:
    make = Make("cpu")
    rows, layers, both = make(ROWS, WIDTH), make.layers(WIDTH, HIDDEN, 1), make.layers(WIDTH, HIDDEN, 1) * 2

    def run(rows: Tensor, layers: Any, both: Any) -> Any:
        inputs = UniqueRows(rows, some_places())
        one = econmt_ops.lstm(inputs, layers, lengths=LENGTHS, implementation=implementation)
        return one, econmt_ops.bidirectional_lstm(
            inputs, *both, lengths=LENGTHS, implementation=implementation
        )

    values, gradients = values_and_gradients(run, {"rows": rows, "layers": layers, "both": both})
    poisoned = rows.clone()
    poisoned[3] = float("nan")
    made, made_gradients = values_and_gradients(run, {"rows": poisoned, "layers": layers, "both": both})
    assert_close(made, values, 0.0)
    assert_close(made_gradients, gradients, 0.0)
    assert bool((gradients[0][2:] == 0.0).all())


@pytest.mark.parametrize("op", ["lstm_layer", "attentional_lstm"])
def test_opcheck(op: str) -> None:
    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_()

    make = Make("cpu", torch.float32)
    rows, places = leaf(make(ROWS, WIDTH)), some_places()
    width = WIDTH if op == "lstm_layer" else WIDTH + HIDDEN
    layer = [leaf(part) for part in make.layer(width, HIDDEN)]
    weights = [[part] for part in layer]
    state = [[leaf(make(BATCH, HIDDEN))], [leaf(make(BATCH, HIDDEN))]]
    if op == "lstm_layer":
        rest: tuple[Any, ...] = (
            *weights,
            *state,
            LENGTHS,
            places.t(),
            [True],
            None,
            "gates",
            "eager",
            True,
        )
    else:
        attention = [leaf(make(BATCH, 4, 9)), leaf(make(BATCH, 4, 8))]
        others = [leaf(make(9, HIDDEN)), leaf(make(9)), leaf(make(HIDDEN, HIDDEN + 8)), leaf(make(HIDDEN))]
        options = (False, 0.0, 0, None, 0, False, 1.0, False, "gates", "eager", False, True)
        absent = (None,) * 10  # context gate, normalisations and coverage
        end = (*absent, LENGTHS, places, *state, leaf(make(BATCH, HIDDEN)), None, "lstm", "", *options)
        rest = (*attention, *weights, [], [], *others, *end)
    torch.library.opcheck(getattr(torch.ops.econmt_ops, op).default, (rows, *rest))


def test_measured_apart_from_inputs_written_out() -> None:
    """Choices by measurement tell both apart, but not the number of rows."""
    make = Make("cpu", torch.float32)
    layers = make.layers(WIDTH, HIDDEN, 1)
    with measuring(remember=False) as session:
        econmt_ops.lstm(make(BATCH, STEPS, WIDTH), layers)
        econmt_ops.lstm(UniqueRows(make(ROWS, WIDTH), some_places()), layers)
        econmt_ops.lstm(UniqueRows(make(ROWS + 1, WIDTH), some_places()), layers)
    plain, repeated = session.measurements
    assert "repeated" in repeated
    assert "repeated" not in plain
    assert session.measurements[repeated].calls == 2


def test_bad_arguments() -> None:
    make = Make("cpu")
    layers = make.layers(WIDTH, HIDDEN, 1)
    with pytest.raises(ValueError, match=r"lstm: inputs.places must be an int64 tensor, got torch.int32"):
        econmt_ops.lstm(UniqueRows(make(ROWS, WIDTH), some_places().int()), layers)
    with pytest.raises(ValueError, match=r"lstm: inputs.rows must be \(N, I\), got \(4, 6, 1\)"):
        econmt_ops.lstm(UniqueRows(make(ROWS, WIDTH, 1), some_places()), layers)
    with pytest.raises(ValueError, match=r"layers\[0\].input must be .* I=5"):
        econmt_ops.lstm(UniqueRows(make(ROWS, WIDTH - 1), some_places()), layers)
