"""Codes of subword-nmt divide words as subword-nmt does, and a run with them reads and writes tokenised text."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from econmt.checkpoint.checkpoints import load_task
from econmt.data.batching.store import prepare
from econmt.data.text.own_vocabulary import MergeCodes, read_codes, read_kept
from econmt.data.text.source_factors import word_numbers
from econmt.data.text.subwords import load_vocabularies
from econmt.data.text.vocabulary import SPECIAL_TOKENS, UNK, WORD_START, CodesVocabulary
from econmt.errors import InputError
from econmt.training.run import run_recipe
from tests.unit.data.test_own_vocabulary import LINES
from tests.unit.training.tiny import Run


def words_of(seed: int, count: int) -> list[str]:
    """Words with many common parts, and some with repeated letters."""
    draw = random.Random(seed)
    parts = ["low", "er", "est", "new", "wid", "aa", "aaa", "x", "-", "ß", "日本", "😀"]
    return ["".join(draw.choices(parts, k=draw.randint(1, 4))) for _ in range(count)]


def learnt(path: Path, merges: int, version: int = 2, text: Sequence[str] = ()) -> None:
    """Writes codes as subword-nmt learns them."""
    lines = [" ".join(words_of(1, 400)), *LINES, *text]
    codes = io.StringIO()
    learn_bpe(lines, codes, merges, min_frequency=1)
    text_of = codes.getvalue()
    if version == 1:  # learnt by old versions of the program: no header, and the end is a symbol of its own
        rules = text_of.splitlines()[1:]
        ends = ["e </w>", "t </w>", "r </w>", "a a", "a </w>", "a a</w>", "s t</w>"]
        text_of = "\n".join([*ends, *rules]) + "\n"
    path.write_text(text_of)


def their_codes(path: Path, kept: set[str] | None = None) -> BPE:
    with path.open(encoding="utf-8") as file:
        return BPE(file, vocab=kept)


def counted(path: Path, codes: BPE) -> dict[str, int]:
    """Writes the vocabulary of get-vocab for some of the text, and returns it."""
    counts = Counter(piece for word in words_of(2, 60) for piece in codes.segment(word).split(" "))
    path.write_text("".join(f"{piece} {count}\n" for piece, count in counts.most_common()))
    return counts


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("threshold", [None, 1, 3, 1000])
def test_words_are_divided_as_by_subword_nmt(tmp_path: Path, version: int, threshold: int | None) -> None:
    learnt(tmp_path / "codes", 60, version)
    theirs, kept = their_codes(tmp_path / "codes"), None
    vocabulary = counted(tmp_path / "vocab", theirs)
    if threshold is not None:
        frequent = {piece for piece, count in vocabulary.items() if count >= threshold}
        if not frequent:
            with pytest.raises(InputError, match="has no subword with a count of at least 1000"):
                read_kept(tmp_path / "vocab", threshold)
            return
        kept = read_kept(tmp_path / "vocab", threshold)
        assert kept == sorted(frequent)
        theirs = their_codes(tmp_path / "codes", frequent)
    ours = MergeCodes(*read_codes(tmp_path / "codes"), kept)
    divided = 0
    for word in [*words_of(3, 500), *words_of(1, 100), "a", "aaaaaaa", "</w>", "low</w>", "é"]:
        expected = [piece.removesuffix("@@") for piece in theirs.segment(word).split(" ")]
        assert list(ours.cut(word)) == [piece for piece in expected if piece], word
        divided += len(ours.cut(word)) > 1
    assert divided > 200


def test_equal_rules_and_several_ways_to_a_subword(tmp_path: Path) -> None:
    rules = "#version: 0.2\nb c\na b\na bc\nab c\nb c\nabc d</w>\nc d</w>\n"
    (tmp_path / "codes").write_text(rules)
    kept = {"a@@", "b@@", "d"}
    plain, limited = their_codes(tmp_path / "codes"), their_codes(tmp_path / "codes", kept)
    read = read_codes(tmp_path / "codes")
    for word in ("abcd", "abc", "bcd", "ab", "abcabcd", "cd"):
        assert " ".join(MergeCodes(*read).cut(word)) == plain.segment(word).replace("@@", "")
        assert " ".join(MergeCodes(*read, kept).cut(word)) == limited.segment(word).replace("@@", "")


def test_codes_that_cannot_be_used(tmp_path: Path) -> None:
    codes, vocab = tmp_path / "codes", tmp_path / "vocab"
    for text, message in {
        "#version: 0.3\na b\n": r"codes:1: codes of an unknown format, '#version: 0.3'",
        "#version: 0.2\na b\nabc\n": r"codes:3: expected two symbols with a space between them, found 'abc'",
        "a b c\n": r"codes:1: expected two symbols",
        "#version: 0.2\n": "codes: has no merge",
    }.items():
        codes.write_text(text)
        with pytest.raises(InputError, match=message):
            read_codes(codes)
    for line in ("b", f"b {'9' * 5000}", "b ٣", "b -1", " 3", "b 3 4"):
        vocab.write_text(f"a 3\n{line}\n", encoding="utf-8")
        with pytest.raises(InputError, match=f"vocab:2: expected a subword and its count, found '{line[:9]}"):
            read_kept(vocab, 1)
    vocab.write_text("a 3\nb 2\nc 4\n")
    assert read_kept(vocab, 3) == ["a", "c"]


def test_tokens_keep_the_beginnings_of_words(tmp_path: Path) -> None:
    learnt(tmp_path / "codes", 60)
    codes = MergeCodes(*read_codes(tmp_path / "codes"))
    known = [WORD_START, "▁low", "er", "est", "▁new", "w", "▁<term>"]
    vocabulary = CodesVocabulary(codes, [*SPECIAL_TOKENS, *known], ["<term>"])
    text = "lower  <term> newest wlow ☂er"
    pieces = vocabulary.written(text)
    assert vocabulary.joined(pieces) == " ".join(text.split())
    ids = vocabulary.encode(text)
    assert vocabulary.tokens(ids) == [piece if piece in known else "<unk>" for piece in pieces]
    assert "▁<term>" in pieces
    assert vocabulary.written("▁low▁new") == vocabulary.written("low new")
    numbers = word_numbers(vocabulary.tokens(ids), vocabulary)
    assert numbers[-1] == 4
    assert numbers == word_numbers(pieces, vocabulary)
    joined = "".join(vocabulary.tokens(ids)).replace(WORD_START, " ").strip()
    assert vocabulary.decode([2, *ids, 3, 0]) == joined
    assert vocabulary.encode("<unk> </s>")[-2:] != [UNK, 3]
    assert vocabulary.written("a▁b") == vocabulary.written("a b")


def letters(folder: Path) -> Path:
    """Text of capital letters that are to be read as small ones, and codes of both sides."""
    draw = random.Random(5)
    text = folder / "text"
    text.mkdir()
    lines = [
        " ".join("".join(draw.choices("abc", k=3)) for _ in range(draw.randint(1, 4))) for _ in range(200)
    ]
    for split, part in (("train", lines), ("valid", lines[:20])):
        (text / f"{split}.src").write_text("".join(f"{line.upper()}\n" for line in part))
        (text / f"{split}.trg").write_text("".join(f"{line}\n" for line in part))
    for side, written in (("src", [line.upper() for line in lines]), ("trg", lines)):
        codes = io.StringIO()
        learn_bpe(written, codes, 12, min_frequency=1)
        (text / f"codes.{side}").write_text(codes.getvalue())
    return text


def test_a_run_with_codes(tmp_path: Path) -> None:
    text = letters(tmp_path)
    for side in ("src", "trg"):
        with (text / f"train.{side}").open("a") as file:
            file.write("y y x\n")
    subwords = "{type: codes, joint: false, files: [codes.src, codes.trg], min_count: 2}"
    run = Run(text, tmp_path / "run", (f"data.subwords={subwords}", "training.max_updates=2"))
    run_recipe(run.recipe, [text], console=run.console)
    source, target = load_task(run.folder.path).vocabularies.sides
    theirs = their_codes(text / "codes.src")
    line = (text / "train.src").read_text().splitlines()[7]
    expected = [piece.removesuffix("@@") for piece in theirs.segment(line).split()]
    written = [token.removeprefix(WORD_START) for token in source.written(line) if token != WORD_START]
    assert written == expected
    assert source.decode(source.encode(line)) == line
    assert UNK not in source.encode(line)
    assert UNK in target.encode(line)
    assert [UNK in target.encode(rare) for rare in "yx"] == [False, True], "read twice, and once"


def test_a_joint_vocabulary_is_one(tmp_path: Path) -> None:
    text = letters(tmp_path)
    (text / "vocab").write_text("a\u00a0b 9\na@@ 5\nb 2\n")
    subwords = "{type: codes, files: [codes.trg], vocabularies: [vocab], threshold: 3, size: 12}"
    run = Run(text, tmp_path / "run", (f"data.subwords={subwords}",))
    both = prepare(run.recipe, tmp_path / "p", [text], show_progress=False).vocabularies
    assert both.source is both.target
    assert both.source.size == 12
    assert isinstance(both.source, CodesVocabulary)
    assert both.source.codes.kept == {"a@@", "a\u00a0b"}
    damaged = json.loads((tmp_path / "p" / "subwords.json").read_text())
    faults = {"rules": [1], "pieces": ["a"], "version": 7, "kept": "x"}
    for key, value in (*faults.items(), ("rules", ["a b c"])):
        (tmp_path / "p" / "subwords.json").write_text(json.dumps({**damaged, key: value}))
        with pytest.raises(InputError, match=r"subwords\.json: damaged vocabulary of codes"):
            load_vocabularies(tmp_path / "p")


@pytest.mark.parametrize("joint", ["true", "false", "one"])
def test_prepared_text_with_codes_is_prepared_again(tmp_path: Path, joint: str) -> None:
    text, folder = letters(tmp_path), tmp_path / "p"
    files = "[codes.src, codes.trg]" if joint == "false" else "[codes.trg]"
    joint = "false" if joint == "one" else joint  # one file may serve both languages
    run = Run(text, tmp_path / "run", (f"data.subwords={{type: codes, joint: {joint}, files: {files}}}",))
    prepare(run.recipe, folder, [text], show_progress=False)
    (text / "codes.trg").write_text("".join((text / "codes.trg").read_text().splitlines(True)[:4]))
    (text / "train.trg").write_text("".join((text / "train.trg").read_text().splitlines(True)[::-1]))
    again = prepare(run.recipe, folder, [text], show_progress=False)
    fresh = prepare(run.recipe, tmp_path / "q", [text], show_progress=False)
    assert again.checksums == fresh.checksums
    assert any(name.endswith(".json") for name in again.checksums)
