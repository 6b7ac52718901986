"""Calls of LSTM layers that follow a plan give what the definition gives, and no plan serves a call of another kind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.rnn import pack_sequence

import econmt_ops
from econmt_ops import LSTMWeights
from econmt_ops.core import precision
from econmt_ops.dispatch.rule import captured, rules_only
from econmt_ops.lstm import call_plans, eager_layer, persistent_layer, triton
from econmt_ops.lstm.call_plans import PLANS
from econmt_ops.lstm.cudnn import in_order
from tests.ops import test_rnn
from tests.ops.helpers import assert_close

SIZE, HIDDEN, BATCH, STEPS = 4, 6, 3, 2


@pytest.fixture(autouse=True)
def _no_plans() -> Iterator[None]:
    """On a GPU TF32 is allowed, as launches of ours need in float32."""
    PLANS.clear()
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
    PLANS.clear()


def _module(device: str, **options: object) -> econmt_ops.LSTM:
    torch.manual_seed(0)
    return econmt_ops.LSTM(SIZE, HIDDEN, batch_first=True, implementation="triton", device=device, **options)  # type: ignore[arg-type]


def _twin(module: econmt_ops.LSTM) -> nn.LSTM:
    """`torch.nn.LSTM` with the same weights, in float64 on the CPU."""
    options = {"bias": module.bias, "batch_first": True, "bidirectional": module.bidirectional}
    twin = nn.LSTM(SIZE, HIDDEN, module.num_layers, **options)
    twin.load_state_dict({name: part.cpu() for name, part in module.state_dict().items()})
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        theirs.requires_grad_(ours.requires_grad)
    return twin.double()


def _inputs(device: str, *shape: int) -> Tensor:
    return torch.randn(shape or (BATCH, STEPS, SIZE), device=device, requires_grad=True)


def _compare(module: econmt_ops.LSTM, inputs: Tensor, state: tuple[Tensor, Tensor] | None = None) -> None:
    """Compares outputs, last states and all gradients with float64's."""
    twin = _twin(module)
    exact = [
        part.detach().cpu().double().requires_grad_(part.requires_grad) for part in (inputs, *(state or ()))
    ]
    results = []
    for run, given, weights in (
        (module, [inputs, *(state or ())], module.parameters()),
        (twin, exact, twin.parameters()),
    ):
        outputs, (h, c) = run(given[0], tuple(given[1:]) or None)
        torch.manual_seed(1)
        seeds = [
            torch.randn(part.shape, dtype=torch.float64).to(part.device, part.dtype)
            for part in (outputs, h, c)
        ]
        leaves = [part for part in (*given, *weights) if part.requires_grad]
        results.append([outputs, h, c, *torch.autograd.grad([outputs, h, c], leaves, seeds)])
    for ours, theirs in zip(*results, strict=True):
        error = (ours.detach().cpu().double() - theirs.detach()).norm() / (theirs.detach().norm() + 1e-3)
        assert error < (3e-3 if inputs.is_cuda else 1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2}, {"bias": False}]
)
def test_second_calls_follow_a_plan(device: str, options: dict[str, int]) -> None:
    module, inputs = _module(device, **options), _inputs(device)
    _compare(module, inputs)
    count = len(PLANS)
    assert count > 0
    _compare(module, inputs)
    assert len(PLANS) == count


