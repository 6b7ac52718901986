"""The transformer that econmt is compared with: masks, loss, search, learning rate, and its CTranslate2 folder."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from econmt.config.recipe import parse_recipe
from econmt.data.batching.store import prepare
from econmt.data.text.vocabulary import BOS, EOS, PAD
from scripts.bench import transformer
from scripts.bench.compare.quality import PROGRAMS
from scripts.bench.transformer_model import Sizes, Transformer, save_for_ctranslate2, search
from tests.unit.cli.conftest import Call

SOURCE = torch.tensor([[5, 6, 7, 3], [8, 3, PAD, PAD]])
TARGET = torch.tensor([[2, 9, 10], [2, 11, PAD]])
RECIPE = (
    "name: a\noutput: a\ntraining:\n  max_updates: 1\n  batch: {type: word, size: 60}\n"
    "  optimizer: {name: adam, learning_rate: 0.01}\n"
    "  label_smoothing: 0.1\n  gradient_clipping: {type: norm, threshold: 1.0}\n"
    "data:\n  source: en\n  target: fr\n  train: [train]\n  valid: valid\n  test: valid\n"
    "  subwords: {type: bpe, size: 60, joint: true}\n"
)


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(1)
    return Transformer(20, Sizes(2, 128, 64), dropout=0.1).eval()


def scores(model: Transformer, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return model.scores(model(source, target))


def test_scores_depend_on_neither_later_words_nor_padding(model: Transformer) -> None:
    found = scores(model, SOURCE, TARGET)
    assert found.shape == (2, 3, 20)
    changed = TARGET.clone()
    changed[0, 2] = 15
    torch.testing.assert_close(scores(model, SOURCE, changed)[0, :2], found[0, :2])
    assert not torch.allclose(scores(model, SOURCE, changed)[0, 2], found[0, 2])
    torch.testing.assert_close(scores(model, SOURCE[1:, :2], TARGET[1:, :2]), found[1:, :2])
    other = SOURCE.clone()
    other[0, 0] = 12
    assert not torch.allclose(scores(model, other, TARGET)[0], found[0])
    wanted = torch.tensor([[9, 10, 3], [11, 3, PAD]])
    loss = model.losses(model(SOURCE, TARGET), wanted, 0.1, "mean")
    rows = [torch.cat((ids, torch.full_like(ids[:1], PAD))) for ids in (SOURCE, TARGET, wanted)]
    filled = model.losses(model(rows[0], rows[1]), rows[2], 0.1, "mean")
    torch.testing.assert_close(filled, loss)
    gradients = torch.autograd.grad(filled, list(model.parameters()))
    assert all(gradient.isfinite().all() for gradient in gradients)
    logs, real = F.log_softmax(scores(model, SOURCE, TARGET), -1), wanted != PAD
    picked = logs.gather(2, wanted[..., None])[..., 0]
    torch.testing.assert_close(loss, -(0.9 * picked + 0.1 * logs.mean(-1))[real].mean())


def score(model: Transformer, source: torch.Tensor, words: list[int]) -> float:
    """Returns the mean log-probability of a translation and its end."""
    target, wanted = torch.tensor([[BOS, *words]]), torch.tensor([*words, EOS])
    logs = F.log_softmax(scores(model, source, target)[0], 1)
    return logs[torch.arange(len(wanted)), wanted].mean().item()


def test_searches_find_the_best_words(model: Transformer) -> None:
    with torch.no_grad():
        model.bias[EOS] = 1.0
    for row, found in enumerate(search(model, SOURCE, 1)):
        source, words = SOURCE[row : row + 1], [BOS]
        while len(words) - 1 < 2 * SOURCE.shape[1] + 10:
            best = scores(model, source, torch.tensor([words]))[0, -1]
            best[:EOS] = -math.inf
            if int(best.argmax()) == EOS:
                break
            words.append(int(best.argmax()))
        assert found == words[1:]
    with torch.no_grad():
        model.bias[EOS] = 4.0  # short translations
    candidates = [
        [],
        *([word] for word in range(4, 20)),
        *([a, b] for a in range(4, 20) for b in range(4, 20)),
    ]
    for row, found in enumerate(search(model, SOURCE, 20)):
        source = SOURCE[row : row + 1]
        best = max(score(model, source, words) for words in candidates)
        assert score(model, source, found) >= best - 1e-5


def test_it_learns_a_prepared_text_and_scores_every_mark(
    bench: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"the {word} of {word}s {number}" for number, word in enumerate(["act", "law", "rule"] * 20)]
    for split, count in (("train", 60), ("valid", 5)):
        for side in "en", "fr":
            (tmp_path / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines[:count]))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    prepare(parse_recipe(RECIPE, "test"), tmp_path / "store", [tmp_path], show_progress=False)
    monkeypatch.setitem(transformer.SIZES, "three", Sizes(1, 64, 64))
    words = tmp_path / "recipe.yaml", tmp_path / "model", f"data.prepared={tmp_path / 'store'}"
    options = "--size", "three", "--device", "cpu", "--warm-up", "5", "--marks", "0.2", "0.4"
    ended = bench("transformer", *words, *options)
    lines = ended.out.splitlines()
    marks = [line for line in lines if line.startswith("mark: 0.")]
    curve = PROGRAMS["transformer"]().curve(lines, tmp_path / "model")
    for line, each, mark in zip(marks, curve, (0.2, 0.4), strict=True):
        assert (each.seconds >= mark, f" s, BLEU {each.bleu}, chrF " in line) == (True, True)
    assert "test: BLEU" in ended.out
    assert len((tmp_path / "model" / "hypotheses.test").read_text().splitlines()) == 5
    again = bench("transformer", *words, *options)
    assert (ended.code, again.code, "mark" in again.out) == (0, 0, False)


@pytest.mark.parametrize("decay", [0.5, None])
def test_parameters_are_averaged_as_the_recipe_says(decay: float | None, model: Transformer) -> None:
    averaging = f"training:\n  averaging: {{start: at-once, decay: {decay or 'null'}}}\n"
    recipe = parse_recipe(RECIPE.replace("training:\n", averaging), "test")
    trainer = transformer.Trainer(model, recipe, 1, torch.device("cpu"))
    average = [torch.zeros_like(each) for each in model.parameters()]
    batch = transformer.Loaded((4, 3), torch.cat((SOURCE, TARGET, TARGET), 1), 5)
    for number, share in enumerate((1.0, 10 / 11, 10 / 12) if decay else (1.0, 0.5, 1 / 3), 1):
        trainer.update(number, batch)
        pairs = zip(average, model.parameters(), strict=True)
        average = [old + share * (new.detach() - old) for old, new in pairs]
    assert not torch.allclose(average[0], next(model.parameters()))
    torch.testing.assert_close(trainer.saved, average)


def test_ctranslate2_finds_the_same_best_words(model: Transformer, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    tokens = ["<pad>", "<unk>", "<s>", "</s>", *(f"w{number}" for number in range(4, 20))]
    save_for_ctranslate2(model, tokens, tmp_path / "transformer")
    translator = ctranslate2.Translator(str(tmp_path / "transformer"), compute_type="float32")
    (result,) = translator.translate_batch([["w5", "w6", "w7"]], beam_size=1, max_decoding_length=5)
    words = [2]
    for _ in result.hypotheses[0]:
        words.append(int(scores(model, torch.tensor([[5, 6, 7, 3]]), torch.tensor([words]))[0, -1].argmax()))
    assert result.hypotheses[0] == [tokens[word] for word in words[1:]]
