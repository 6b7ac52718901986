"""`econmt_ops.LSTM` and `GRU` under torch.compile, torch.export, torch.func, autocast and GradScaler, and their errors."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils._pytree import tree_leaves

import econmt_ops
from tests.ops.helpers import Make, assert_close
from tests.ops.test_rnn import BATCH, HIDDEN, LENGTHS, SIZE, STEPS, results

RESETS = torch.rand(BATCH, STEPS, generator=torch.Generator().manual_seed(2)) < 0.35

each_module = pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {}),
        ("GRU", {}),
        ("LSTM", {"bidirectional": True, "batch_first": True}),
        ("LSTM", {"proj_size": 3}),
    ],
    ids=["LSTM", "GRU", "bidirectional", "projected"],
)


def module_and_inputs(kind: str, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    module = getattr(econmt_ops, kind)(SIZE, HIDDEN, 2, dtype=dtype, **options)
    shape = (BATCH, STEPS, SIZE) if getattr(module, "batch_first", True) else (STEPS, BATCH, SIZE)
    return module, Make("cpu", dtype)(*shape)


@pytest.mark.sampled(2)
@each_module
@pytest.mark.parametrize("given", [{}, {"lengths": LENGTHS, "resets": RESETS}], ids=["plain", "ragged"])
def test_compiled_without_a_graph_break(kind: str, options: dict[str, Any], given: dict[str, Any]) -> None:
    torch._dynamo.reset()
    module, inputs = module_and_inputs(kind, options)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert_close(results(compiled, inputs, **given), results(module, inputs, **given), 1e-5)


def test_a_compiled_layer_is_one_operator() -> None:
    torch._dynamo.reset()
    module, inputs = module_and_inputs("LSTM", {})
    targets: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch.compile(module, fullgraph=True, backend=note)(inputs)
    assert targets.count("econmt_ops.lstm_layer.default") == 2


@pytest.mark.parametrize("kind", ["LSTM", pytest.param("GRU", marks=pytest.mark.slow)])
def test_compiled_packed_sequences_and_dropout(kind: str) -> None:
    torch._dynamo.reset()
    module, inputs = module_and_inputs(kind, {"dropout": 0.5})
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    packed = pack_sequence([inputs[:length, 0] for length in (3, 6, 1)], enforce_sorted=False)
    first, second = compiled(packed)[0].data, compiled(packed)[0].data
    assert not torch.equal(first, second)
    module.eval()
    assert_close([compiled(packed)[0].data], [module(packed)[0].data], 1e-5)


@pytest.mark.sampled(1)
@each_module
def test_exported(kind: str, options: dict[str, Any]) -> None:
    module, inputs = module_and_inputs(kind, options)
    module.eval()
    batch = 0 if module.batch_first else 1
    dynamic = {"input": {batch: torch.export.Dim.DYNAMIC}}
    buffer = io.BytesIO()
    with torch.no_grad():
        torch.export.save(torch.export.export(module, (inputs,), dynamic_shapes=dynamic), buffer)
    buffer.seek(0)
    program = torch.export.load(buffer)
    assert not [node for node in program.graph.nodes if "econmt_ops" in str(node.target)]
    strict = torch.export.export(module, (inputs,), strict=True)
    assert not [node for node in strict.graph.nodes if "econmt_ops" in str(node.target)]
    few = inputs.narrow(batch, 0, 3)
    assert_close(tree_leaves(program.module()(few)), tree_leaves(module(few)), 1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_transforms_of_torch_func(kind: str) -> None:
    """torch.lstm and torch.gru support neither torch.vmap nor, in float32, forward-mode differentiation."""
    module, inputs = module_and_inputs(kind, {"bidirectional": True})

    def loss(scale: Any) -> Any:
        weights = {name: weight * scale for name, weight in module.named_parameters()}
        return torch.func.functional_call(module, weights, (inputs * scale,))[0].square().sum()

    scales = torch.tensor([1.0, 1.5], requires_grad=True)
    expected = [loss(scale) for scale in scales]
    slopes = torch.autograd.grad(sum(expected), scales)
    assert_close([*torch.vmap(loss)(scales)], expected, 1e-5)
    for slope in (torch.func.grad(loss), torch.func.jacfwd(loss)):
        assert_close([torch.vmap(slope)(scales)], slopes, 1e-5)
        assert_close([slope(scales[1])], [slopes[0][1]], 1e-5)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "SRU", "QRNN", "GILRLSTM"])
def test_second_derivatives_of_small_layers(kind: str) -> None:
    module, inputs = module_and_inputs(kind, {}, torch.float64)
    module.implementation = "auto" if kind in ("LSTM", "GRU") else "reference"
    leaves = [inputs[:2, :2].clone().requires_grad_()]
    assert torch.autograd.gradgradcheck(lambda given: module(given)[0], leaves)
    module.implementation = "recompute"
    (gradient,) = torch.autograd.grad(module(*leaves)[0].sum(), leaves, create_graph=True)
    told = "econmt_ops::.* has no {}; name implementation='reference'"
    with pytest.raises(RuntimeError, match=told.format("second derivative")):
        gradient.sum().backward()
    with pytest.raises(RuntimeError, match=told.format("gradient of torch.func")):
        torch.func.grad(lambda given: module(given)[0].sum())(inputs)


@each_module
def test_autocast_and_grad_scaler(kind: str, options: dict[str, Any], device: str) -> None:
    module, inputs = module_and_inputs(kind, options)
    module, inputs = module.to(device), inputs.to(device)
    exact = module(inputs)[0].detach()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    before = [weight.detach().clone() for weight in module.parameters()]
    with torch.autocast(device, torch.bfloat16):
        outputs, last = module(inputs)
    # A projected layer is PyTorch's own, which autocast runs in float16 on a GPU whatever the type.
    by_cudnn = device == "cuda" and kind == "LSTM" and module.proj_size
    assert outputs.dtype == (torch.float16 if by_cudnn else torch.bfloat16)
    if kind == "GRU" or not module.proj_size:
        assert {part.dtype for part in tree_leaves(last)} == {torch.bfloat16}
    assert_close([outputs], [exact], 2e-2)
    scaler.scale(outputs.float().square().sum()).backward()
    scaler.unscale_(optimizer)
    gradients = [weight.grad for weight in module.parameters()]
    scaler.step(optimizer)
    scaler.update()
    for weight, old, gradient in zip(module.parameters(), before, gradients, strict=True):
        assert gradient is not None
        assert_close([weight], [old - 0.1 * gradient], 1e-6)


def wrong(kind: str) -> list[tuple[type[Exception], str, Any]]:
    """Returns wrong calls of a module with batch_first: the error, its message, and the arguments."""
    ones, state = torch.ones(BATCH, STEPS, SIZE), torch.ones(1, BATCH, HIDDEN)
    packed = pack_sequence([ones[0]])
    hx, unbatched = (state, state[0]) if kind == "GRU" else ((state, state), (state[0], state[0]))
    narrow = state[..., 1:] if kind == "GRU" else (state, state[..., 1:])
    size = r"\(1, 4, 7\), got \[1, 4, 6\]"
    return [
        (RuntimeError, "input.size\\(-1\\) must be equal to input_size. Expected 5, got 4", (ones[..., 1:],)),
        (ValueError, f"{kind}: Expected input to be 2D or 3D, got 1D instead", (ones[0, 0],)),
        (ValueError, "input dtype .* does not match weight dtype|input must have the type", (ones.double(),)),
        (RuntimeError, "sequence length to be larger than 0", (ones[:, :0],)),
        (RuntimeError, f"Expected hidden(\\[1\\])? size {size}", (ones, narrow)),
        (RuntimeError, "For batched 3-D input, hx .*should also be 3-D", (ones, unbatched)),
        (RuntimeError, "For unbatched 2-D input, hx .*should also be 2-D", (ones[0], hx)),
        (ValueError, f"{kind}: hx must be", (ones, [ones])),
        (ValueError, r"lengths must be from 0 to 6, got 7", (ones, None, torch.tensor([7, 1, 1, 1]))),
        (ValueError, r"lengths must be \(B,\) with B=4, got \(3,\)", (ones, None, LENGTHS[:3])),
        (ValueError, r"lengths must be \(B,\) with B=4, got \(3,\)", (ones, None, LENGTHS[:3], RESETS)),
        (ValueError, r"resets must be a bool tensor .*\(4, 6\), .*\(6, 4\)", (ones, None, None, RESETS.t())),
        (ValueError, r"resets must be .* got torch.int64", (ones, None, None, RESETS.long())),
        (ValueError, "resets is on meta; it must be on the CPU", (ones, None, None, RESETS.to("meta"))),
        (ValueError, r"resets must be .* got a value of type list", (ones[0], None, None, RESETS.tolist())),
        (ValueError, "lengths cannot be given with a PackedSequence", (packed, None, LENGTHS[:1])),
        (ValueError, "resets cannot be given with a PackedSequence", (packed, None, None, RESETS)),
    ]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_errors_name_the_callers_argument(kind: str) -> None:
    module = getattr(econmt_ops, kind)(SIZE, HIDDEN, batch_first=True)
    for error, message, (inputs, *rest) in wrong(kind):
        hx, lengths, resets = [*rest, None, None, None][:3]
        with pytest.raises(error, match=message):
            module(inputs, hx, lengths=lengths, resets=resets)
    with pytest.raises(ValueError, match="proj_size argument is only supported for LSTM"):
        econmt_ops.GRU(3, 4, proj_size=2)
    with pytest.raises(ValueError, match="implementation must be auto with proj_size"):
        econmt_ops.LSTM(3, 4, proj_size=1, implementation="recompute")


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_dropout_of_one_leaves_the_biases(kind: str) -> None:
    torch.manual_seed(0)
    module: Any = getattr(econmt_ops, kind)(SIZE, HIDDEN, 2, dropout=1.0)
    theirs: Any = getattr(nn, kind)(SIZE, HIDDEN, 2, dropout=1.0)
    theirs.load_state_dict(module.state_dict())
    inputs = torch.randn(STEPS, BATCH, SIZE)
    assert_close(tree_leaves(module(inputs)), tree_leaves(theirs(inputs)), 1e-6)


def test_jit_traces_the_reference_of_a_wide_layer() -> None:
    layer, inputs = econmt_ops.LSTM(4, 1100), torch.randn(3, 2, 4)
    traced = torch.jit.trace(layer, (inputs,), check_trace=False)
    assert_close([traced(2 * inputs)[0]], [layer(2 * inputs)[0]], 1e-6)
