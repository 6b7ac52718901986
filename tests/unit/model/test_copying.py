"""Copying: the loss against the mixture of all words, steps of a search against teacher forcing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from econmt.model import Implementations, IncrementalModel, TranslationModel
from econmt.model.copying import first_positions
from tests.unit.model.test_translation import EOS, PAD, VOCABULARY, make_batch, make_config, make_model

VARIANTS: dict[str, dict[str, Any]] = {
    "additive": {},
    "whole-target": {"decoder__input_feeding": False, "attention__type": "bilinear"},
    "tied": {"weight_tying": "src_trg_softmax", "encoder__reverse_input": True},
    "covered": {"attention__coverage": {"type": "gru"}, "decoder__cell": "gru"},
}
EVERY = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)


def copying_model(options: dict[str, Any], seed: int = 1) -> TranslationModel:
    """A model that copies, whose gate is not indifferent."""
    model = make_model(make_config(decoder__copy_attention=True, **options), seed)
    assert model.copying is not None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        model.copying.bias += 0.4
    return model


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words that stand several times in a source, that stand in none, and rows of unlike lengths."""
    source, lengths, target_input, target_output = make_batch()
    source[0, 2] = source[2, 0] = 4
    source[2, 1:3] = 5
    return source, lengths, target_input, target_output


def dense(model: TranslationModel, smoothing: float, how: Implementations) -> Tensor:
    """The loss with the mixture of all words written out, its context and gate, too."""
    source, lengths, target_input, target_output = batch()
    hidden, words, values, attention = model._decode(model.encode(source, lengths, how), target_input, how)
    assert model.copying is not None
    if not isinstance(words, Tensor):
        words = words.expanded()
    joined = torch.cat([attention @ values, hidden, words], dim=2)
    gate = torch.sigmoid(joined @ model.copying.weight + model.copying.bias)
    log_probs = (hidden @ model.output.weight.T + model.output.bias).log_softmax(2)
    copies = attention @ functional.one_hot(source, VOCABULARY).double()
    if not smoothing:
        mixture = gate[..., None] * log_probs.exp() + (1.0 - gate)[..., None] * copies
        torch.testing.assert_close(mixture.sum(2), torch.ones_like(gate))
        found = mixture.gather(2, target_output[..., None])[..., 0]
    else:
        here = target_output[..., None]
        smooth = (1.0 - smoothing) * log_probs.gather(2, here)[..., 0] + smoothing * log_probs.mean(2)
        found = gate * smooth.exp() + (1.0 - gate) * copies.gather(2, here)[..., 0]
    return -found[target_output != PAD].log().sum()


