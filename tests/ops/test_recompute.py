"""What the recomputing implementations promise beside equal results: blocks, stash levels, registration, memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import econmt_ops
from econmt_ops.attentional_lstm import recompute as attentional_module
from econmt_ops.core import chunks as blocks
from econmt_ops.core.weights import AttentionalLSTMWeights
from econmt_ops.linear_cross_entropy import recompute as loss_module
from econmt_ops.products.dropout import dropout
from tests.ops.cases import CASES, Sizes
from tests.ops.checking import distinct_rows
from tests.ops.helpers import Make, assert_close


def recorded_calls(function: Callable[[], Any], names: set[str]) -> dict[str, tuple[Any, ...]]:
    """The arguments of the first call of each of our operators during ``function``."""
    seen: dict[str, tuple[Any, ...]] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func.name()
            if name in names:
                seen.setdefault(name, args)
            return func(*args, **(kwargs or {}))

    with Recorder():
        function()
    return seen


OPERATORS = [
    ("additive_attention", "additive_attention", False),
    ("attentional_lstm", "attentional-lnlstm-per-gate-gru-layer_norm", False),
    ("attentional_lstm", "attentional-lstm-additive", True),
    ("lstm_layer", "lstm", False),
    ("lstm_layer", "lstm-low-rank", True),
    ("lstm_layer", "bidirectional", True),
    ("lstm_layer", "bidirectional-low-rank", False),
    ("dropout", "lstm", False),
]
"""Operators, the cases that call them, and whether the inputs are distinct rows."""


def check_operator(operator: str, function: Callable[[], Any], keeps: Sequence[bool]) -> None:
    """Checks an operator by its first call in a function, as a forward pass with gradients that keeps what it needs."""
    name = f"econmt_ops::{operator}"
    arguments = list(recorded_calls(function, {name})[name])
    arguments[len(arguments) - len(keeps) :] = keeps
    arguments = [
        [part.detach().clone().requires_grad_() for part in argument]
        if isinstance(argument, list) and argument and isinstance(argument[0], Tensor)
        else argument.detach().clone().requires_grad_(argument.is_floating_point())
        if isinstance(argument, Tensor)
        else argument
        for argument in arguments
    ]
    overload = getattr(torch.ops.econmt_ops, operator).default
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if operator != "linear_cross_entropy":  # it returns gradients, too, which it refuses to differentiate
        checks.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(overload, tuple(arguments), test_utils=checks)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("operator", "name", "repeated"), OPERATORS)
def test_operators_are_registered_as_torch_expects(operator: str, name: str, repeated: bool) -> None:
    """Schema, autograd registration, FakeTensor and tracing with gradients agree with what really runs."""
    case, lengths = CASES[name], torch.tensor([3, 1, 0, 2])
    tensors = case.tensors(Make("cpu", torch.float32), Sizes(4, 3, 3))
    tensors = distinct_rows(tensors, None) if repeated else tensors
    dropout = {"dropout": 0.3, "dropout_seed": 1} if case.takes("dropout") else {}
    keeps = [True] if operator in ("lstm_layer", "attentional_lstm") else []

    def run() -> None:
        case.op(**tensors, **case.options, **dropout, lengths=lengths, implementation="recompute")

    check_operator(operator, run, keeps)


def test_the_loss_is_registered_as_torch_expects() -> None:
    make, targets = Make("cpu", torch.float32), torch.tensor([0, 3, 2])

    def run() -> None:
        econmt_ops.linear_cross_entropy(make(3, 5), make(11, 5), targets, implementation="recompute")

    check_operator("linear_cross_entropy", run, [True])


def stashed_bytes(function: Callable[[], Any], own: list[Tensor]) -> int:
    """Bytes of the storages that autograd keeps while ``function`` runs, its arguments ``own`` left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, Tensor] = {}

    def save(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        function()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def test_stash_is_what_the_levels_say() -> None:
    """o, every h and c a block; then the attention, every c, and the gates."""
    batch, steps, size, positions = 4, 6, 8, 5
    given = Sizes(batch, steps, positions, 6, size, 9, 8)
    arguments = CASES["attentional-lstm-additive"].tensors(Make("cpu", torch.float32), given)
    own = [leaf.requires_grad_() for leaf in tree_leaves(arguments) if leaf is not None]

    def run(implementation: str, **options: Any) -> int:
        call = partial(econmt_ops.attentional_lstm, **arguments, lengths=None, **options)
        return stashed_bytes(lambda: call(implementation=implementation), own)

    sizes = {level: run("recompute", stash=level) for level in blocks.STASHES}
    cell = batch * size * 4
    outputs = steps * cell + 2 * steps * cell + 2 * cell
    assert sizes["outputs"] == outputs
    assert sizes["attention"] == outputs + steps * batch * positions * 4
    assert sizes["cells"] == sizes["attention"] + 2 * (steps - 1) * cell
    assert sizes["gates"] == sizes["cells"] + 2 * steps * 4 * cell
    assert run("reference") > 4 * sizes["attention"]


def test_lstm_stash_is_its_outputs_and_no_mask() -> None:
    batch, steps, size = 4, 6, 8
    given = Sizes(batch, steps, I=6, H=size, L=3)
    arguments = CASES["lstm"].tensors(Make("cpu", torch.float32), given)
    own = [leaf.requires_grad_() for leaf in tree_leaves(arguments)]
    kept = stashed_bytes(lambda: econmt_ops.lstm(**arguments, implementation="recompute"), own)
    assert kept == 3 * (steps + 1) * batch * size * 4
    # What it makes is compared in test_definitions.py.
    values = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    for variational in (False, True):
        kept = stashed_bytes(lambda variational=variational: dropout(values, 0.4, 11, variational), [values])
        assert kept == 0


class Alive(TorchDispatchMode):
    """Follows the bytes of the tensors that are made inside of it and still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in own and storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def test_decoder_backward_makes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its peak there are the gradients, one of each, and the workspaces: no copies of keys, values or sums."""
    batch, steps, size, positions = 8, 24, 32, 40
    monkeypatch.setattr(blocks, "_BLOCK_BYTES", 2 * batch * 4 * size * 4)
    monkeypatch.setattr(blocks, "_PART_BYTES", positions * size * 4)
    make = Make("cpu", torch.float32)
    weights = AttentionalLSTMWeights(
        make.layers(2 * size, size, 2), make(size, size), make(size), make(size, 2 * size), make(size)
    )
    arguments = {
        "inputs": make(batch, steps, size),
        "keys": make(batch, positions, size),
        "values": make(batch, positions, size),
        "weights": weights,
    }
    leaves = [leaf.requires_grad_() for leaf in tree_leaves(arguments) if leaf is not None]
    lengths = torch.full((batch,), positions)

    def run() -> None:
        outputs, *_ = econmt_ops.attentional_lstm(**arguments, lengths=lengths, implementation="recompute")
        outputs.backward(torch.ones(batch, steps, size))

    (call,) = recorded_calls(run, {"econmt_ops::attentional_lstm_backward"}).values()
    with torch.no_grad(), Alive() as alive:
        results = attentional_module._operator.backward._init_fn(*call)
    made = sum(result.numel() * 4 for result in results)
    assert made == sum(leaf.numel() * 4 for leaf in leaves) + 5 * batch * size * 4
    # Of a block of two steps: gates, cells and what the products after the loop read, in units of B H values; the
    # projected values; and of all steps, before there is the gradient of the values, what is made of it.
    workspace = 52 * batch * size * 4 + 4 * positions * size * 4 + batch * positions * size * 4
    workspace += batch * (steps * (size + positions) - positions * size) * 4
    joint_weights = 2 * 4 * size * 2 * size * 4
    assert alive.peak < made + workspace + joint_weights
    assert positions * size * batch * 4 == 40 * batch * size * 4  # the size of one more copy of the keys


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_of_a_kept_graph_can_be_asked_twice(reduction: str) -> None:
    """The backward pass may scale what the forward pass kept in its place only where nothing asks again."""
    make = Make("cpu")
    hidden, weight, bias = (make(*shape).requires_grad_() for shape in ((7, 5), (11, 5), (11,)))
    own, targets = (hidden, weight, bias), torch.randint(11, (7,))
    found = {}
    for name in ("reference", "recompute"):
        loss = econmt_ops.linear_cross_entropy(
            hidden, weight, targets, bias=bias, reduction=reduction, implementation=name
        )
        factors = (3.0, 0.0, -0.5)
        found[name] = [torch.autograd.grad(loss * factor, own, retain_graph=True) for factor in factors]
        found[name].append(torch.autograd.grad(loss * 2.0, own))
    for expected, actual in zip(found["reference"], found["recompute"], strict=True):
        assert_close(actual, expected, 1e-14)


def test_gradient_of_the_loss_is_not_copied() -> None:
    """Where the graph is walked once, the gradients of the forward pass are those that the backward pass returns."""
    hidden, weight = torch.randn(7, 5).requires_grad_(), torch.randn(11, 5).requires_grad_()
    loss = econmt_ops.linear_cross_entropy(
        hidden, weight, torch.randint(11, (7,)), implementation="recompute"
    )
    kept = {tensor.data_ptr() for tensor in loss.grad_fn.saved_tensors if tensor is not None}
    (loss * 3.0).backward()
    assert {hidden.grad.data_ptr(), weight.grad.data_ptr()} <= kept


def test_chunks_of_bfloat16_are_as_many_bytes_as_their_float32_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocabulary = 50
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 8 * vocabulary * 4)
    rows: list[int] = []

    def kernel(logits: Tensor, *_: object) -> Tensor:
        rows.append(len(logits))
        return logits.new_zeros(len(logits), dtype=torch.float32)

    monkeypatch.setattr(loss_module, "losses_for", lambda *_: kernel)
    targets = torch.zeros(20, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight = torch.zeros(20, 4, dtype=dtype), torch.zeros(vocabulary, 4)
        econmt_ops.linear_cross_entropy(hidden, weight, targets, implementation="recompute")
    assert rows == [8, 8, 4] * 2


def test_loss_makes_a_chunk_of_logits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the gradients and one chunk's logits nothing of the size of a chunk exists."""
    chunk, vocabulary = 64, 500
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", chunk * vocabulary * 4)
    hidden, weight = torch.randn(256, 4), torch.randn(vocabulary, 4)
    targets = torch.randint(vocabulary, (256,))
    with Alive() as alive:
        call = loss_module.CrossEntropyArguments(hidden, weight, targets, None, 0.1, -100, "sum")
        loss_module._forward(call, True)
    assert alive.peak < 1.5 * chunk * vocabulary * 4
