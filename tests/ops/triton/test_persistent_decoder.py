"""The attentional LSTM by one launch for a block of steps: values and gradients of the definition, of any size in float32.

Where there is no GPU the kernels run on the CPU; see tests/ops/cuda/host.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from econmt_ops import AttentionalLSTMState, AttentionalLSTMWeights
from econmt_ops.attentional_lstm import problem, reference
from econmt_ops.attentional_lstm.reference import DecoderOptions
from econmt_ops.backends.cuda import decoder
from econmt_ops.core.precision import MatmulTF32
from econmt_ops.dispatch.traits import implementations_of
from econmt_ops.products.stack import StackOptions
from tests.ops.cuda.host import use_host
from tests.ops.helpers import TOLERANCE, Make, assert_same_function, to

attentional_lstm = implementations_of("attentional_lstm")["triton"].function


@pytest.fixture(
    params=[1, pytest.param(2, marks=pytest.mark.thorough), pytest.param(3, marks=pytest.mark.thorough)]
)
def launches(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were launched; on the CPU their threads run in an order drawn from the parameter."""
    if device == "cpu":
        return use_host(monkeypatch, request.param)
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    launched: list[str] = []
    run = decoder.run

    def spy(kernel: str, *arguments: Any, **fields: Any) -> None:
        launched.append(kernel)
        run(kernel, *arguments, **fields)

    monkeypatch.setattr(decoder, "run", spy)
    return launched


def arguments(
    make: Make, batch: int, steps: int, positions: int, layers: int, hidden: int = 64, size: int = 64
) -> dict[str, Any]:
    weights = AttentionalLSTMWeights(
        layers=make.layers(40 + hidden, hidden, layers),
        query=make(size, hidden, scale=0.3),
        score=make(size, scale=0.3),
        combine=make(hidden, hidden + 24, scale=0.3),
        combine_bias=make(hidden),
    )
    return {
        "inputs": make(batch, steps, 40),
        "keys": make(batch, positions, size),
        "values": make(batch, positions, 24),
        "weights": weights,
        "state": AttentionalLSTMState(make.state(batch, hidden, layers), make(batch, hidden, scale=0.5)),
    }


def check(tensors: dict[str, Any], lengths: torch.Tensor | None, dtype: torch.dtype, **options: Any) -> None:
    """Compares with the definition in float64; no gradient enters by the attention weights."""
    stash = options.pop("stash", "attention")
    given = DecoderOptions(lengths, **options)

    def function(**tensors: Any) -> Any:
        outputs, weights, state = attentional_lstm(**tensors, options=given, stash=stash)
        return outputs, weights.detach(), state

    def definition(**tensors: Any) -> Any:
        outputs, weights, state = reference.attentional_lstm(**tensors, options=given)
        return outputs, weights.detach(), state

    assert_same_function(function, definition, tensors, dtype)


def in_twos(steps: int, *_: object, **__: object) -> list[tuple[int, int]]:
    return [(max(0, end - 2), end) for end in range(steps, 0, -2)][::-1]


