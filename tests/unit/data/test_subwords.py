"""Vocabularies: what is learnt is deterministic, loads again, and gives text back."""

from __future__ import annotations

import io
import itertools
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from econmt.config.recipe import Data
from econmt.data.text.subwords import (
    fingerprint,
    load_vocabularies,
    sample_pairs,
    train_vocabularies,
    vocabulary_files,
)
from econmt.data.text.vocabulary import BOS, EOS, PAD, SPECIAL_TOKENS, UNK, Vocabularies, split_words
from econmt.errors import InputError

PAIRS = [
    ("A man, two dogs and one Ähre.", "Ein Mann, zwei Hunde und eine „Ähre“."),
    ("The man doesn't see it — really?", "Der Mann sieht's nicht – wirklich?"),
    ("Full-width ＡＢＣ and ﬁ ligature; 1½ km² 100 %", "Tiếng Việt: Đó là những con chó."),
] * 20


def data(**subwords: Any) -> Data:
    return Data.model_validate(
        {"source": "en", "target": "de", "train": ["t"], "valid": "v", "subwords": subwords}
    )


def factory() -> Iterator[tuple[str, str]]:
    return iter(PAIRS)


def learn(folder: Path, **subwords: Any) -> Vocabularies:
    return train_vocabularies(data(**subwords), factory, folder)


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def joint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    return learn(tmp_path_factory.mktemp("joint"), type=request.param, size=120)


def test_text_and_ids_there_and_back(joint: Vocabularies) -> None:
    assert (PAD, UNK, BOS, EOS) == (0, 1, 2, 3)
    assert tuple(joint.source.tokens([PAD, UNK, BOS, EOS])) == SPECIAL_TOKENS
    assert joint.source is joint.target
    assert joint.source.size <= 120
    texts = [text for pair in PAIRS[:3] for text in pair] + ["", "unseen 漢"]
    assert joint.source.encode_many(texts) == [joint.source.encode(text) for text in texts]
    assert joint.source.encode_many([]) == []
    composed = unicodedata.normalize("NFC", PAIRS[2][1])
    decomposed = unicodedata.normalize("NFD", composed)
    assert composed != decomposed
    assert joint.target.encode(decomposed) == joint.target.encode(composed)
    assert joint.target.decode(joint.target.encode(decomposed)) == composed
    for text in (*itertools.chain(*PAIRS[:3]), "ＡＢＣ ﬁ ½ ²", "  A  man "):
        ids = joint.source.encode(text)
        assert min(ids) > EOS
        assert joint.source.decode(ids) == " ".join(text.split())
    assert joint.source.encode("") == joint.source.encode("   ") == []
    ids = joint.source.encode("man 漢字 and")
    assert ids.count(UNK) == 1
    assert joint.source.decode(ids) == "man <unk> and"
    assert joint.source.decode([BOS, *joint.source.encode("A man"), EOS, PAD, PAD]) == "A man"
    for mark in ("</s>", "<s>", "<pad>"):
        assert not {PAD, BOS, EOS} & set(joint.source.encode(f"A {mark} man"))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sign_that_stands_only_in_a_mark_is_known(tmp_path: Path, kind: str) -> None:
    pairs = [("a <unk> b", "c </s> d"), ("e <s> f", "g <pad> h")] * 20
    learnt = train_vocabularies(data(type=kind, size=40), lambda: iter(pairs), tmp_path)
    for text in ("a < b", "<unk>", "</s>", "<s>", "<pad>", "u k n / > <"):
        ids = learnt.source.encode(text)
        assert UNK not in ids, text
        assert learnt.source.decode(ids) == text


def test_blanks_of_any_kind_at_the_ends_go(joint: Vocabularies, tmp_path: Path) -> None:
    words = learn(tmp_path, type="words")
    for vocabulary in (joint.source, words.source):
        assert vocabulary.encode("\t A man\xa0\t\u3000 ") == vocabulary.encode("A man")


def test_separate_models(tmp_path: Path) -> None:
    vocabularies = learn(tmp_path, type="bpe", size=70, joint=False)
    files = [path.name for path in vocabulary_files(tmp_path)]
    assert files == ["subwords.source.model", "subwords.target.model"]
    assert UNK in vocabularies.source.encode("Đó")
    assert UNK not in vocabularies.target.encode("Đó")


