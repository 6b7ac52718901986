"""Steps of a search: hypotheses that share a sentence, wide ranges of keys, what is laid out once.

That steps equal teacher forcing for every decoder and attention is tested in test_translation.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from econmt.model import IncrementalModel, IncrementalState, TranslationModel
from econmt.model.inference import layout
from econmt.model.inference.attention import StepAttention
from econmt.model.inference.encoder import PrepackedEncoder
from econmt.model.inference.state import Sources
from tests.unit.model.test_decoder_options import OPTIONS, drawn
from tests.unit.model.test_translation import log_probabilities, make_batch, make_config, make_model

KINDS: dict[str, dict[str, object]] = {
    "additive": {},
    "layer-norm": {"attention__layer_norm": True},
    "dot": {"attention__type": "dot"},
    "parallel": {"decoder__input_feeding": False},
    "rank": {"decoder__rank": 3},
    "parallel-rank": {"decoder__rank": 3, "decoder__input_feeding": False, "decoder__residual": True},
}
COVERED = ("coverage-gru", "coverage-fertility", "gru-together", "lnlstm-together")


def begin(model: IncrementalModel) -> IncrementalState:
    """The state after the first step, of tensor operations."""
    source, lengths, target_input, _ = make_batch()
    _, _, state = model.step(target_input[:, 0], model.encode_tensors(source, lengths))
    assert isinstance(state, IncrementalState)
    return state


def forced(model: TranslationModel, sentence: int, words: list[int]) -> Tensor:
    """Log-probabilities (V,) after ``words``, the sentence alone and unpadded."""
    source, lengths, target_input, _ = make_batch()
    target = torch.tensor([[int(target_input[sentence, 0]), *words]])
    size = int(lengths[sentence])
    with torch.no_grad():
        hidden = model(source[sentence : sentence + 1, :size], lengths[sentence : sentence + 1], target)
        return log_probabilities(model, hidden[0, -1])


def check(found: Tensor, model: TranslationModel, prefixes: list[tuple[int, list[int]]]) -> None:
    for row, (sentence, words) in zip(found, prefixes, strict=True):
        torch.testing.assert_close(row, forced(model, sentence, words), rtol=1e-9, atol=1e-11)


@pytest.mark.cuda
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_steps_on_a_gpu_are_those_on_the_cpu(options: dict[str, object]) -> None:
    model = make_model(make_config(**options))
    source, lengths, target_input, _ = make_batch()
    steps = IncrementalModel(model)
    expected, attention, _ = steps.step(torch.tensor([5, 6, 7]), begin(steps))
    there = IncrementalModel(model.cuda())
    state = there.encode(source.cuda(), lengths.cuda())
    for words in (target_input[:, 0], torch.tensor([5, 6, 7])):
        found, seen, state = there.step(words.cuda(), state)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(seen.cpu(), attention, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", [*KINDS.values(), *map(OPTIONS.get, COVERED)], ids=[*KINDS, *COVERED])
def test_hypotheses_share_their_sentence(options: dict[str, object]) -> None:
    """Each row goes on as if it was alone, with its own coverage."""
    model = drawn(options)
    steps = IncrementalModel(model)
    # Sentence 2 has two rows, sentence 0 one, sentence 1 none; rows lie in no order and not in the first cells.
    state = begin(steps).select(torch.tensor([2, 0, 2]), torch.tensor([8, 1, 6]), 3)
    found, attention, state = steps.step(torch.tensor([5, 6, 7]), state)
    check(found, model, [(2, [5]), (0, [6]), (2, [7])])
    assert attention.shape == (3, 5)
    assert attention[0, 4:].abs().max() == 0.0

    state = state.keep(torch.tensor([0, 2]))
    found, attention, _ = steps.step(torch.tensor([8, 9, 4]), state)
    check(found, model, [(2, [5, 8]), (0, [6, 9]), (2, [7, 4])])
    assert attention.shape == (3, 5)

    found, attention, _ = steps.step(
        torch.tensor([4]), state.select(torch.tensor([0]), torch.tensor([1]), 1).keep(torch.tensor([1]))
    )
    check(found, model, [(2, [5, 4])])
    assert attention.shape == (1, 4), "cut to the longest sentence that is left"


def test_a_state_is_left_as_it_was_and_a_model_that_trains_is_refused() -> None:
    model = IncrementalModel(make_model(make_config()).float())
    state = begin(model)
    words = torch.tensor([5, 6, 7])
    first = model.step(words, state)[0].clone()
    model.step(words, state)[0].fill_(torch.nan)
    assert torch.equal(model.step(words, state)[0], first)
    with pytest.raises(AssertionError, match="evaluation mode"):
        begin(IncrementalModel(make_model(make_config()).train()))


@pytest.mark.parametrize("size", [1.0, 30.0, 100.0, 3000.0])
def test_keys_of_any_size(size: float) -> None:
    """tanh(q + k) is made of exponentials of q and of k only where those can be trusted."""
    model = make_model(make_config())
    attention = model.decoder.attention
    assert attention.key is not None
    assert attention.query is not None
    torch.manual_seed(4)
    with torch.no_grad():
        # Every unit gets a large constant, which the query takes away again from time to time.
        attention.key.bias.copy_(torch.randn(5).sign() * size)
        attention.query.mul_(size)
        assert attention.score is not None
        attention.score.mul_(5.0)
        steps = []
        for made, most in ((model.float, 1.0), (model.double, 100.0)):
            incremental = IncrementalModel(made())
            state = begin(incremental)
            assert state.sources.factors == (size <= most)
            steps.append(incremental.step(torch.tensor([5, 6, 7]), state))
    (found, seen, _), (exact, expected, _) = steps
    check(exact, model, [(0, [5]), (1, [6]), (2, [7])])
    torch.testing.assert_close(seen.double(), expected, rtol=2e-5 * size, atol=1e-6 * size)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5 * size, atol=1e-6 * size)


def test_factors_hold_where_tanh_is_flat() -> None:
    """A query beyond the range of exponentials, with keys that just are within theirs."""
    for dtype, key in ((torch.float32, 21.0), (torch.float64, 170.0)):
        scores = StepAttention(
            make_model(make_config()).to(dtype).decoder.attention, dtype, torch.device("cpu")
        )
        weight = torch.tensor([0.5, -1.5, 1.0, 2.0, 0.25], dtype=dtype)
        scores.score = 2.0 * weight
        keys = torch.tensor([[[key, -key, 0.0, 1.0, -1.0], [-key, key, 0.5, -1.0, 3.0]]], dtype=dtype)
        prepared, factors = scores.prepare(keys)
        assert factors
        query = torch.tensor(
            [[[-1e4, 1e4, -0.3, 2.0 * key, -50.0 * key], [key, key, 0.1, 0.2, -key]]], dtype=dtype
        )
        padding = torch.zeros(1, 2, dtype=torch.bool)
        sources = Sources(prepared, factors, keys, padding, torch.tensor([2]))
        found = scores._scores(-2.0 * query, None, sources)
        expected = torch.tanh(query[:, :, None] + keys[:, None]) @ weight
        difference = found - expected
        torch.testing.assert_close(difference, difference[..., :1].expand_as(difference), rtol=0, atol=1e-5)


def test_words_looked_up_are_those_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(make_config())
    table = IncrementalModel(model)
    monkeypatch.setattr(layout, "TABLE_BYTES", 0)
    product = IncrementalModel(model)
    first, second = begin(table), begin(product)
    for words in ([5, 6, 5], [6, 7, 5], [5, 6, 7]):
        found, _, first = table.step(torch.tensor(words), first)
        expected, _, second = product.step(torch.tensor(words), second)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feeding", [True, False])
def test_16_bits_are_near_float32(feeding: bool, dtype: torch.dtype) -> None:
    model = make_model(make_config(decoder__input_feeding=feeding)).float()
    exact, near = IncrementalModel(model), IncrementalModel(model, dtype)
    first, second = begin(exact), begin(near)
    for words in ([5, 6, 7], [7, 8, 9]):
        expected, _, first = exact.step(torch.tensor(words), first)
        found, seen, second = near.step(torch.tensor(words), second)
        assert (found.dtype, seen.dtype) == (torch.float32, torch.float32)
        assert not torch.equal(found, expected)
        allowed = 0.02 if dtype == torch.bfloat16 else 0.003
        torch.testing.assert_close(found, expected, rtol=allowed, atol=allowed)
        torch.testing.assert_close(found.exp().sum(1), torch.ones(3))
    assert all(c.dtype == torch.float32 for c in second.memory)
    assert second.output.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [5, 4099])
def test_log_softmax_where_the_logits_were(dtype: torch.dtype, size: int) -> None:
    model = IncrementalModel(make_model(make_config()).float(), dtype)
    model._logits = torch.empty(0, size)
    for rows in (70, 3):
        logits = (torch.randn(rows, size) * 5).to(dtype)
        expected = logits.double().log_softmax(dim=1)
        found = model._log_softmax(logits)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
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
def test_it_gives_what_the_model_gives(options: dict[str, object]) -> None:
    model = make_model(make_config(**options)).float()
    source, lengths, _, _ = make_batch()
    with torch.no_grad():
        expected = model.encode(source, lengths)
        encoder = PrepackedEncoder(model, torch.float32)
        found = encoder(source, lengths)
        source[1, 2:] = torch.tensor([12, 4, 9])  # padding, which is not read
        other = encoder(source, lengths)
    assert torch.equal(other.summary, found.summary)
    assert torch.equal(other.memory.values, found.memory.values)
    torch.testing.assert_close(found.summary, expected.summary)
    torch.testing.assert_close(found.memory.values, expected.memory.values)
    torch.testing.assert_close(found.memory.keys, expected.memory.keys)
    assert found.memory.values[1, 2:].abs().max() == 0.0