def check_two_layers(
    device: str, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Dropout and residual sums; blocks of two steps, so that states are handed on; a row of length 0."""
    monkeypatch.setattr(problem, "split_blocks", in_twos)
    tensors = arguments(Make(device), 5, 3, 13, 2)
    lengths = torch.tensor([13, 0, 2, 12, 7], device=device)
    seed = torch.tensor(5, device=device)
    stack = StackOptions(residual=True, dropout=0.4, seed=seed)
    check(tensors, lengths, dtype, stack=stack, stash="outputs")


@pytest.mark.slow
def test_two_layers(device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    check_two_layers(device, monkeypatch)
    assert launches == ["forward", "forward", "backward", "backward"]


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "late",
    [
        {"late_block": 0},
        *(pytest.param({"late_block": block}, marks=pytest.mark.thorough) for block in range(1, 8)),
        *(pytest.param({"late_warp": warp}, marks=pytest.mark.thorough) for warp in range(16)),
    ],
    ids=str,
)
def test_threads_that_are_late_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, late: dict[str, int], others: bool
) -> None:
    """Of the eight blocks that share five rows, three have none to attend from."""
    launches = use_host(monkeypatch, 1, **late, others=others)
    check_two_layers("cpu", monkeypatch)
    assert launches == ["forward", "forward", "backward", "backward"]


@pytest.mark.thorough
def test_two_groups_of_rows(device: str, launches: list[str]) -> None:
    check(arguments(Make(device), 66, 2, 9, 1, size=192), None, torch.float16)
    assert launches == ["forward", "backward"]


@pytest.fixture
def tf32() -> Iterator[None]:
    """Products of float32 may round their factors to TF32."""
    with MatmulTF32(True):
        yield


def scale(tensors: dict[str, Any], factor: float) -> None:
    weights = tensors["weights"]
    for part in (weights.query, weights.combine, *(part for layer in weights.layers for part in layer[:2])):
        part.mul_(factor)


def tiny(tensors: dict[str, Any], _: torch.Tensor) -> None:
    weights, state = tensors["weights"], tensors["state"]
    biases = [weights.combine_bias, *(layer.bias for layer in weights.layers)]
    for part in (*biases, state.output, *sum(state.layers, ())):
        part.zero_()
    for name in ("inputs", "values"):
        tensors[name].mul_(1e-30)


def closed(tensors: dict[str, Any], doutputs: torch.Tensor) -> None:
    """The gradient of the last step falls by orders of magnitude a step."""
    doutputs[:, :-1] = 0
    for layer in tensors["weights"].layers:
        layer.bias.fill_(-5.0)


SIZES: dict[str, Callable[[dict[str, Any], torch.Tensor], object]] = {
    "rows apart": lambda _, doutputs: doutputs.mul_(torch.logspace(-30, 30, 5).to(doutputs)[:, None, None]),
    "closed": closed,
    "tiny": tiny,
    "growing": lambda tensors, doutputs: (doutputs[:, :-1].zero_(), scale(tensors, 4.0)),
    "inputs 1e5": lambda tensors, _: tensors["inputs"].mul_(1e5),
    "weights 20": lambda tensors, _: scale(tensors, 20.0),
}


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize(
    "name",
    [name if name == "rows apart" else pytest.param(name, marks=pytest.mark.thorough) for name in SIZES],
)
def test_float32_of_any_size(name: str, device: str, launches: list[str]) -> None:
    """Saturated gates leave no digits to compare."""
    steps = 2 if name == "rows apart" else 6
    tensors = to(torch.float32, arguments(Make(device), 5, steps, 13, 2))
    doutputs = Make(device, torch.float32, seed=2)(5, steps, 64)
    scale(tensors, 0.4)
    SIZES[name](tensors, doutputs)
    options = DecoderOptions(torch.tensor([13, 0, 2, 12, 7], device=device))

    def made(function: Any, dtype: torch.dtype, **how: Any) -> list[torch.Tensor]:
        leaves, tree = tree_flatten(to(dtype, tensors))
        leaves = [None if leaf is None else leaf.detach().requires_grad_() for leaf in leaves]
        outputs, _, state = function(**tree_unflatten(leaves, tree), options=options, **how)
        wanted = [leaf for leaf in leaves if leaf is not None]
        gradients = torch.autograd.grad(
            outputs, wanted, doutputs.to(dtype), allow_unused=True, materialize_grads=True
        )
        return [part.detach() for part in (outputs, *tree_leaves(state), *gradients) if part is not None]

    got = made(attentional_lstm, torch.float32, stash="attention")
    assert launches == ["forward", "backward"]
    if name in ("growing", "inputs 1e5", "weights 20"):
        assert all(part.isfinite().all() for part in got)
        return
    for one, exact in zip(got, made(reference.attentional_lstm, torch.float64), strict=True):
        assert (one - exact).norm() <= TOLERANCE[torch.float16] * exact.norm() + 1e-36


@pytest.mark.thorough
@pytest.mark.usefixtures("tf32")
def test_two_layers_in_float32(device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TOLERANCE, torch.float32, TOLERANCE[torch.bfloat16])
    check_two_layers(device, monkeypatch, torch.float32)
    assert launches == ["forward", "forward", "backward", "backward"]


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_repetitions_are_equal(dtype: torch.dtype, device: str) -> None:
    """To the bit, at sizes that fill a GPU, where a warp has more positions than places for them."""
    if device == "cpu":
        pytest.skip("kernels that run one thread after the other repeat themselves")
    tensors = to(dtype, arguments(Make(device), 128, 40, 100, 2, hidden=512, size=512))
    options = DecoderOptions(None)
    first, *others = [attentional_lstm(**tensors, options=options, stash="attention")[:2] for _ in range(20)]
    assert all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))


@pytest.mark.usefixtures("tf32")
def test_which_calls_run_in_blocks(device: str, launches: list[str]) -> None:
    """Other types, sizes, attentions and stashes run step by step."""
    make = Make(device)

    def sizes(dtype: torch.dtype = torch.bfloat16, hidden: int = 64, size: int = 64, layers: int = 1) -> Any:
        return decoder.DecoderSizes(dtype, hidden, size, layers, 9, 4, masked=False, residual=False)

    assert sizes().are_served()
    assert sizes(hidden=512, size=512, layers=2).are_served()
    assert sizes(hidden=512, size=256).are_served()
    assert sizes(torch.float32).are_served()
    assert not sizes(torch.float64).are_served()
    assert not sizes(hidden=96).are_served()
    assert not sizes(hidden=1024, size=1024).are_served()
    assert not sizes(hidden=512, size=512, layers=3).are_served()
    assert not sizes()._replace(positions=60_000).are_served()
    for options in ({"stash": "gates"}, {"input_feeding": False}):
        tensors = arguments(make, 3, 2, 4, 1)
        if "input_feeding" in options:
            layer = tensors["weights"].layers[0]
            tensors["weights"] = tensors["weights"]._replace(layers=(layer._replace(input=make(256, 40)),))
        check(tensors, None, torch.float16, **options)
    assert not launches


@pytest.mark.usefixtures("tf32")
def test_tensors_may_begin_anywhere(
    device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As parameters do that are parts of one vector; the kernels read and write 16 bytes at a time."""
    set_field = decoder._set

    def set_aligned(argument: Any, name: str, value: Any) -> None:
        for part in tree_leaves(value):
            assert not isinstance(part, torch.Tensor) or part.data_ptr() % 16 == 0, name
        set_field(argument, name, value)

    monkeypatch.setattr(decoder, "_set", set_aligned)
    make, found, options = Make(device, torch.float32), [], DecoderOptions(None, overwrites=True)
    tensors, doutputs = arguments(make, 3, 1, 5, 2), make(1, 3, 64)
    for before in (0, 1):

        def moved(part: torch.Tensor, before: int = before) -> torch.Tensor:
            whole = torch.cat([part.new_zeros(before), part.flatten()])
            return whole[before:].view_as(part).requires_grad_()

        given = tree_map_only(torch.Tensor, moved, tensors)
        outputs, _, _ = attentional_lstm(**given, options=options, stash="attention")
        wanted = [part for part in tree_leaves(given) if part is not None]
        gradients = torch.autograd.grad(outputs, wanted, moved(doutputs).detach().transpose(0, 1))
        found.append([outputs, *gradients])
    assert launches == ["forward", "backward"] * 2
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("in_blocks", [True, False])
def test_the_gradient_of_the_outputs_is_overwritten_only_if_allowed(
    device: str, launches: list[str], monkeypatch: pytest.MonkeyPatch, in_blocks: bool
) -> None:
    """The same bits; a later block of steps must not read what an earlier one wrote."""
    monkeypatch.setattr(problem, "split_blocks", in_twos)
    if not in_blocks:
        monkeypatch.setattr(decoder, "serves", lambda *_: False)
    found = []
    for overwrites in (False, True):
        tensors = arguments(Make(device, torch.bfloat16), 5, 3, 13, 2)
        leaves = [part for part in tree_leaves(tensors) if part is not None]
        for leaf in leaves:
            leaf.requires_grad_()
        options = DecoderOptions(None, overwrites=overwrites)
        outputs, _, _ = attentional_lstm(**tensors, options=options, stash="attention")
        incoming: list[torch.Tensor] = []
        time_first = outputs.transpose(0, 1)
        time_first.register_hook(incoming.append)
        factors = torch.linspace(-1.0, 1.0, outputs.numel(), device=device).view(time_first.shape)
        (time_first * factors.to(outputs.dtype)).sum().backward()
        assert (not incoming[0].equal(factors.to(outputs.dtype))) == overwrites
        found.append([leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *found))
    assert bool(launches) == in_blocks
