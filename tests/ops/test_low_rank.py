"""LSTMs whose matrices are factorised equal those with the matrices multiplied out, in values and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

import econmt_ops
from econmt_ops import AttentionalLSTMWeights, LowRank, LowRankLSTMWeights, dropout_mask
from econmt_ops.core import chunks as blocks
from econmt_ops.core.weights import AttentionalLSTMState
from econmt_ops.lstm import unrolled
from econmt_ops.products.dropout import derive_seed
from tests.ops.helpers import (
    Make,
    assert_close,
    assert_same_function,
    each_size,
    naive_attentional_lstm,
    naive_lstm,
    padded_part,
    poisoned,
    scatter_strides,
    values_and_gradients,
    whole,
)

each_way = pytest.mark.parametrize("implementation", ["reference", "recompute"])
SIZES = each_size(
    {"B": 1, "T": 1, "I": 1, "H": 1, "L": 1, "R": 1},
    {"B": 2, "T": 5, "I": 3, "H": 7, "L": 1, "R": 2},
    {"B": 3, "T": 4, "I": 9, "H": 5, "L": 2, "R": 1},
    {"B": 4, "T": 11, "I": 8, "H": 8, "L": 3, "R": 9},
)


def arguments(size: SimpleNamespace, make: Make) -> dict[str, Any]:
    return {
        "inputs": make(size.B, size.T, size.I),
        "layers": make.low_rank_layers(size.I, size.H, size.L, size.R),
        "state": make.state(size.B, size.H, size.L),
    }


def decoder(size: SimpleNamespace, make: Make, fed: bool) -> dict[str, Any]:
    bottom = size.I + (size.H if fed else 0)
    return {
        "inputs": make(size.B, size.T, size.I),
        "keys": make(size.B, 3, 4),
        "values": make(size.B, 3, 6),
        "weights": AttentionalLSTMWeights(
            make.low_rank_layers(bottom, size.H, size.L, size.R),
            make(4, size.H),
            make(4),
            make(size.H, size.H + 6, scale=0.5),
            make(size.H),
        ),
        "state": AttentionalLSTMState(make.state(size.B, size.H, size.L), make(size.B, size.H)),
    }


@SIZES
@each_way
@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_lstm_equals_definition(
    size: SimpleNamespace, full: bool, reverse: bool, implementation: str, device: str
) -> None:
    lengths = None if full else torch.linspace(size.T, 1, size.B).round().long()
    options = {"lengths": lengths, "reverse": reverse}

    def function(**tensors: Any) -> Any:
        return econmt_ops.lstm(**tensors, **options, implementation=implementation)

    def definition(layers: tuple[LowRankLSTMWeights, ...], **tensors: Any) -> Any:
        return naive_lstm(layers=whole(layers), **tensors, **options)

    assert_same_function(function, definition, arguments(size, Make(device)))


@SIZES
@each_way
@pytest.mark.parametrize("fed", [True, False], ids=["fed", "not-fed"])
def test_attentional_lstm_equals_definition(
    size: SimpleNamespace, fed: bool, implementation: str, device: str
) -> None:
    options = {"lengths": torch.linspace(3, 1, size.B).round().long(), "input_feeding": fed}

    def function(**tensors: Any) -> Any:
        return econmt_ops.attentional_lstm(**tensors, **options, implementation=implementation)

    def definition(weights: AttentionalLSTMWeights, **tensors: Any) -> Any:
        multiplied = weights._replace(layers=whole(weights.layers))
        return naive_attentional_lstm(weights=multiplied, **tensors, **options)

    assert_same_function(function, definition, decoder(size, Make(device), fed))


@each_way
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)], ids=str
)
@pytest.mark.parametrize("rows", [3, 40])
def test_precisions(dtype: torch.dtype, rows: int, implementation: str, device: str) -> None:
    size = SimpleNamespace(B=rows, T=6, I=4, H=9, L=2, R=3)

    def function(**tensors: Any) -> Any:
        outputs, state = econmt_ops.lstm(**tensors, implementation=implementation)
        assert [outputs.dtype, state[0][0].dtype, state[0][1].dtype] == [dtype, dtype, torch.float32]
        return outputs, state

    def definition(layers: tuple[LowRankLSTMWeights, ...], **tensors: Any) -> Any:
        return naive_lstm(layers=whole(layers), **tensors)

    assert_same_function(function, definition, arguments(size, Make(device)), dtype)


@pytest.mark.parametrize("lengths", [None, torch.tensor([5, 1, 3])], ids=["full", "ragged"])
@each_way
def test_bidirectional_equals_definition(lengths: Tensor | None, implementation: str, device: str) -> None:
    make = Make(device)
    tensors = {
        "inputs": make(3, 5, 4),
        "forward": make.low_rank_layer(4, 6, 2),
        "backward": make.low_rank_layer(4, 6, 3),
    }

    def function(**tensors: Any) -> Any:
        return econmt_ops.bidirectional_lstm(**tensors, lengths=lengths, implementation=implementation)

    def definition(inputs: Tensor, forward: LowRankLSTMWeights, backward: LowRankLSTMWeights) -> Any:
        ahead, back = whole([forward, backward])
        left, (last,) = naive_lstm(inputs, (ahead,), lengths=lengths)
        right, (first,) = naive_lstm(inputs, (back,), lengths=lengths, reverse=True)
        return torch.cat([left, right], 2), (last, first)

    assert_same_function(function, definition, tensors)


@each_way
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_dropout_and_residual_equal_definition(reverse: bool, implementation: str, device: str) -> None:
    size = SimpleNamespace(B=3, T=5, I=4, H=6, L=3, R=2)
    options = {"lengths": torch.tensor([5, 1, 3]), "reverse": reverse, "residual": True}
    masks = [None] + [
        dropout_mask((3, 5, 6), 0.4, derive_seed(11, k), torch.device(device), torch.float64) for k in (1, 2)
    ]

    def function(**tensors: Any) -> Any:
        return econmt_ops.lstm(
            **tensors, **options, dropout=0.4, dropout_seed=11, implementation=implementation
        )

    def definition(layers: tuple[LowRankLSTMWeights, ...], **tensors: Any) -> Any:
        return naive_lstm(layers=whole(layers), **tensors, **options, masks=masks)

    assert_same_function(function, definition, arguments(size, Make(device)))


@each_way
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_padding_has_no_influence(
    dtype: torch.dtype, reverse: bool, implementation: str, device: str
) -> None:
    size = SimpleNamespace(B=5, T=6, I=4, H=7, L=2, R=2)
    lengths = torch.tensor([6, 1, 3, 5, 0])
    clean = arguments(size, Make(device, dtype))

    def function(**tensors: Any) -> Any:
        return econmt_ops.lstm(
            **tensors, lengths=lengths, reverse=reverse, residual=True, implementation=implementation
        )

    expected, expected_gradients = values_and_gradients(function, clean)
    assert padded_part(expected[0], lengths).eq(0).all()
    outputs, gradients = values_and_gradients(
        function, {**clean, "inputs": poisoned(clean["inputs"], lengths)}
    )
    assert_close(outputs, expected, 0.0)
    assert_close(gradients, expected_gradients, 1e-6)
    assert padded_part(gradients[0], lengths).eq(0).all()


@pytest.mark.parametrize("stash", blocks.STASHES)
@pytest.mark.parametrize("fed", [None, True, False], ids=["lstm", "fed", "not-fed"])
def test_stash_levels_in_blocks(stash: str, fed: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 3 * 2 * 4 * 7 * 8)
    size = SimpleNamespace(B=3, T=5, I=4, H=7, L=2, R=2)
    assert len(blocks.split_blocks(size.T, size.B, size.H, torch.float64)) > 1
    tensors = arguments(size, Make("cpu")) if fed is None else decoder(size, Make("cpu"), fed)
    options: dict[str, Any] = {"dropout": 0.3, "dropout_seed": 2, "residual": True}
    options["lengths"] = torch.tensor([3, 1, 2])
    op = econmt_ops.lstm if fed is None else econmt_ops.attentional_lstm
    options |= {} if fed is None else {"input_feeding": fed}
    results = [
        values_and_gradients(lambda how=how, **tensors: op(**tensors, **options, **how), tensors)
        for how in ({"implementation": "reference"}, {"implementation": "recompute", "stash": stash})
    ]
    assert_close(results[1][0], results[0][0], 1e-11)
    assert_close(results[1][1], results[0][1], 1e-11)


class _Shapes(TorchDispatchMode):
    """The shapes of everything that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = OPDEFS.get(func._schema.name)
        if own is not None:
            with self:  # or what the operator does inside would not be seen
                return own._init_fn(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, Tensor):
                self.seen.add(tuple(made.shape))
        return result


