"""`econmt_ops.LSTM` and `GRU` in the place of those of `torch.nn`, and modules of cells that it does not have."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils._pytree import tree_leaves

import econmt_ops
from econmt_ops import LSTMWeights
from econmt_ops.lstm import call_plans
from econmt_ops.products.stack import StackOptions
from tests.ops.helpers import Make, assert_close, padded_part, poisoned

SIZE, HIDDEN, BATCH, STEPS = 5, 7, 4, 6
LENGTHS = torch.tensor([4, 6, 1, 2])
RAGGED = torch.tensor([4, 6, 1, 0])

each_kind = pytest.mark.parametrize("kind", ["LSTM", "GRU", "projected"])
each_direction = pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "bidirectional"])
each_layout = pytest.mark.parametrize("batch_first", [False, True], ids=["time-first", "batch-first"])
each_start = pytest.mark.parametrize("given", [False, True], ids=["zeros", "state"])


def each_case(test: Callable[..., None]) -> Callable[..., None]:
    """Every kind, direction, layout and start."""
    return each_kind(each_direction(each_layout(each_start(test))))


def pair(
    kind: str, device: str = "cpu", dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, Any]:
    """Returns a module of torch.nn and its replacement, with the same parameters."""
    torch.manual_seed(3)
    name = "GRU" if kind == "GRU" else "LSTM"
    ours = {each: options.pop(each) for each in {"residual", "variational", "implementation"} & {*options}}
    if kind == "projected":
        options["proj_size"] = 3
    theirs = getattr(nn, name)(SIZE, HIDDEN, device=device, dtype=dtype, **options)
    module = getattr(econmt_ops, name)(SIZE, HIDDEN, device=device, dtype=dtype, **options, **ours)
    module.load_state_dict(theirs.state_dict())
    return theirs, module


def start(module: Any, batch: int | None = BATCH, scale: float = 1.0) -> Any:
    """Returns initial states; those of one sequence if batch is None."""
    make = Make(module.weight_ih_l0.device.type, module.weight_ih_l0.dtype, seed=5)
    count = module.num_layers * (2 if module.bidirectional else 1)
    rows = () if batch is None else (batch,)
    h = make(count, *rows, module.proj_size or HIDDEN, scale=scale)
    return h if module.mode == "GRU" else (h, make(count, *rows, HIDDEN, scale=scale))


def floats(tree: Any) -> list[Tensor]:
    return [part for part in tree_leaves(tree) if isinstance(part, Tensor) and part.is_floating_point()]


def results(module: Any, *arguments: Any, **options: Any) -> list[Tensor]:
    """Returns outputs, states, and the gradients of inputs, states and parameters."""
    leaves = [leaf.requires_grad_() for leaf in floats(arguments)]
    made = floats(module(*arguments, **options))
    total = torch.stack([(part * Make(str(part.device), part.dtype)(*part.shape)).sum() for part in made])
    return [*made, *torch.autograd.grad(total.sum(), [*leaves, *module.parameters()])]


def compare(theirs: Any, ours: Any, *arguments: Any, tolerance: float = 1e-11) -> None:
    assert_close(results(ours, *arguments), results(theirs, *arguments), tolerance)


@each_kind
def test_one_layer_has_no_dropout_and_draws_nothing(kind: str, device: str) -> None:
    with pytest.warns(UserWarning, match="non-zero dropout expects num_layers greater than 1"):
        _, ours = pair(kind, device, dropout=0.5)
    inputs = Make(device)(STEPS, BATCH, SIZE)
    before = torch.get_rng_state()
    trained = ours.train()(inputs)
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(floats(trained), floats(ours.eval()(inputs)), 0.0)


@each_case
@pytest.mark.parametrize(("layers", "bias"), [(1, False), (2, True)])
def test_results_and_gradients_are_torchs(
    kind: str, bidirectional: bool, batch_first: bool, given: bool, layers: int, bias: bool, device: str
) -> None:
    options = {"num_layers": layers, "bias": bias, "batch_first": batch_first, "bidirectional": bidirectional}
    theirs, ours = pair(kind, device, **options)
    assert repr(ours) == repr(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    make = Make(device)
    inputs = make(BATCH, STEPS, SIZE) if batch_first else make(STEPS, BATCH, SIZE)
    compare(theirs, ours, inputs, *([start(ours)] if given else []))
    compare(theirs, ours, make(STEPS, SIZE), *([start(ours, None)] if given else []))
    if not batch_first:
        assert ours(inputs)[0].is_contiguous()


@pytest.mark.sampled(24)
@each_case
@pytest.mark.parametrize("sort", [False, True], ids=["any-order", "sorted"])
def test_packed_sequences(
    kind: str, bidirectional: bool, batch_first: bool, given: bool, sort: bool, device: str
) -> None:
    theirs, ours = pair(kind, device, num_layers=2, batch_first=batch_first, bidirectional=bidirectional)
    make = Make(device)
    rows = [make(length, SIZE) for length in LENGTHS.tolist()]
    if sort:
        rows.sort(key=len, reverse=True)
    packed = pack_sequence(rows, enforce_sorted=sort)
    first = [start(ours)] if given else []
    expected, actual = theirs(packed, *first), ours(packed, *first)
    for mine, torchs in zip(actual[0][1:], expected[0][1:], strict=True):
        assert (mine is None and torchs is None) or torch.equal(mine, torchs)
    compare(theirs, ours, packed, *first)


@each_kind
@each_direction
def test_lengths_are_packed_sequences(kind: str, bidirectional: bool, device: str) -> None:
    theirs, ours = pair(kind, device, num_layers=2, batch_first=True, bidirectional=bidirectional)
    inputs, first = Make(device)(BATCH, STEPS, SIZE), start(ours)
    expected = theirs(pack_padded_sequence(inputs, LENGTHS, True, enforce_sorted=False), first)
    outputs, last = ours(poisoned(inputs, LENGTHS), first, lengths=LENGTHS)
    assert padded_part(outputs, LENGTHS).eq(0).all()
    packed = pack_padded_sequence(outputs, LENGTHS, True, enforce_sorted=False)
    assert_close([packed.data, *tree_leaves(last)], [expected[0].data, *tree_leaves(expected[1])], 1e-12)


def by_segments(module: Any, inputs: Tensor, state: Any, lengths: Tensor | None, resets: Tensor) -> Any:
    """Runs each layer and direction of each row, segment by segment, by a one-layer module of torch.nn."""
    directions, read = 2 if module.bidirectional else 1, inputs
    final: list[list[tuple[Tensor, ...]]] = []
    for layer in range(module.num_layers):
        made = [torch.zeros(BATCH, STEPS, module.proj_size or HIDDEN).to(inputs) for _ in range(directions)]
        for direction in range(directions):
            one = single(module, layer, direction)
            ends = []
            for row in range(BATCH):
                length = STEPS if lengths is None else int(lengths[row])
                begun = direction == 0 and resets[row, 0] and length
                number = layer * directions + direction
                hx = None if state is None or begun else tuple(part[number, row] for part in state)
                sizes = (module.proj_size or HIDDEN, HIDDEN)[: 1 if module.mode == "GRU" else 2]
                kept = hx or tuple(inputs.new_zeros(size) for size in sizes)
                for begin, end in bounds(resets[row, :length].tolist(), direction):
                    values = read[row, begin:end]
                    values = values.flip(0) if direction else values
                    part, hx = one(values.unsqueeze(0), as_hx(module, hx))
                    made[direction][row, begin:end] = part[0].flip(0) if direction else part[0]
                    kept = tuple(each[0, 0] for each in (hx if isinstance(hx, tuple) else (hx,)))
                    hx = None
                ends.append(kept)
            final.append([torch.stack(part) for part in zip(*ends, strict=True)])  # type: ignore[arg-type]
        read = torch.cat(made, 2)
    return read, [torch.stack(part) for part in zip(*final, strict=True)]  # type: ignore[arg-type]


def bounds(resets: Sequence[bool], direction: int) -> list[tuple[int, int]]:
    """Returns begin and end of the segments of a row, in the order of a direction."""
    begins = [step for step in range(len(resets)) if step == 0 or resets[step]]
    segments = list(zip(begins, [*begins[1:], len(resets)], strict=False))
    return segments[::-1] if direction else segments


def as_hx(module: Any, state: tuple[Tensor, ...] | None) -> Any:
    if state is None:
        return None
    parts = tuple(part.view(1, 1, -1) for part in state)
    return parts[0] if module.mode == "GRU" else parts


def single(module: Any, layer: int, direction: int) -> Any:
    """Returns one layer in one direction of a module of torch.nn as a module of its own, with the same parameters."""
    suffix = f"_l{layer}{'_reverse' if direction else ''}"
    named = [(name, weight) for name, weight in module.named_parameters() if name.endswith(suffix)]
    weights = {name.removesuffix(suffix) + "_l0": weight for name, weight in named}
    kind: Any = getattr(nn, module.mode)
    extra = {"proj_size": module.proj_size} if module.proj_size else {}
    one = kind(weights["weight_ih_l0"].shape[1], HIDDEN, bias=module.bias, batch_first=True, **extra)
    one.to(module.weight_ih_l0)
    return lambda inputs, hx: torch.func.functional_call(one, weights, (inputs, hx))


@pytest.mark.sampled(24)
@each_case
@pytest.mark.parametrize("full", [True, False], ids=["full", "ragged"])
def test_resets_begin_independent_segments(
    kind: str, bidirectional: bool, batch_first: bool, given: bool, full: bool, device: str
) -> None:
    theirs, ours = pair(kind, device, num_layers=2, batch_first=batch_first, bidirectional=bidirectional)
    resets = torch.rand(BATCH, STEPS, generator=torch.Generator().manual_seed(2)) < 0.35
    resets[0, 0] = resets[1, 3] = resets[1, 5] = resets[3, 0] = True
    lengths = None if full else RAGGED
    inputs = Make(device)(BATCH, STEPS, SIZE)
    first = start(ours) if given else None
    states = None if first is None else (first if isinstance(first, tuple) else (first,))

    class Running(nn.Module):
        """The parameters of a module, and a function that runs it."""

        def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
            super().__init__()
            self.module, self.run = module, forward

        def forward(self, inputs: Tensor, state: Any = None) -> Any:
            return self.run(inputs, state)

    def definition(inputs: Tensor, state: Any) -> Any:
        return by_segments(theirs, inputs, state, lengths, resets)

    def run(inputs: Tensor, state: Any) -> Any:
        hx = None if state is None else (state if len(state) == 2 else state[0])
        read = inputs if batch_first else inputs.transpose(0, 1)
        outputs, last = ours(read, hx, lengths=lengths, resets=resets)
        return outputs if batch_first else outputs.transpose(0, 1), last

    arguments = [inputs, *([] if states is None else [states])]
    found, expected = Running(ours, run), Running(theirs, definition)
    assert_close(results(found, *arguments), results(expected, *arguments), 1e-10)


@each_kind
def test_resets_of_one_sequence_and_nowhere(kind: str, device: str) -> None:
    _, ours = pair(kind, device, num_layers=2, batch_first=True)
    inputs = Make(device)(BATCH, STEPS, SIZE)
    resets = torch.zeros(BATCH, STEPS, dtype=torch.bool, device=device)
    resets[:, 3] = True
    outputs, _ = ours(inputs, resets=resets)
    alone, _ = ours(inputs, resets=torch.zeros_like(resets))
    assert_close([alone], [ours(inputs)[0]], 1e-13)
    one = ours(inputs[0], resets=resets[0])[0]
    assert_close([one], [outputs[0]], 1e-13)


@each_kind
def test_copies_and_pickles(kind: str) -> None:
    _, ours = pair(kind, num_layers=2)
    inputs = Make("cpu")(STEPS, BATCH, SIZE)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert_close([copied(inputs)[0]], [ours(inputs)[0]], 0.0)
        copied.weight_ih_l0.data.zero_()
        assert not torch.equal(copied(inputs)[0], ours(inputs)[0])
    shapes, copied = (
        [[weight.shape for weight in layer] for layer in each.all_weights]
        for each in (ours, copy.deepcopy(ours))
    )
    assert shapes == copied
    ours.flatten_parameters()


@each_kind
def test_parameters_start_as_torchs_do(kind: str) -> None:
    name = "GRU" if kind == "GRU" else "LSTM"
    extra = {"proj_size": 3} if kind == "projected" else {}
    states = []
    for module in (nn, econmt_ops):
        torch.manual_seed(1)
        states.append(getattr(module, name)(5, 8, 2, bidirectional=True, **extra).state_dict())
    assert all(states[0][name].equal(states[1][name]) for name in states[0])


def test_a_plan_of_resets_has_no_dropout_of_all_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout 1 there is no launch, also if one of the same shapes is planned."""
    plan, weights = object(), LSTMWeights(torch.ones(8, 3), torch.ones(8, 2), torch.ones(8))
    monkeypatch.setattr(call_plans, "key_of", lambda *_: ("resets",))
    monkeypatch.setattr(call_plans, "PLANS", {("resets",): plan})
    for dropout, expected in ((0.0, plan), (0.999, plan), (1.0, None)):
        options = StackOptions(dropout=dropout, seed=1 if dropout else None)
        assert call_plans.resets_plan(torch.ones(2, 4, 3), [(weights,)], None, options, "auto") is expected


