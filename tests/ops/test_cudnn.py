"""What is handed to cuDNN, and what runs where cuDNN cannot; on the CPU, with PyTorch's own LSTM in cuDNN's place."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from econmt_ops import LSTMWeights
from econmt_ops.lstm import cudnn
from econmt_ops.lstm.reference import layer_by_torch, steps_of_torch
from tests.ops.helpers import Make, assert_close, scatter_strides, values_and_gradients

SIZES = {"input": 3, "hidden": 5}


def layer_arguments(directions: int) -> dict[str, Any]:
    make = Make("cpu")
    size, hidden = SIZES["input"], SIZES["hidden"]
    shapes = [(4 * hidden, size), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)]
    tensors = {"inputs": make(2, 4, size), "h": make(directions, 2, hidden), "c": make(directions, 2, hidden)}
    return {**tensors, "weights": [make(*shape) for _ in range(directions) for shape in shapes]}


def expected(inputs: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return torch.lstm(inputs, (h, c), weights, True, 1, 0.0, True, len(weights) == 8, True)


def by_torch(inputs: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    layers = [LSTMWeights(*weights[first : first + 3]) for first in range(0, len(weights), 4)]
    return layer_by_torch(inputs, layers, h, c, None)


def cudnn_rnn(
    inputs: Tensor, weights: list[Tensor], stride: int, buffer: Tensor, h: Tensor, c: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """As cuDNN: reads the buffer alone, all matrices before all biases, and wants states without gaps."""
    mode, hidden, projection, layers, batch_first, dropout, training, bidirectional, sizes, dropout_state = (
        rest
    )
    assert (stride, mode, hidden, projection, layers, dropout, sizes) == (4, 2, h.shape[2], 0, 1, 0.0, [])
    assert dropout_state is None
    assert h.is_contiguous()
    assert c.is_contiguous()
    assert buffer.is_contiguous()
    assert not buffer.requires_grad
    begin, found = buffer.storage_offset(), {}
    for kind in (0, 1):
        for first in range(0, len(weights), 4):
            for number in (first + 2 * kind, first + 2 * kind + 1):
                weight = weights[number]
                assert weight.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
                end = begin + weight.numel()
                assert torch.equal(buffer[begin:end].view(weight.shape), weight)
                found[number] = weight
                begin = end
    assert begin == buffer.numel()
    parts = [found[number] for number in range(len(weights))]
    result = torch.lstm(inputs, (h, c), parts, True, 1, 0.0, training, bidirectional, batch_first)
    return *result, inputs.new_empty(0), buffer


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("way", ["one buffer", "scattered", "steps for fake tensors"])
def test_equals_the_lstm(monkeypatch: pytest.MonkeyPatch, directions: int, way: str) -> None:
    monkeypatch.setattr(torch, "_cudnn_rnn", cudnn_rnn)
    arguments = layer_arguments(directions)

    def function(
        inputs: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        if way == "steps for fake tensors":
            return cudnn.by_direction(steps_of_torch, inputs, h, c, weights)
        return cudnn.cudnn_lstm(inputs, h, c, weights, True, directions == 2)

    values, gradients = values_and_gradients(expected, arguments)
    found, their = values_and_gradients(
        function, scatter_strides(arguments) if way == "scattered" else arguments
    )
    assert_close(found, values, 1e-13)
    assert_close(their, gradients, 1e-13)


def test_states_have_no_dimension_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_traced(*arguments: Any) -> tuple[Tensor, ...]:
        """As torch.compile of torch 2.11 takes an LSTM apart."""
        outputs, h, c = original(*arguments)
        return outputs, h.unsqueeze(1), c.unsqueeze(1)

    original = torch.lstm
    monkeypatch.setattr(torch, "lstm", as_traced)
    arguments = layer_arguments(2)
    _, h, c = by_torch(**arguments)
    assert h.shape == c.shape == arguments["h"].shape


@pytest.mark.cuda
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("scattered", [False, True])
def test_on_a_gpu_it_equals_the_cpu_and_warns_of_nothing(directions: int, scattered: bool) -> None:
    arguments = layer_arguments(directions)
    values, gradients = values_and_gradients(by_torch, arguments)
    there = tree_map(lambda tensor: tensor.cuda(), arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, their = values_and_gradients(by_torch, scatter_strides(there) if scattered else there)
    assert_close([value.cpu() for value in found], values, 1e-12)
    assert_close([gradient.cpu() for gradient in their], gradients, 1e-12)


@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("most", [1, 3, 4, 9])
def test_more_steps_than_a_call_takes_go_in_parts(directions: int, most: int) -> None:
    arguments = layer_arguments(directions)

    def run(inputs: Tensor, h: Tensor, c: Tensor, weights: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        assert inputs.shape[1] <= most
        return expected(inputs, h.contiguous(), c.contiguous(), weights)

    values, gradients = values_and_gradients(expected, arguments)
    found, their = values_and_gradients(partial(cudnn.by_direction, run, most=most), arguments)
    assert_close([*found, *their], [*values, *gradients], 1e-12)


@pytest.mark.cuda
@pytest.mark.parametrize("steps", [cudnn.MOST_STEPS, cudnn.MOST_STEPS + 5])
def test_a_long_sequence_on_a_gpu(steps: int) -> None:
    module = torch.nn.LSTM(2, 3, batch_first=True).cuda()
    weights = LSTMWeights(module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0 + module.bias_hh_l0)
    inputs, state = torch.randn(2, steps, 2, device="cuda"), torch.zeros(1, 2, 3, device="cuda")
    outputs, h, _ = layer_by_torch(inputs, [weights], state, state, None)
    half, middle = module(inputs[:, : steps // 2])
    rest, (last, _) = module(inputs[:, steps // 2 :], middle)
    torch.testing.assert_close(outputs, torch.cat([half, rest], 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(h, last, rtol=1e-4, atol=1e-5)


def test_weights_that_lie_one_after_the_other_are_read_in_place() -> None:
    layers = [[torch.randn(8, 3), torch.randn(8, 2), torch.randn(8), torch.randn(8)] for _ in range(2)]
    parts = cudnn.in_order(layers)
    assert [len(part.shape) for part in parts] == [2, 2, 2, 2, 1, 1, 1, 1]
    copied = cudnn.one_buffer(parts)
    assert torch.equal(copied, torch.cat([part.flatten() for part in parts]))
    views = [
        part.view(old.shape)
        for part, old in zip(copied.split([p.numel() for p in parts]), parts, strict=True)
    ]
    in_place = cudnn.one_buffer(views)
    assert in_place.data_ptr() == copied.data_ptr()
    assert torch.equal(in_place, copied)
    views[3] = views[3].clone()
    assert cudnn.one_buffer(views).data_ptr() != copied.data_ptr()
    turned = [copied[:4].view(2, 2).t(), copied[4:8]]
    assert torch.equal(cudnn.one_buffer(turned)[:4], turned[0].flatten())
