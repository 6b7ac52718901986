from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import econmt_ops
from econmt_ops import LSTM, AdditiveAttention, AttentionalLSTM, LinearCrossEntropy
from econmt_ops.modules.cells import CellLayers
from tests.ops.helpers import Make, assert_close


@pytest.mark.parametrize("bidirectional", [False, True], ids=["one-way", "bidirectional"])
def test_lstm_residual_variational_dropout_of_everything_but_one_mask(
    bidirectional: bool, device: str
) -> None:
    width = 16 if bidirectional else 8
    options: Any = {"batch_first": True, "dropout": 0.5, "residual": True, "variational": True}
    options |= {"device": device, "dtype": torch.float64}
    module = LSTM(3, 8, 2, bidirectional=bidirectional, **options)
    bottom = LSTM(3, 8, batch_first=True, bidirectional=bidirectional, device=device, dtype=torch.float64)
    bottom.load_state_dict({name: weight for name, weight in module.state_dict().items() if "_l0" in name})
    for name, weight in module.named_parameters():
        if "_l1" in name:
            nn.init.zeros_(weight)
    inputs = Make(device)(2, 4, 3)
    # With zero weights the upper layer's h is 0: what is left is its residual input, masked.
    outputs, _ = module(inputs, dropout_seed=3)
    ratio = outputs / bottom(inputs)[0]
    assert_close([ratio], [ratio[:, :1].expand(2, 4, width).round()], 1e-12)
    assert sorted(ratio.round().unique().tolist()) == [0.0, 2.0]


@pytest.mark.parametrize("layer_norm", [False, True], ids=["plain", "layer_norm"])
def test_additive_attention(layer_norm: bool, device: str) -> None:
    module = AdditiveAttention(5, 6, 7, layer_norm=layer_norm).to(device)
    names = ["score", "query.weight", "key.weight", "key.bias"]
    assert list(module.state_dict()) == names + (
        ["layer_norm.weight", "layer_norm.bias"] if layer_norm else []
    )
    make = Make(device, torch.float32)
    query, keys, values = make(2, 3, 5), make(2, 4, 6), make(2, 4, 8)
    lengths = torch.tensor([4, 2])
    norm = (module.layer_norm.weight, module.layer_norm.bias) if module.layer_norm is not None else None
    expected = econmt_ops.additive_attention(
        module.query(query), module.key(keys), values, module.score, lengths=lengths, layer_norm=norm
    )
    assert_close(module(query, keys, values, lengths=lengths), expected, 0.0)
    own, _ = module(query, keys, lengths=lengths)
    assert_close([own], [module(query, keys, keys, lengths=lengths)[0]], 0.0)
    own.sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())


@pytest.mark.parametrize("attention", ["additive", "dot"])
@pytest.mark.parametrize("feeding", [True, False], ids=["fed", "not-fed"])
def test_attentional_lstm(attention: str, feeding: bool, device: str) -> None:
    scale = 0.5 if attention == "dot" else 1.0
    options: dict[str, Any] = {"attention": attention, "input_feeding": feeding}
    options |= {"scale": scale, "residual": True, "variational": feeding}
    module = (
        AttentionalLSTM(3, 8, 6, 7, 2, dropout=0.4, layer_norm=attention == "additive", **options)
        .to(device)
        .double()
    )
    names = {"lstm.weight_ih_l0", "lstm.bias_hh_l1", "combine.bias"}
    names |= {f"{each}.weight" for each in ("query", "key", "combine")}
    assert names <= set(module.state_dict())
    assert ("score" in module.state_dict()) == (attention == "additive")
    make = Make(device)
    inputs, memory, lengths = make(2, 4, 3), make(2, 5, 6), torch.tensor([5, 2])
    outputs, weights, state = module(inputs, memory, lengths=lengths, dropout_seed=3)
    norm = None if module.layer_norm is None else (module.layer_norm.weight, module.layer_norm.bias)
    same: dict[str, Any] = {"lengths": lengths, "input_feeding": feeding, "residual": True, "scale": scale}
    same["variational"] = feeding
    parts = inputs, module.key(memory), memory, module.weights()
    expected = econmt_ops.attentional_lstm(*parts, **same, dropout=0.4, dropout_seed=3, layer_norm=norm)
    assert_close([outputs, weights, state.output], [expected[0], expected[1], expected[2].output], 0.0)
    outputs.sum().backward()
    assert all(weight.grad is not None for weight in module.parameters())
    module.eval()
    whole, _, _ = module(inputs, memory, lengths=lengths)
    keys, carried, steps = module.key(memory), None, []
    for step in inputs.split(1, 1):
        output, _, carried = module(step, memory, carried, lengths=lengths, keys=keys)
        steps.append(output)
    assert_close([torch.cat(steps, 1)], [whole], 1e-12)