MODULES = [getattr(econmt_ops, name) for name in ("LayerNormLSTM", "SRU", "SSRU", "QRNN", "GILRLSTM")]
each_module = pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.__name__)


@each_module
def test_both_directions_are_two_stacks_side_by_side(kind: Any) -> None:
    torch.manual_seed(0)
    both = kind(3, 4, 2, bidirectional=True)
    inputs, lengths = torch.randn(2, 5, 3), torch.tensor([5, 2])
    outputs, state = both(inputs, lengths=lengths)
    below = [
        both.op(inputs, (both.layer_weights(0, way),), lengths=lengths, reverse=way) for way in (False, True)
    ]
    read = torch.cat([half for half, _ in below], 2)
    above = [
        both.op(read, (both.layer_weights(1, way),), lengths=lengths, reverse=way) for way in (False, True)
    ]
    assert_close([outputs], [torch.cat([half for half, _ in above], 2)], 0.0)
    for actual, (_, (expected,)) in zip(state, [*below, *above], strict=True):
        assert_close(actual, expected, 0.0)


def test_an_sru_has_its_own_size_where_its_weights_fit_two() -> None:
    module, inputs = econmt_ops.SRU(4, 3, bidirectional=True), torch.randn(2, 1, 4)
    weights = module.layer_weights(0)
    u, f, r, x = nn.functional.linear(inputs, *weights).split(3, 2)
    expected = torch.lerp(x, torch.tanh(torch.sigmoid(-f) * u), torch.sigmoid(r))
    assert_close([module(inputs)[0][..., :3]], [expected], 1e-6)
    program = torch.export.export(module, (inputs,), dynamic_shapes={"inputs": {0: torch.export.Dim("B")}})
    assert_close([program.module()(inputs.repeat(3, 1, 1))[0][4:]], [module(inputs)[0]], 1e-6)
    upper = econmt_ops.SRU(3, 3).layer_weights(0)
    assert_close(econmt_ops.sru(inputs, (weights, upper))[0], econmt_ops.sru(expected, (upper,))[0], 1e-6)


