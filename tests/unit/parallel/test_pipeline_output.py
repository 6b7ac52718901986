"""The output layer divided by vocabulary is that of all of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from econmt.parallel.pipeline import output
from econmt.parallel.pipeline.output import Slice, VocabularyShares, split_cross_entropy
from econmt.parallel.pipeline.stages import even_rows
from econmt_ops import linear_cross_entropy
from tests.unit.parallel.test_exchanges import Threads, on_ranks

PAD = 0


def shares_of(
    size: int, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float, scale: Tensor
) -> list[VocabularyShares]:
    """What each of so many ranks makes."""

    def rank(number: int, group: Threads) -> VocabularyShares:
        rows = even_rows(len(weight), size, number)
        layer = Slice(weight[rows], bias[rows], rows.start, len(weight), -(-len(weight) // size))
        settings: Any = {"scale": scale, "label_smoothing": smoothing, "ignore_index": PAD}
        return split_cross_entropy(hidden, targets, layer, group.gather, **settings)

    return on_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shares_add_up_to_the_whole(size: int, smoothing: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "CHUNK_BYTES", 64)
    torch.manual_seed(1)
    rows, width, vocabulary = 13, 4, 11
    sizes = ((rows, width), (vocabulary, width), (vocabulary,))
    hidden, weight, bias = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in sizes)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[3] = PAD
    settings: Any = {"label_smoothing": smoothing, "ignore_index": PAD, "reduction": "sum"}
    loss = linear_cross_entropy(hidden, weight, targets, bias=bias, implementation="reference", **settings)
    wanted = torch.autograd.grad(0.3 * loss, [hidden, weight, bias])
    scale = torch.tensor(0.3, dtype=torch.float64)
    found = shares_of(size, hidden.detach(), weight.detach(), bias.detach(), targets, smoothing, scale)
    for each in found:
        torch.testing.assert_close(each.loss, loss.detach())
    torch.testing.assert_close(sum(each.hidden for each in found), wanted[0])
    torch.testing.assert_close(torch.cat([each.weight for each in found]), wanted[1])
    torch.testing.assert_close(torch.cat([each.bias for each in found]), wanted[2])


def test_what_is_made_of_16_bit_logits_is_not_rounded_to_16_bits() -> None:
    """As in one process: the loss, and a gradient that is rounded once."""
    torch.manual_seed(1)
    hidden = torch.randn(24, 8).bfloat16()
    weight, bias, targets = torch.randn(40, 8), torch.randn(40), torch.randint(1, 40, (24,))
    rounded = [part.bfloat16().float() for part in (hidden, weight, bias)]
    logits = torch.nn.functional.linear(*rounded).bfloat16().double()
    wanted = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
    first, second = shares_of(2, hidden, weight, bias, targets, 0.0, torch.tensor(1.0))
    assert float(first.loss) == pytest.approx(float(wanted), rel=1e-6)
    probabilities = logits.softmax(1) - torch.nn.functional.one_hot(targets, 40)
    found = torch.cat([first.bias, second.bias])
    torch.testing.assert_close(found, probabilities.sum(0).float(), rtol=1e-5, atol=1e-5)


def test_a_batch_of_padding_has_no_loss() -> None:
    hidden, weight = torch.randn(3, 4), torch.randn(5, 4)
    (found,) = shares_of(1, hidden, weight, torch.randn(5), torch.full((3,), PAD), 0.1, torch.tensor(1.0))
    assert float(found.loss) == 0.0
    assert not found.hidden.any()
    assert not found.weight.any()
    assert not found.bias.any()