def test_loading_gives_the_same_and_the_library_keeps_quiet(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    learnt = learn(tmp_path, type="bpe", size=100)
    assert capfd.readouterr() == ("", "")
    loaded = load_vocabularies(tmp_path)
    assert loaded.source is loaded.target
    assert loaded.source.encode(PAIRS[0][0]) == learnt.source.encode(PAIRS[0][0])


def test_fewer_subwords_than_asked_is_said_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vocabularies = learn(tmp_path, type="bpe", size=5000)
    error = capfd.readouterr().err
    assert error == (
        f"econmt: the training text supports only {vocabularies.source.size} subwords, "
        f"fewer than data.subwords.size 5000; using {vocabularies.source.size}\n"
    )


def test_text_that_cannot_be_learnt_from(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, str]]:
        yield PAIRS[0]
        raise InputError("text.en:2: not valid UTF-8")

    for size, pairs, message in (
        (20, factory, r"data\.subwords\.size 20 is too small: the training text needs at least \d+"),
        (50, lambda: iter([("", " ")]), "no line to learn subwords from"),
        (50, broken, r"text\.en:2: not valid UTF-8"),
    ):
        with pytest.raises(InputError, match=message):
            train_vocabularies(data(type="bpe", size=size), pairs, tmp_path)


class TestWords:
    @pytest.fixture
    def words(self, tmp_path: Path) -> Vocabularies:
        pairs = [("b b b a a c d <s>", "x y"), ("c", "y </s> <unk>")]
        return train_vocabularies(data(type="words", source=7, target=50), lambda: iter(pairs), tmp_path)

    def test_most_frequent_first_then_by_spelling(self, words: Vocabularies, tmp_path: Path) -> None:
        assert (tmp_path / "vocab.source.txt").read_text() == "<pad>\n<unk>\n<s>\n</s>\nb\na\nc\n"
        assert (tmp_path / "vocab.target.txt").read_text() == "<pad>\n<unk>\n<s>\n</s>\ny\nx\n"
        assert (words.source.size, words.target.size) == (7, 6)

    def test_encoding_and_decoding(self, words: Vocabularies) -> None:
        assert words.source.encode(" a  b zzz c ") == [5, 4, UNK, 6]
        assert words.source.encode("<s> a </s> <pad> <unk>") == [UNK, 5, UNK, UNK, UNK]
        assert words.target.encode_many(["x y", ""]) == [[5, 4], []]
        assert words.source.decode([BOS, 4, UNK, 5, EOS, PAD]) == "b <unk> a"
        assert words.source.tokens([BOS, 4]) == ["<s>", "b"]

    def test_only_spaces_part_words(self, tmp_path: Path) -> None:
        assert split_words("a\u00a0b c\u2028d\te  f") == ["a\u00a0b", "c\u2028d\te", "f"]
        pairs = [("a\u2028b\x85", "c")]
        vocabularies = train_vocabularies(data(type="words"), lambda: iter(pairs), tmp_path)
        assert vocabularies.source.decode(vocabularies.source.encode("a\u2028b\x85")) == "a\u2028b\x85"


class TestLoadingWhatIsBroken:
    def refused(self, folder: Path, message: str) -> None:
        with pytest.raises(InputError, match=message):
            load_vocabularies(folder)

    def test_nothing_there(self, tmp_path: Path) -> None:
        self.refused(tmp_path, r"no vocabulary \(subwords\.model")
        with pytest.raises(InputError, match="no vocabulary files"):
            fingerprint(tmp_path)

    def test_no_model(self, tmp_path: Path) -> None:
        learn(tmp_path, type="bpe", size=100)
        file, made = tmp_path / "subwords.model", io.BytesIO()
        for content in (b"", b"rubbish", b"\x80\x04\x95pickle", file.read_bytes()[:500]):
            file.write_bytes(content)
            self.refused(tmp_path, r"subwords\.model: not a ")
        settings = {"vocab_size": 12, "hard_vocab_limit": False, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(["a b c d"]), model_writer=made, **settings
        )
        file.write_bytes(made.getvalue())
        self.refused(tmp_path, "not a subword model made by econmt")

    def test_no_word_list(self, tmp_path: Path) -> None:
        special = b"<pad>\n<unk>\n<s>\n</s>\n"
        for content in (b"", special + b"a\na\n", b"a\nb\n", special + b"a", b"\xff\n"):
            for name in ("vocab.source.txt", "vocab.target.txt"):
                (tmp_path / name).write_bytes(content)
            self.refused(tmp_path, r"vocab\.source\.txt: (damaged vocabulary|the vocabulary is not valid)")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tab", [" ", "\t"])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("joint", [True, False])