def test_a_module_finds_the_plan_of_its_first_call(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, inputs = _module(device), _inputs(device)
    outputs, _ = module(inputs)
    monkeypatch.setattr(module, "_run_layers", None)  # without a plan it would be called again
    torch.testing.assert_close(module(inputs)[0], outputs)


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["made again", "kept"])
def test_a_second_backward_pass_gives_the_same(
    device: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small operands are kept for the first one, which uses up the zeros among them."""
    monkeypatch.setattr(persistent_layer, "_MOST_KEPT", most)
    persistent_layer._PLANS.clear()
    module, inputs = _module(device), _inputs(device)
    with torch.autocast(device, torch.bfloat16):
        module(inputs)
        outputs, _ = module(inputs)
    node: Any = outputs.grad_fn
    while type(node).__name__ != "_LayerFunctionBackward":
        node = node.next_functions[0][0]
    assert (node.operands is not None) == (most > 0)
    leaves = [inputs, *module.parameters()]
    first = torch.autograd.grad(outputs.float().square().sum(), leaves, retain_graph=True)
    assert node.operands is None
    second = torch.autograd.grad(outputs.float().square().sum(), leaves)
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    persistent_layer._PLANS.clear()


def test_c_has_the_type_of_h_in_a_module_and_is_float32_in_the_op(device: str) -> None:
    module, inputs = _module(device), _inputs(device)
    results = []
    for _ in range(2):  # the second call follows a plan
        with torch.autocast(device, torch.bfloat16):
            _, (h, c) = module(inputs)
            _, ((_, exact),) = econmt_ops.lstm(inputs, (module.layer_weights(0),), implementation="triton")
        assert (h.dtype, c.dtype, exact.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        assert torch.equal(c[0], exact.bfloat16())
        weights = [inputs, module.weight_ih_l0, module.weight_hh_l0]
        results.append([torch.autograd.grad(part.float().sum(), weights) for part in (c, exact)])
    for pair in results:
        for one, other in zip(*pair, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_a_first_state(device: str) -> None:
    module, inputs = _module(device, num_layers=2), _inputs(device)
    state = (_inputs(device, 2, BATCH, HIDDEN), _inputs(device, 2, BATCH, HIDDEN))
    for _ in range(2):
        _compare(module, inputs, state)
    _compare(module, inputs)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_lengths(device: str, bidirectional: bool) -> None:
    module, inputs = _module(device, bidirectional=bidirectional), _inputs(device)
    lengths = torch.tensor([2, 0, 1])
    seed = torch.randn(BATCH, STEPS, HIDDEN * (1 + bidirectional), device=device)
    found = []
    for _ in range(2):
        outputs, (_, c) = module(inputs, lengths=lengths)
        found.append([outputs, c, *torch.autograd.grad(outputs, [inputs, *module.parameters()], seed)])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)
    spread = torch.tensor([2, 7, 0, 7, 1, 7])[::2]
    torch.testing.assert_close(module(inputs, lengths=spread)[0], found[0][0])
    with pytest.raises(ValueError, match="lengths must be from 0 to 2, got 3"):
        module(inputs, lengths=torch.tensor([3, 0, 1]))


@test_rnn.each_direction
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_packed_sequences(kind: str, bidirectional: bool, device: str) -> None:
    options = {"bidirectional": bidirectional, "implementation": "triton"}
    theirs, ours = test_rnn.pair(kind, device, torch.float32, **options)
    packed = pack_sequence([torch.randn(length, test_rnn.SIZE) for length in (2, 5, 3)], enforce_sorted=False)
    expected = test_rnn.floats(theirs.cpu().double()(packed.double()))
    for _ in range(2):
        assert_close(test_rnn.floats(ours(packed.to(device))), expected, 3e-3)


def test_other_strides(device: str) -> None:
    """Inputs, weights and gradients may lie in memory in any way."""
    module = _module(device)
    _compare(module, _inputs(device))
    _compare(module, _inputs(device, STEPS, BATCH, SIZE).detach().transpose(0, 1).requires_grad_())
    _compare(module, _inputs(device, BATCH, SIZE, STEPS).detach().mT.requires_grad_())
    _compare(module, torch.randn(BATCH, STEPS, 2 * SIZE, device=device)[:, :, ::2].requires_grad_())
    module.weight_hh_l0.data = module.weight_hh_l0.data.t().contiguous().t()
    module.weight_ih_l0.data = module.weight_ih_l0.data.t().contiguous().t()
    _compare(module, _inputs(device))
    assert len(PLANS) == 1
    outputs = module(_inputs(device))[0]
    outputs.sum().backward()  # whose gradient is one number, expanded


def test_other_shapes_types_and_gradients_have_other_plans(device: str) -> None:
    module, inputs = _module(device), _inputs(device)
    count = 0
    for given in (inputs, _inputs(device, BATCH + 1, STEPS, SIZE), _inputs(device, BATCH, STEPS + 1, SIZE)):
        _compare(module, given)
        count += 1
        assert len(PLANS) == count
    with torch.no_grad():
        outputs = module(inputs)[0]
        again = module(inputs)[0]
    assert not again.requires_grad
    torch.testing.assert_close(again, outputs, rtol=1e-2, atol=1e-3)
    assert len(PLANS) == count + 1
    half = copy.deepcopy(module).half()(inputs.detach().half())[0]
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), outputs, rtol=2e-2, atol=2e-2)
    assert len(PLANS) == count + 2
    exact = module.double()(inputs.double())[0]  # which no launch serves
    assert exact.dtype == torch.float64
    assert len(PLANS) == count + 2
    torch.testing.assert_close(module(inputs.double())[0], exact)


def test_a_plan_depends_on_all_that_its_choice_depends_on(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, inputs = _weights(device), _inputs(device)

    def key(kind: str = "lstm", options: tuple[int, ...] = ()) -> object:
        return call_plans.key_of(kind, inputs, (weights,), None, None, options)

    usual = key()
    assert usual is not None
    others = [key("bidirectional_lstm"), key(options=(1,))]
    for context in (rules_only(), captured(), torch.backends.cudnn.flags(enabled=False)):
        with context:
            others.append(key())
    assert len({usual, *others}) == 6
    with torch.no_grad():
        assert key() != usual


def _weights(device: str) -> LSTMWeights:
    shapes = (4 * HIDDEN, SIZE), (4 * HIDDEN, HIDDEN), (4 * HIDDEN,)
    return LSTMWeights(*(torch.randn(shape, device=device) for shape in shapes))


def test_lengths_of_another_type_follow_no_plan(device: str) -> None:
    weights = _weights(device)
    inputs, lengths = _inputs(device), torch.tensor([2, 1, 2], device=device)
    for _ in range(2):
        econmt_ops.lstm(inputs, (weights,), lengths=lengths, implementation="triton")
    assert len(PLANS) == 1
    with pytest.raises(ValueError, match="lengths must be an int64 tensor"):
        econmt_ops.lstm(inputs, (weights,), lengths=lengths.int(), implementation="triton")


@pytest.mark.parametrize("frozen", ["inputs", "weights", "biases"])
def test_gradients_that_nobody_asks_for(device: str, frozen: str) -> None:
    module, inputs = _module(device), _inputs(device)
    _compare(module, inputs)
    if frozen == "inputs":
        inputs = inputs.detach()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(frozen == "inputs" or (frozen == "biases") == name.startswith("weight"))
    if frozen == "weights":
        module.requires_grad_(False)
    _compare(module, inputs)


def test_outputs_may_be_changed_in_place(device: str) -> None:
    module, inputs = _module(device), _inputs(device)
    for _ in range(2):
        outputs = module(inputs)[0]
        outputs += 1.0
        (2.0 * inputs).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        outputs.sum().backward()  # the layer's own backward pass reads them


def test_no_second_derivative(device: str) -> None:
    module, inputs = _module(device), _inputs(device)
    (gradient,) = torch.autograd.grad(module(inputs)[0].sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        gradient.sum().backward()


def test_dropout_needs_its_seed(device: str) -> None:
    layer = LSTMWeights(*(torch.randn(shape, device=device) for shape in ((24, 6), (24, 6), (24,))))
    inputs = torch.randn(BATCH, STEPS, HIDDEN, device=device)
    options = {"dropout": 0.5, "implementation": "triton"}
    first = econmt_ops.lstm(inputs, (layer, layer), dropout_seed=3, **options)[0]  # type: ignore[arg-type]
    again = econmt_ops.lstm(inputs, (layer, layer), dropout_seed=3, **options)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(again, first)
    assert len(PLANS) == 1
    with pytest.raises(ValueError, match="needs dropout_seed"):
        econmt_ops.lstm(inputs, (layer, layer), **options)  # type: ignore[arg-type]


def test_transforms_and_fake_tensors_see_operators(device: str) -> None:
    module, inputs = _module(device), _inputs(device)
    assert eager_layer.is_plain([inputs, *module.parameters()])
    seen = []

    def look(values: Tensor) -> Tensor:
        seen.append(eager_layer.is_plain([values]) or eager_layer.is_plain([inputs]))
        return values.sum()

    torch.func.grad(look)(inputs)
    torch.vmap(look)(inputs)
    with FakeTensorMode() as mode:
        look(mode.from_tensor(inputs))
        assert not eager_layer.is_plain([inputs])
        assert call_plans.key_of("lstm", inputs, (), None, None, ()) is None
    assert seen == [False] * 3


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("others", [True, False])
def test_tf32_follows_the_setting_of_recurrent_layers(
    monkeypatch: pytest.MonkeyPatch, device: str, allowed: bool, others: bool
) -> None:
    monkeypatch.setattr(triton, "interpreted", lambda: False)
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = allowed, others
    values = torch.zeros(1, device=device)
    assert precision.recurrent_tf32() is allowed
    assert triton.products_type(values.dtype) == (torch.float16 if allowed else None)
    assert triton.products_type(torch.bfloat16) == torch.bfloat16
    keys = call_plans.key_of("lstm", values, (), None, None, ()), None
    torch.backends.cudnn.allow_tf32 = not allowed
    assert call_plans.key_of("lstm", values, (), None, None, ()) != keys[0]
    before = torch.backends.cuda.matmul.allow_tf32
    for wanted in (True, False):
        with precision.MatmulTF32(wanted):
            assert torch.backends.cuda.matmul.allow_tf32 == wanted
        assert torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "rnn"), reason="needs torch 2.9")
def test_the_newer_setting_of_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ieee", "tf32"):
        monkeypatch.setattr(torch.backends.cudnn.rnn, "fp32_precision", name)
        assert precision.recurrent_tf32() is (name == "tf32")


@pytest.mark.cuda
@pytest.mark.parametrize(("batch", "steps", "hidden"), [(32, 20, 128), (5, 9, 100), (64, 12, 512)])
def test_tf32_on_a_gpu(batch: int, steps: int, hidden: int) -> None:
    """With TF32 errors are larger than IEEE's and no larger than those of cuDNN in TF32 by much."""
    torch.manual_seed(0)
    module = econmt_ops.LSTM(hidden, hidden, batch_first=True, device="cuda")
    inputs = torch.randn(batch, steps, hidden, device="cuda", requires_grad=True)
    twins = [nn.LSTM(hidden, hidden, batch_first=True, device="cuda") for _ in range(2)]
    for twin in twins:
        twin.load_state_dict(module.state_dict())
    exact = twins[1].double()
    given = torch.randn(batch, steps, hidden, device="cuda")

    def run(layer: nn.Module, read: Tensor) -> list[Tensor]:
        outputs = layer(read)[0]
        grads = torch.autograd.grad(outputs, [read, *layer.parameters()], given.to(outputs.dtype))
        return [outputs.detach(), *grads]

    wanted = run(exact, inputs.detach().double().requires_grad_())

    def error(found: list[Tensor]) -> float:
        return max(
            float((one.double() - two).norm() / two.norm()) for one, two in zip(found, wanted, strict=True)
        )

    torch.backends.cudnn.allow_tf32 = False
    ieee = error(run(module, inputs))
    torch.backends.cudnn.allow_tf32 = True
    for _ in range(2):  # the second call follows a plan
        tf32, cudnn = error(run(module, inputs)), error(run(twins[0], inputs))
        assert ieee < 2e-5
        assert 4 * ieee < tf32 < 2 * cudnn
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.cuda
@pytest.mark.parametrize("layers", [1, 2])
def test_ieee_layers_are_cudnns(layers: int) -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    module = econmt_ops.LSTM(20, 40, layers, batch_first=True).cuda()
    twin = nn.LSTM(20, 40, layers, batch_first=True, device="cuda")
    twin.load_state_dict(module.state_dict())
    first, *_, last = (part.data_ptr() for part in in_order([module._weights(k) for k in range(layers)]))
    assert last - first == 4 * (sum(part.numel() for part in module.parameters()) - 160)
    inputs = torch.randn(7, 9, 20, device="cuda", requires_grad=True)
    state = torch.randn(2, layers, 7, 40, device="cuda")
    for given in (None, (state[0], state[1])):
        for _ in range(2):
            found = []
            for layer in (module, twin):
                outputs, (h, c) = layer(inputs, given)
                total = outputs.square().sum() + h.sum() + c.sum()
                found.append([outputs, h, c, *torch.autograd.grad(total, [inputs, *layer.parameters()])])
            for ours, theirs in zip(*found, strict=True):
                torch.testing.assert_close(ours, theirs)
    assert len(PLANS) == 2
