"""The small transformer that inference is compared with: masks, loss, learning rate, and its CTranslate2 folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from econmt.data.batching.batches import Batch
from econmt.data.text.vocabulary import PAD
from scripts.bench.transformer import SmallTransformer, learning_rate, save

SOURCE = torch.tensor([[5, 6, 7, 3], [8, 3, PAD, PAD]])
TARGET = torch.tensor([[2, 9, 10], [2, 11, PAD]])


@pytest.fixture
def model() -> SmallTransformer:
    torch.manual_seed(1)
    return SmallTransformer(20).eval()


def test_scores_depend_on_neither_later_words_nor_padding(model: SmallTransformer) -> None:
    scores = model(SOURCE, TARGET)
    assert scores.shape == (2, 3, 20)
    changed = TARGET.clone()
    changed[0, 2] = 15
    torch.testing.assert_close(model(SOURCE, changed)[0, :2], scores[0, :2])
    assert not torch.allclose(model(SOURCE, changed)[0, 2], scores[0, 2])
    torch.testing.assert_close(model(SOURCE[1:, :2], TARGET[1:, :2]), scores[1:, :2])
    other = SOURCE.clone()
    other[0, 0] = 12
    assert not torch.allclose(model(other, TARGET)[0], scores[0])


def test_the_loss_is_the_mean_over_real_words_with_label_smoothing(model: SmallTransformer) -> None:
    outputs = torch.tensor([[9, 10, 3], [11, 3, PAD]])
    batch = Batch(
        indices=torch.arange(2),
        target_tokens=5,
        source=SOURCE,
        source_lengths=torch.tensor([4, 2]),
        target_input=TARGET,
        target_output=outputs,
        target_lengths=torch.tensor([3, 2]),
        source_tokens=6,
    )
    logs = F.log_softmax(model(SOURCE, TARGET), -1)
    real = outputs != PAD
    picked = logs.gather(2, outputs[..., None])[..., 0]
    expected = -(0.9 * picked + 0.1 * logs.mean(-1))[real].mean()
    torch.testing.assert_close(model.loss(batch), expected)


def test_the_learning_rate_rises_and_then_falls_as_the_root_of_updates() -> None:
    rates = [learning_rate(update) for update in (1, 500, 1000, 4000)]
    assert rates == pytest.approx([1e-6, 5e-4, 1e-3, 5e-4])


def test_ctranslate2_finds_the_same_best_words(model: SmallTransformer, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    tokens = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{number}" for number in range(4, 20))]
    save(model, tokens, tmp_path / "transformer")
    translator = ctranslate2.Translator(str(tmp_path / "transformer"), compute_type="float32")
    (result,) = translator.translate_batch([["w5", "w6", "w7"]], beam_size=1, max_decoding_length=5)
    words = [2]
    for _ in result.hypotheses[0]:
        scores = model(torch.tensor([[5, 6, 7, 3]]), torch.tensor([words]))[0, -1]
        words.append(int(scores.argmax()))
    assert result.hypotheses[0] == [tokens[word] for word in words[1:]]