def test_words_with_counts_teach_what_the_sentences_teach(
    tmp_path: Path, kind: str, joint: bool, tab: str
) -> None:
    """SentencePiece makes the same bytes from the sentences themselves, those that it leaves out among them."""
    odd = ["twice  the  space", f"a{tab}tab", "a\u2581mark  \u2581here\u2581 \u2581\u2581"] * 7
    long = ["long " * 13_107 + "qqqqq"] * 9 + ["long " * 13_106 + "zzzz"] * 2
    sources = [*(source for source, _ in PAIRS), *odd, *["reserved \u2585 sign"] * 9, *long]
    targets = [target for _, target in PAIRS] * 2 + ["dummy"] * len(sources)
    pairs = list(zip((f"<BT> {each}" for each in sources), targets, strict=False))
    wanted = data(type=kind, size=90, joint=joint).model_copy(update={"tags": ["<BT>"]})
    train_vocabularies(wanted, lambda: iter(pairs), tmp_path)

    def from_sentences(columns: tuple[int, ...], symbols: list[str]) -> bytes:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=(pair[column] for pair in pairs for column in columns), model_writer=model,
            model_type=kind, vocab_size=90, character_coverage=1.0, hard_vocab_limit=False, pad_id=0, unk_id=1,
            bos_id=2, eos_id=3, unk_surface="<unk>", user_defined_symbols=symbols, normalization_rule_name="identity",
            max_sentence_length=1 << 16, num_threads=4, minloglevel=2,
        )  # fmt: skip
        return model.getvalue()

    for name, columns, symbols in (
        [("subwords.model", (0, 1), ["\u2581<BT>"])]
        if joint
        else [("subwords.source.model", (0,), ["\u2581<BT>"]), ("subwords.target.model", (1,), [])]
    ):
        assert (tmp_path / name).read_bytes() == from_sentences(columns, symbols)


class TestSampling:
    def sample(self, count: int, limit: int) -> list[tuple[str, str]]:
        return list(sample_pairs(((str(i), "") for i in range(count)), count, limit))

    def test_exactly_as_many_as_asked_in_order_and_always_the_same(self) -> None:
        assert len(self.sample(10, 10)) == 10
        taken = [int(source) for source, _ in self.sample(1000, 100)]
        assert len(taken) == len(set(taken)) == 100
        assert taken == sorted(taken)
        assert taken == [int(source) for source, _ in self.sample(1000, 100)]

    def test_evenly_from_the_whole(self) -> None:
        taken = [int(source) for source, _ in self.sample(10_000, 1000)]
        quarters = [sum(1 for i in taken if i // 2500 == quarter) for quarter in range(4)]
        assert all(200 < count < 300 for count in quarters)

    def test_a_cap_still_covers_both_languages(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("econmt.data.text.subwords.SAMPLE_PAIRS", 30)
        assert learn(tmp_path, type="bpe", size=120).source.size > 60

    def test_fewer_pairs_are_learnt_from_if_their_words_are_many(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pairs = [("", f"word{number}") for number in range(100)]
        monkeypatch.setattr("econmt.data.text.subwords.MOST_CHARACTERS", 60)
        train_vocabularies(data(type="bpe", size=40), lambda: iter(pairs), tmp_path)
        learnt = (tmp_path / "subwords.model").read_bytes()
        monkeypatch.undo()
        train_vocabularies(data(type="bpe", size=40), lambda: sample_pairs(iter(pairs), 100, 5), tmp_path)
        assert learnt == (tmp_path / "subwords.model").read_bytes()
