from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from econmt_ops.core import scopes as accounting
from tests.ops.every_op import calls


def test_the_innermost_scope_wins_and_ends_with_its_block() -> None:
    assert accounting.current_layer() == "other"
    with accounting.layer("decoder"):
        assert accounting.current_layer() == "decoder"
        with accounting.layer("attention"):
            assert accounting.current_layer() == "attention"
        assert accounting.current_layer() == "decoder"
        with pytest.raises(RuntimeError, match="stop"), accounting.layer("attention"):
            raise RuntimeError("stop")
        assert accounting.current_layer() == "decoder"
    assert accounting.current_layer() == "other"


@pytest.mark.parametrize("op", ["attentional_lstm", "attentional_lstm-not-fed-dot"])
def test_attention_inside_the_decoder_is_attention(op: str, device: str) -> None:
    call = calls(device, torch.float32)[op]
    call.arguments["inputs"].requires_grad_()
    saved: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def save(tensor: Tensor) -> Tensor:
        saved[accounting.current_layer(), tuple(tensor.shape)] += 1
        return tensor

    with accounting.layer("decoder"), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        call.function(**call.arguments, implementation="reference")
    assert {layer for layer, _ in saved} == {"decoder", "attention"}
    # What only attention has: the hidden layer of the score, or the softmax over the source; here S is 4, A is 5.
    steps = 1 if op == "attentional_lstm" else 2
    of_attention = (3, steps, 4, 5) if op == "attentional_lstm" else (3, steps, 4)
    assert saved["attention", of_attention] > 0
    assert saved["decoder", of_attention] == 0


def test_watchers_hear_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(accounting, "watchers", [heard.append])
    with accounting.layer("decoder"), accounting.layer("attention"):
        pass
    assert heard == ["decoder", "attention", "decoder", "other"]