@EVERY
@pytest.mark.parametrize("name", ["reference", "recompute"])
@pytest.mark.parametrize("smoothing", [0.0, pytest.param(0.1, id="smoothed")])
def test_loss_and_gradients_are_those_of_the_mixture_of_all_words(
    options: dict[str, Any], name: str, smoothing: float
) -> None:
    how = Implementations.everywhere(name, "outputs" if name == "recompute" else "auto")
    found = []
    for ours in (True, False):
        model = copying_model(options)
        loss = model.loss(*batch(), smoothing, how) if ours else dense(model, smoothing, Implementations())
        loss.backward()
        found.append((loss.detach().double(), {key: part.grad for key, part in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0.0)
    assert {"copying.weight", "copying.bias"} <= set(found[0][1])
    for key, gradient in found[1][1].items():
        assert gradient is not None
        assert gradient.abs().max() > 0.0, key
        # The loss is handed on in float32, its gradient of 1 is exact.
        torch.testing.assert_close(found[0][1][key], gradient, rtol=1e-9, atol=1e-12, msg=key)


def test_rows_that_stand_in_add_nothing() -> None:
    """As ranks share a batch: rows of no words, whose targets are padding, and losses that add up."""
    model, (source, lengths, target_input, target_output) = copying_model({}), batch()
    whole = model.loss(source, lengths, target_input, target_output)
    parts = [
        model.loss(
            *(
                torch.cat([part[rows], part.new_zeros(1, *part.shape[1:])])
                for part in (source, lengths, target_input, target_output)
            )
        )
        for rows in (slice(0, 2), slice(2, 3))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    sum(parts).backward()
    assert all(torch.isfinite(part.grad).all() for part in model.parameters())


def test_bfloat16_and_single_floats_come_close() -> None:
    losses = []
    for precision in (torch.float64, torch.float32, torch.bfloat16):
        model = copying_model({}).to(torch.float64 if precision == torch.float64 else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
            losses.append(model.loss(*batch()))
        losses[-1].backward()
        losses[-1] = losses[-1].detach()
        assert all(torch.isfinite(part.grad).all() for part in model.parameters())
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-5)
    assert float(losses[2]) == pytest.approx(float(losses[0]), rel=3e-2)


@EVERY
def test_steps_of_a_search_are_those_of_training(options: dict[str, Any]) -> None:
    """Log-probabilities of all words, in a search and scored, add up to 1 and to the loss."""
    model = copying_model(options)
    source, lengths, target_input, target_output = batch()
    steps = IncrementalModel(model)
    state = steps.encode(source, lengths)
    everywhere = torch.ones_like(target_input, dtype=torch.bool)
    scored = model.predict(source, lengths, target_input, everywhere).log_probs(slice(None))
    scored = scored.view(3, -1, VOCABULARY)
    total = 0.0
    for place in range(target_input.shape[1]):
        found, _, state = steps.step(target_input[:, place], state)
        assert found.dtype == torch.float64
        torch.testing.assert_close(found.exp().sum(1), torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(found.float(), scored[:, place], rtol=1e-5, atol=1e-5)
        valid = target_output[:, place] != PAD
        total -= float(found.gather(1, target_output[:, place : place + 1])[valid].sum())
    loss = model.loss(source, lengths, target_input, target_output).detach()
    assert float(loss) == pytest.approx(total, rel=1e-6)


def test_hypotheses_copy_from_their_own_sentence() -> None:
    """Rows that share a sentence, others that have left, and a list of few words: as if each went its way alone."""
    model = copying_model({})
    source, lengths, target_input, _ = batch()
    steps = IncrementalModel(model)
    words = torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 12])
    for short in (False, True):
        state = steps.encode(source, lengths)
        columns = torch.arange(VOCABULARY)
        if short:
            state, columns = steps.restrict(state, words, torch.ones(3, len(words)).bool()), words
        _, _, state = steps.step(target_input[:, 0], state)
        state = state.select(torch.tensor([2, 1, 2]), torch.tensor([8, 3, 6]), 3)
        _, _, state = steps.step(torch.tensor([5, 6, 7]), state)
        state = state.select(torch.tensor([0, 2, 1]), torch.tensor([7, 6, 5]), 3).keep(torch.tensor([1, 2]))
        found, attention, _ = steps.step(torch.tensor([8, 9, 4]), state)
        assert attention.shape == (3, 4)
        for row, (sentence, before) in enumerate([(2, [5, 8]), (2, [7, 9]), (1, [6, 4])]):
            size = int(lengths[sentence])
            how = Implementations()
            encoded = model.encode(source[None, sentence, :size], lengths[None, sentence], how)
            hidden, embedded, values, weights = model._decode(encoded, torch.tensor([[2, *before]]), how)
            assert model.copying is not None
            assert isinstance(embedded, Tensor)
            joined = torch.cat([weights @ values, hidden, embedded], dim=2)[0, -1]
            gate = torch.sigmoid(joined @ model.copying.weight + model.copying.bias)
            logits = (hidden @ model.output.weight.T + model.output.bias)[0, -1, columns]
            expected = gate * logits.softmax(0)
            for word, weight in zip(source[sentence, :size], weights[0, -1], strict=True):
                expected[columns == word] += (1.0 - gate) * weight
            torch.testing.assert_close(found[row].exp(), expected, rtol=1e-9, atol=1e-12)


def test_first_positions() -> None:
    found = first_positions(torch.tensor([[5, 6, 5, 3, 0, 0], [7, 7, 7, 3, 6, 7]]))
    assert found.tolist() == [[0, 1, 0, 3, 4, 4], [0, 0, 0, 3, 4, 0]]


def test_copying_needs_one_vocabulary() -> None:
    with pytest.raises(ValueError, match="copy_attention needs one vocabulary, got 13 source and 14 target"):
        TranslationModel(make_config(decoder__copy_attention=True), 13, 14)


def learnt(copies: bool, updates: int) -> tuple[float, float]:
    """The mean cross-entropies of words that training never showed, which only copying can give, and of known ones."""
    size, known = 60, 30
    config = make_config(
        embedding=16,
        encoder={"size": 16},
        decoder={"size": 16, "copy_attention": copies},
        attention={"size": 16},
    )
    torch.manual_seed(3)
    model = TranslationModel(config, size, size)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def example(low: int, high: int, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        words = torch.randint(low, high, (rows, 4))
        output = torch.cat([words, torch.full((rows, 1), EOS)], dim=1)
        begin = torch.full((rows, 1), 2)
        return output, torch.full((rows,), 5), torch.cat([begin, words], dim=1), output

    for _ in range(updates):
        optimizer.zero_grad()
        (model.loss(*example(4, 4 + known, 32)) / 160).backward()
        optimizer.step()
    torch.manual_seed(4)
    with torch.no_grad():
        rare, common = (
            float(model.eval().loss(*example(low, high, 64))) / 320
            for low, high in ((4 + known, size), (4, 4 + known))
        )
    return rare, common


def test_copying_is_learnt_sooner_and_gives_words_never_seen() -> None:
    (rare, common), (without, plain) = learnt(True, 20), learnt(False, 20)
    assert common < 0.6 * plain
    assert rare < 0.4 * without
