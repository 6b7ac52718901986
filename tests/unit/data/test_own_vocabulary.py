"""Vocabularies that a user brings along divide text as in the program that made them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from econmt.checkpoint.checkpoints import load_task
from econmt.data.batching.store import prepare
from econmt.data.text.own_vocabulary import own_subwords, own_words
from econmt.data.text.vocabulary import SPECIAL_TOKENS, SentencePieceVocabulary, WordVocabulary, normalized
from econmt.errors import InputError
from econmt.training.run import run_recipe
from tests.unit.training.tiny import Run, write_text

LINES = [
    "a house by the sea",
    "the old house is sold",
    "sea and sky",
    "Ähren im Wind, ﬁne days",
    "< s > </s> <pad>",
    "hello world hello worlds",
    "the quick brown fox jumps over the lazy dog",
    "日本語 text",
]
DATA = "data.subwords={{type: bpe, joint: true, models: [{}]}}"


def foreign(
    path: Path, kind: str = "bpe", size: int = 70, **settings: Any
) -> sentencepiece.SentencePieceProcessor:
    """A model as spm_train makes it: <unk>, <s> and </s> first, no padding, normalisation by nmt_nfkc."""
    made = io.BytesIO()
    settings |= {"model_type": kind, "vocab_size": size, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.Train(sentence_iterator=iter(LINES * 4), model_writer=made, **settings)
    path.write_bytes(made.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bpe", {}),
        ("unigram", {}),
        ("bpe", {"byte_fallback": True, "size": 340}),
        ("unigram", {"pad_id": 3, "user_defined_symbols": ["<sep>"], "control_symbols": ["<2de>"]}),
        ("bpe", {"pad_id": 0, "unk_id": 3, "bos_id": -1, "eos_id": 1, "self_test_sample_size": 3}),
    ],
)
def test_a_model_divides_text_as_before(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    path = tmp_path / "theirs.model"
    theirs = foreign(path, kind, **settings)
    mine = SentencePieceVocabulary(own_subwords(path, kind, SPECIAL_TOKENS, ["▁<BT>"]), "mine")
    assert mine.tokens(range(4)) == list(SPECIAL_TOKENS)
    known = ["▁<BT>", theirs.IdToPiece(theirs.GetPieceSize() - 1)]
    assert SentencePieceVocabulary(own_subwords(path, kind, SPECIAL_TOKENS, known), "").size == mine.size
    for line in [*LINES, "unseen words: żółw", "ﬀ ½"]:
        pieces = theirs.EncodeAsPieces(normalized(line))
        known = [piece if theirs.PieceToId(piece) != theirs.unk_id() else "<unk>" for piece in pieces]
        assert mine.tokens(mine.encode(line)) == known
        if "<unk>" not in known and "<" not in line:
            assert mine.decode(mine.encode(line)) == theirs.DecodePieces(pieces)
    tagged = mine.tokens(mine.encode("<BT> the sea"))
    assert tagged[0] == "▁<BT>"
    assert tagged[1:] == theirs.EncodeAsPieces("the sea")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bpe", {"treat_whitespace_as_suffix": True}),
        ("unigram", {"treat_whitespace_as_suffix": True, "add_dummy_prefix": False}),
        # Its subwords are single characters, so that only a text shows on which side of a word the mark is.
        ("unigram", {"treat_whitespace_as_suffix": True, "size": 38}),
        ("unigram", {"split_by_whitespace": False}),
    ],
)
def test_a_model_by_which_words_cannot_be_counted_is_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    path = tmp_path / "theirs.model"
    theirs = foreign(path, kind, **{"size": 90, **settings})
    letters = all(len(theirs.IdToPiece(number)) == 1 for number in range(3, theirs.GetPieceSize()))
    assert letters == (settings.get("size") == 38), "the case is what its comment says"
    with pytest.raises(InputError, match=r"mine: has subwords with a space \(U\+2581\) at their ends or"):
        SentencePieceVocabulary(own_subwords(path, kind, SPECIAL_TOKENS, []), "mine")


def test_models_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "theirs.model"
    foreign(path, "unigram")
    with pytest.raises(InputError, match=r"of type unigram; data.subwords.type is bpe; set it to unigram"):
        own_subwords(path, "bpe", SPECIAL_TOKENS, [])
    whole = path.read_bytes()
    for content in (b"", b"words\nmore words\n", whole[: len(whole) // 2], b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"not a SentencePiece model; give the .model file"):
            own_subwords(path, "unigram", SPECIAL_TOKENS, [])
    with pytest.raises(InputError, match="cannot be read"):
        own_subwords(tmp_path / "none", "bpe", SPECIAL_TOKENS, [])


def test_lists_of_several_programs(tmp_path: Path) -> None:
    sockeye = {"<pad>": 0, "<unk>": 1, "<s>": 2, "</s>": 3, "of": 5, "the": 4}
    for name, text, words in (
        ("plain.txt", "<unk>\n<s>\nthe\nof\n\nsea\n", ["the", "of", "sea"]),
        ("subword-nmt.vocab", "the 51\nsea@@ 3\n", ["the", "sea@@"]),
        ("opennmt.vocab", "<blank>\t1\nthe\t5.1e1\nsea\t3\n", ["the", "sea"]),
        ("spm.vocab", "<unk>\t0\n▁the\t-1.5\n", ["▁the"]),
        ("sockeye.json", json.dumps(sockeye), ["the", "of"]),
    ):
        (tmp_path / name).write_text(text)
        assert own_words(tmp_path / name, SPECIAL_TOKENS) == words


def test_lists_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text, message in (
        ("a", "the\nof the sea\n", "a:2: expected a word, and perhaps a number after it, found 'of the sea'"),
        ("a", "the\nof\nthe 3\n", "a:3: the word 'the' is also in line 1"),
        ("a", "<unk>\n", "a: has no word"),
        ("a.json", "[1]", "not a JSON object from words to ids"),
        ("a.json", "{", "not a JSON object from words to ids"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=message):
            own_words(tmp_path / name, SPECIAL_TOKENS)
    path = tmp_path / "a.json"
    path.write_text('{"the": 5}')
    monkeypatch.setattr("econmt.data.text.own_vocabulary.LARGEST", 10)
    assert own_words(path, SPECIAL_TOKENS) == ["the"]
    monkeypatch.setattr("econmt.data.text.own_vocabulary.LARGEST", 9)
    with pytest.raises(InputError, match=r"a\.json: larger than 0 MB; is this a vocabulary"):
        own_words(path, SPECIAL_TOKENS)


def test_a_run_with_an_own_model(tmp_path: Path) -> None:
    text = write_text(tmp_path, {"train": 20, "valid": 4})
    made = foreign(text / "theirs.model", size=80)
    changes = DATA.format("theirs.model"), "training.max_updates=2", f"data.prepared={tmp_path}/p"
    run = Run(text, tmp_path / "run", changes)
    run_recipe(run.recipe, [text], console=run.console)
    vocabulary = load_task(run.folder.path).vocabularies.source
    assert vocabulary.size == made.GetPieceSize() + 1  # padding
    foreign(text / "theirs.model", size=60)
    prepared = prepare(run.recipe, tmp_path / "p", [text], show_progress=False)
    assert prepared.vocabularies.source.size < vocabulary.size  # the file has changed


def test_a_model_of_econmt_is_the_same_vocabulary_in_another_run(tmp_path: Path) -> None:
    """So that training.initialize_from takes its parameters as they are."""
    text = write_text(tmp_path, {"train": 20, "valid": 4})
    for kind in ("bpe", "unigram"):
        changes = f"data.subwords={{type: {kind}, size: 24}}", "data.tags=[<BT>]"
        prepare(Run(text, tmp_path, changes).recipe, tmp_path / kind, [text], show_progress=False)
        learnt = tmp_path / kind / "subwords.model"
        assert own_subwords(learnt, kind, SPECIAL_TOKENS, ["▁<BT>"]) == learnt.read_bytes()


def test_a_run_with_own_lists(tmp_path: Path) -> None:
    text = write_text(tmp_path, {"train": 20, "valid": 4})
    (text / "source.vocab").write_text("d 5\na 9\n")
    (text / "target.vocab").write_text("A\nB\nC\n")
    words = "{type: words, lists: [source.vocab, target.vocab]}"
    run = Run(text, tmp_path / "run", (f"data.subwords={words}", "training.max_updates=2"))
    prepared = prepare(run.recipe, tmp_path / "p", [text], show_progress=False)
    source, target = prepared.vocabularies.sides
    assert source.tokens(range(source.size)) == [*SPECIAL_TOKENS, "d", "a"]
    assert target.tokens(range(target.size)) == [*SPECIAL_TOKENS, "A", "B", "C"]
    run_recipe(run.recipe, [text], console=run.console)


def test_rare_words_are_unknown(tmp_path: Path) -> None:
    for side in ("src", "trg"):
        (tmp_path / f"train.{side}").write_text("a b a\nc a b\nd a\n")
        (tmp_path / f"valid.{side}").write_text("a\n")
    subwords = "data.subwords={type: words, source: 50, target: 6, min_count: 2}"
    run = Run(tmp_path, tmp_path / "run", (subwords,))
    prepared = prepare(run.recipe, tmp_path / "p", [tmp_path], show_progress=False)
    source, target = prepared.vocabularies.sides
    assert source.tokens(range(source.size)) == [*SPECIAL_TOKENS, "a", "b"]
    assert isinstance(target, WordVocabulary)
    assert target.encode("a b c d") == [4, 5, 1, 1]


def test_keys_that_do_not_fit(tmp_path: Path) -> None:
    text = write_text(tmp_path, {"train": 20, "valid": 4})
    for subwords, message in (
        ("{type: bpe, models: [a, b]}", "models has 2 files and joint is true"),
        ("{type: bpe, joint: false, models: [a]}", "models has 1 files and joint is false"),
        ("{type: words, lists: [a]}", "lists has 1 files and joint is false"),
        ("{type: bpe, models: [nowhere.model]}", "nowhere.model"),
        ("{type: codes}", "files"),
        ("{type: codes, files: [a, b]}", "files has 2 files and joint is true"),
        ("{type: codes, files: [a], vocabularies: [v, w]}", "vocabularies has 2 files and joint is true"),
        ("{type: codes, files: [nowhere.codes]}", "nowhere.codes"),
    ):
        key = f"data.subwords={subwords}"
        with pytest.raises(InputError, match=message):
            prepare(Run(text, tmp_path / "run", (key,)).recipe, tmp_path / "p", [text], show_progress=False)


def test_tags_are_words_of_the_source_alone(tmp_path: Path) -> None:
    text = write_text(tmp_path, {"train": 20, "valid": 4})
    for name in ("a", "b"):
        foreign(text / f"{name}.model")
    subwords = "data.subwords={type: bpe, joint: false, models: [a.model, b.model]}"
    run = Run(text, tmp_path / "run", (subwords, "data.tags=[<BT>]"))
    both = prepare(run.recipe, tmp_path / "p", [text], show_progress=False).vocabularies.sides
    assert ["▁<BT>" in side.tokens(range(side.size)) for side in both] == [True, False]
