"""The encoder laid out for a search, against the model's own.

That whole searches' steps equal teacher forcing for every kind of encoder is tested in test_translation.
"""

from __future__ import annotations

import pytest
import torch

from econmt.model.inference.encoder import PrepackedEncoder
from tests.unit.model.test_translation import make_batch, make_config, make_model

KINDS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoder__bidirectional": "none", "encoder__reverse_input": True, "decoder__state_init": "avg"},
        {"encoder__bidirectional": "all", "encoder__layers": 3, "encoder__residual": True},
        {"encoder__layers": 3, "encoder__rank": 3, "encoder__residual": True},
        {"attention__type": "dot", "encoder__layers": 1},
        {"encoder__cell": "gru", "encoder__layers": 2},
        {"encoder__cell": "lnlstm", "encoder__layers": 2, "encoder__bidirectional": "all"},
        {"encoder__cell": "lnglstm", "encoder__bidirectional": "none", "encoder__residual": False},
    ],
    ids=["bottom", "reverse", "all", "rank", "dot", "gru", "lnlstm", "lnglstm"],
)


@KINDS
def test_it_gives_what_the_model_gives(options: dict[str, object]) -> None:
    model = make_model(make_config(**options)).float()
    source, lengths, _, _ = make_batch()
    with torch.no_grad():
        expected = model.encode(source, lengths)
        found = PrepackedEncoder(model, torch.float32)(source, lengths)
    torch.testing.assert_close(found.summary, expected.summary)
    torch.testing.assert_close(found.memory.values, expected.memory.values)
    torch.testing.assert_close(found.memory.keys, expected.memory.keys)
    assert found.memory.values[1, 2:].abs().max() == 0.0


@KINDS
def test_what_stands_in_the_padding_is_not_read(options: dict[str, object]) -> None:
    encoder = PrepackedEncoder(make_model(make_config(**options)).float(), torch.float32)
    source, lengths, _, _ = make_batch()
    with torch.no_grad():
        expected = encoder(source, lengths)
        source[1, 2:] = torch.tensor([12, 4, 9])
        found = encoder(source, lengths)
    assert torch.equal(found.summary, expected.summary)
    assert torch.equal(found.memory.values, expected.memory.values)


def test_bfloat16_is_near_float32() -> None:
    model = make_model(make_config()).float()
    source, lengths, _, _ = make_batch()
    with torch.no_grad():
        expected = model.encode(source, lengths)
        found = PrepackedEncoder(model, torch.bfloat16)(source, lengths)
    assert found.memory.values.dtype == torch.bfloat16
    assert not torch.equal(found.memory.values.float(), expected.memory.values)
    torch.testing.assert_close(found.memory.values.float(), expected.memory.values, rtol=0.03, atol=0.01)
    torch.testing.assert_close(found.summary.float(), expected.summary, rtol=0.03, atol=0.01)