def test_attentional_lstm_refuses() -> None:
    with pytest.raises(ValueError, match="unknown attention 'sparse'; available: additive, dot"):
        AttentionalLSTM(3, 8, 6, 7, attention="sparse")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(bias: bool, reduction: str, device: str) -> None:
    module = LinearCrossEntropy(
        6, 11, bias, label_smoothing=0.1, ignore_index=0, reduction=reduction, device=device
    )
    linear = nn.Linear(6, 11, bias, device=device)
    assert list(module.state_dict()) == list(linear.state_dict())
    module.load_state_dict(linear.state_dict())
    hidden = Make(device, torch.float32)(2, 3, 6)
    targets = torch.tensor([[0, 4, 10], [1, 0, 2]], device=device)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=0, reduction=reduction)
    assert_close([module(hidden, targets)], [loss(linear(hidden).transpose(1, 2), targets)], 1e-6)
    assert_close([module.logits(hidden)], [linear(hidden)], 0.0)
    with pytest.raises(ValueError, match=r"got \(2, 3, 6\) and \(3, 2\)"):
        module(hidden, targets.t())


def test_parameters_start_as_those_of_torch_do() -> None:
    """Uniform below the root of what is summed: hidden units of a cell, features of a layer's input or of a score."""
    assert all(
        each.is_meta
        for kind in CellLayers.__subclasses__()
        for each in kind(3, 4, device="meta").parameters()
    )
    cells = [kind(30, 400, dtype=torch.float64) for kind in CellLayers.__subclasses__()]
    drawn = [each for cell in cells for name, each in cell.named_parameters() if "gain" not in name]
    assert {each.dtype for each in drawn} == {torch.float64}
    drawn += [AdditiveAttention(3, 4, 400).score, AttentionalLSTM(3, 4, 5, 400).score]
    assert LinearCrossEntropy(4, 5, dtype=torch.float64, device="meta").weight.dtype == torch.float64
    for weight in [*drawn, LinearCrossEntropy(400, 50).weight]:
        assert weight.abs().max() <= 1 / 20
        assert float(weight.detach().std()) == pytest.approx(1 / 20 / math.sqrt(3), rel=0.15)


def test_modules_are_half_precision_when_cast(device: str) -> None:
    module = LSTM(3, 8, 2, batch_first=True).to(device, torch.bfloat16)
    outputs, (h, c) = module(Make(device, torch.bfloat16)(2, 4, 3))
    assert (outputs.dtype, h.dtype, c.dtype) == (torch.bfloat16,) * 3  # as of torch.nn.LSTM


@pytest.mark.parametrize(
    ("module", "sizes", "message"),
    [
        (
            econmt_ops.AdditiveAttention(3, 4, 5),
            [(2, 6, 2), (2, 7, 4)],
            "AdditiveAttention: query must be (B, T, query_size) with query_size=3, got (2, 6, 2)",
        ),
        (
            econmt_ops.AdditiveAttention(3, 4, 5),
            [(2, 6, 3), (1, 7, 4)],
            "AdditiveAttention: keys must be (B, S, key_size) with B=2, key_size=4, got (1, 7, 4)",
        ),
        (
            econmt_ops.AttentionalLSTM(3, 4, 5, 6),
            [(2, 6, 4), (2, 7, 5)],
            "AttentionalLSTM: inputs must be (B, T, input_size) with input_size=3, got (2, 6, 4)",
        ),
        (
            econmt_ops.AttentionalLSTM(3, 4, 5, 6, input_feeding=False),
            [(2, 6, 3), (2, 7, 6)],
            "AttentionalLSTM: memory must be (B, S, memory_size) with B=2, memory_size=5, got (2, 7, 6)",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_told_by_the_callers_names(
    module: nn.Module, sizes: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        module(*(torch.randn(size) for size in sizes))


def test_a_width_that_does_not_fit_the_classes_is_told() -> None:
    message = r"hidden must be \(..., H\) with H=4 and targets \(...\), got \(2, 3\) and \(2,\)"
    with pytest.raises(ValueError, match=message):
        econmt_ops.LinearCrossEntropy(4, 5)(torch.randn(2, 3), torch.zeros(2).long())


@pytest.mark.parametrize(
    "module",
    [
        AdditiveAttention(5, 5, 5, implementation="slow"),
        AttentionalLSTM(5, 5, 5, 5, implementation="slow"),
        *(kind(5, 5, implementation="slow") for kind in CellLayers.__subclasses__()),
    ],
    ids=repr,
)
def test_the_implementation_is_the_one_of_the_module(module: nn.Module) -> None:
    tensors = [torch.ones(2, 3, 5)] * (1 if isinstance(module, CellLayers) else 2)
    with pytest.raises(ValueError, match="unknown implementation 'slow'"):
        module(*tensors)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (AdditiveAttention, (3, 4, 5)),
        (AttentionalLSTM, (3, 4, 5, 6)),
        (LinearCrossEntropy, (3, 4)),
        *((kind, (3, 4, 2)) for kind in CellLayers.__subclasses__()),
    ],
)
def test_modules_made_on_the_meta_device_start_as_others(kind: Any, sizes: tuple[int, ...]) -> None:
    """As data-parallel wrappers do: memory without values, then `reset_parameters` of every submodule.

    Gains of normalization are ones in all layers, and nothing else is one.
    """
    with torch.device("meta"):
        module = kind(*sizes)
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.constant_(parameter, torch.nan)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    for name, parameter in module.named_parameters():
        assert parameter.isfinite().all()
        assert torch.equal(parameter, torch.ones_like(parameter)) == ("gain" in name)