@pytest.mark.parametrize("kind", [*MODULES, econmt_ops.LSTM, econmt_ops.GRU])
@torch.no_grad()
def test_inputs_and_outputs_that_are_overwritten_change_no_state(kind: Any) -> None:
    module, inputs = kind(3, 4), torch.randn(2, 5, 3)
    outputs, state = module.op(inputs, (module.layer_weights(0),))
    before = copy.deepcopy(state)
    inputs.zero_()
    outputs.zero_()
    assert_close(tree_leaves(state), tree_leaves(before), 0.0)


@pytest.mark.parametrize("kind", [*MODULES, econmt_ops.LSTM, econmt_ops.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_dropout_only_while_training_and_by_seed(kind: Any, bidirectional: bool, device: str) -> None:
    torch.manual_seed(0)
    module = kind(3, 4, 2, dropout=0.5, bidirectional=bidirectional, device=device)
    inputs = torch.randn(2, 5, 3, device=device)
    kept, again, other = (module(inputs, dropout_seed=seed)[0] for seed in (1, 1, 2))
    assert torch.equal(kept, again)
    assert not torch.equal(kept, other)
    drawn = []
    for seed in (9, 9, 10):
        torch.manual_seed(seed)
        drawn.append(module(inputs)[0])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(module(inputs)[0], module(inputs)[0])
    module.eval()
    module.dropout = 0.0
    assert torch.equal(module(inputs)[0], module.train()(inputs)[0])
    module.dropout = 0.5
    assert torch.equal(module.eval()(inputs)[0], module(inputs, dropout_seed=1)[0])


@each_module
def test_the_sizes_are_shown(kind: Any) -> None:
    module = kind(3, 4, bidirectional=True)
    for each in (module, econmt_ops.LSTM(3, 4, bidirectional=True, batch_first=True)):
        assert each(torch.zeros(0, 5, 3))[0].shape == (0, 5, 8), "as of torch"
    assert repr(module) == f"{kind.__name__}(3, 4, num_layers=1, bidirectional=True)"
    more = "num_layers=2, residual=True, variational=True"
    for each in (kind, econmt_ops.LSTM, econmt_ops.GRU):
        assert repr(each(3, 4, 2, residual=True, variational=True)) == f"{each.__name__}(3, 4, {more})"


@each_module
def test_sizes_and_states_that_do_not_fit_are_told(kind: Any) -> None:
    name = kind.__name__
    for key, sizes in {"input_size": (0, 4), "hidden_size": (3, 0), "num_layers": (3, 4, 0)}.items():
        with pytest.raises(ValueError, match=f"{name}: {key} must be at least 1, got 0"):
            kind(*sizes)
    with pytest.raises(ValueError, match=f"{name}: dropout must be from 0 to 1, got -0.1"):
        kind(3, 4, 2, dropout=-0.1)
    both = kind(3, 4, 2, bidirectional=True)
    size = r"inputs must be \(B, T, input_size\) with input_size=3, got \(2, 5, 4\)"
    with pytest.raises(ValueError, match=f"{name}: {size}"):
        both(torch.randn(2, 5, 4))
    with pytest.raises(ValueError, match=f"{name}: inputs must be a tensor, got None"):
        both(None)
    _, state = both(torch.randn(2, 5, 3))
    for wrong in (state[:3], (*state, state[0])):
        message = f"state must have 4 entries, one per layer and direction, got {len(wrong)}"
        with pytest.raises(ValueError, match=message):
            both(torch.randn(2, 5, 3), wrong)