@pytest.mark.parametrize(
    "mode", [_Shapes, pytest.param(nullcontext, marks=[pytest.mark.thorough, pytest.mark.slow])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_equals_recompute(
    dtype: torch.dtype, mode: Callable[[], AbstractContextManager[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps go into one function and the fifth is made in place; in a dispatch mode nothing is compiled."""
    monkeypatch.setattr(unrolled, "_TOGETHER", 2)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    tensors = arguments(SimpleNamespace(B=3, T=5, I=4, H=6, L=1, R=2), Make("cpu", dtype))
    lengths = torch.tensor([5, 1, 4])
    with mode():
        for stash, reverse in (("outputs", True), ("gates", False)):
            options = {"lengths": lengths, "stash": stash, "reverse": reverse}
            results = [
                values_and_gradients(
                    lambda way=way, options=options, **tensors: econmt_ops.lstm(
                        **tensors, **options, implementation=way
                    ),
                    tensors,
                )
                for way in ("recompute", "compiled")
            ]
            assert_close(results[1][0], results[0][0], tolerance)
            assert_close(results[1][1], results[0][1], tolerance)
        with torch.no_grad():
            alone, _ = econmt_ops.lstm(**tensors, lengths=lengths, implementation="compiled")
            expected, _ = econmt_ops.lstm(**tensors, lengths=lengths, implementation="reference")
        assert_close([alone], [expected], tolerance)


@each_way
@pytest.mark.parametrize("fed", [None, True], ids=["lstm", "fed"])
def test_the_product_of_the_factors_is_never_made(implementation: str, fed: bool | None) -> None:
    size = SimpleNamespace(B=3, T=5, I=11, H=13, L=1, R=2)
    tensors = arguments(size, Make("cpu")) if fed is None else decoder(size, Make("cpu"), fed)
    op = econmt_ops.lstm if fed is None else econmt_ops.attentional_lstm
    more = {} if fed is None else {"lengths": None}
    watch = _Shapes()
    with watch:
        values_and_gradients(lambda **tensors: op(**tensors, **more, implementation=implementation), tensors)
    assert (15, 52) in watch.seen or (3, 52) in watch.seen
    wide = {(52, 11), (52, 13), (52, 24), (11, 52), (13, 52), (24, 52)}
    assert not watch.seen & wide


def test_memory_layout_does_not_matter() -> None:
    size = SimpleNamespace(B=3, T=4, I=3, H=6, L=2, R=2)
    tensors = arguments(size, Make("cpu"))

    def function(**tensors: Any) -> Any:
        return econmt_ops.lstm(**tensors, lengths=torch.tensor([2, 4, 1]), implementation="recompute")

    expected, expected_gradients = values_and_gradients(function, tensors)
    outputs, gradients = values_and_gradients(function, scatter_strides(tensors))
    assert_close(outputs, expected, 1e-13)
    assert_close(gradients, expected_gradients, 1e-13)


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


@pytest.mark.parametrize("reverse", [[False], [False, True]], ids=["one", "both"])
def test_opcheck(reverse: list[bool]) -> None:
    make = Make("cpu")
    layers = [make.low_rank_layer(3, 4, 2) for _ in reverse]
    lists = (
        [leaf(part) for layer in layers for part in layer.input],
        [leaf(part) for layer in layers for part in layer.hidden],
        [leaf(layer.bias) for layer in layers],
        [leaf(make(2, 4)) for _ in reverse],
        [leaf(make(2, 4)) for _ in reverse],
    )
    arguments = (
        leaf(make(3, 2, 3)),
        *lists,
        torch.tensor([3, 2]),
        None,
        reverse,
        None,
        "gates",
        "eager",
        True,
    )
    torch.library.opcheck(torch.ops.econmt_ops.lstm_layer.default, arguments)


def layer(rank: int = 2, hidden: int = 6) -> LowRankLSTMWeights:
    return Make("cpu").low_rank_layer(3, hidden, rank)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            (layer()._replace(input=LowRank(torch.ones(24, 2), torch.ones(3, 3))),),
            r"layers\[0\]\.input\.left must be \(4H, layers\[0\]\.input\.rank\) with 4H=24, .*rank=3, got \(24, 2\)",
        ),
        (
            (layer()._replace(hidden=LowRank(torch.ones(20, 2), torch.ones(2, 6))),),
            r"layers\[0\]\.hidden\.left must be .*4H=24.*got \(20, 2\)",
        ),
        ((layer(rank=0),), r"layers\[0\]\.hidden must have a rank of at least 1, got 0"),
        (
            (layer(), Make("cpu").layer(6, 6)),
            r"layers\[1\] must be LowRankLSTMWeights, as layers\[0\] is",
        ),
    ],
)
def test_wrong_arguments(layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match="lstm: " + message):
        econmt_ops.lstm(torch.ones(2, 4, 3), layers)


def test_both_directions_are_of_one_kind() -> None:
    with pytest.raises(
        ValueError, match="bidirectional_lstm: backward must be LowRankLSTMWeights, as forward is"
    ):
        econmt_ops.bidirectional_lstm(torch.ones(2, 4, 3), layer(), Make("cpu").layer(3, 6))
