"""Vocabularies of a run: how they are learnt from its text or taken from files, written and read."""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

import sentencepiece

from econmt.config import limits
from econmt.config.recipe import (
    CodesSubwords,
    Data,
    SentencePieceSubwords,
    TextData,
    TextSubwords,
    TextWords,
    WordSubwords,
)
from econmt.data.files import notice, write_atomically
from econmt.data.text.own_vocabulary import (
    MergeCodes,
    own_subwords,
    own_words,
    read_codes,
    read_kept,
    without_input_format,
)
from econmt.data.text.vocabulary import (
    BOS,
    EOS,
    PAD,
    SPECIAL_TOKENS,
    UNK,
    WORD_START,
    CodesVocabulary,
    SentencePieceVocabulary,
    Vocabularies,
    Vocabulary,
    WordVocabulary,
    normalized,
    pieces_of,
    split_words,
)
from econmt.errors import InputError

JOINT_FILE = "subwords.model"
JOINT_CODES_FILE = "subwords.json"
CODES_FILES = ("subwords.source.json", "subwords.target.json")
SUBWORD_FILES = ("subwords.source.model", "subwords.target.model")
WORD_FILES = ("vocab.source.txt", "vocab.target.txt")
JOINT_WORD_FILE = "vocab.txt"
_VOCABULARY_FILES = (
    (JOINT_FILE,),
    SUBWORD_FILES,
    (JOINT_CODES_FILE,),
    CODES_FILES,
    WORD_FILES,
    (JOINT_WORD_FILE,),
)
"""Names of the vocabulary files of a folder, which has one of these sets."""
FACTOR_FILE = "vocab.factor{}.txt"
"""File of the vocabulary of a source-factor stream, formatted with its number from 1."""

SAMPLE_PAIRS = 1_000_000
"""Maximum number of pairs to learn subwords from, drawn at random from the whole text."""
MOST_CHARACTERS = 4_000_000
"""Most characters of the different words that BPE learns from, 70 bytes each: in Chinese a word is a whole clause."""

# Fixed, because the result of SentencePiece depends on the number of threads.
_TRAINING_THREADS = 4
_LONGEST_SENTENCE_BYTES = 1 << 16
_RESERVED = "\u2585"
"""Character by which SentencePiece marks what is unknown; it learns nothing from a sentence with it."""

TERM_TAGS = ("<term>", "</term>")
"""Tags around the translation of an annotated term, see :mod:`econmt.data.text.annotation`."""

# SentencePiece drops the text of its special tokens from training text, so that letters which occur only there would be
# unknown. A space inserted into the text avoids that.
_SPECIAL_TEXT = re.compile(r"<(?=(?:pad|unk|s|/s)>)")


def train_vocabularies(
    data: Data | TextData,
    pairs_factory: Callable[[], Iterator[tuple[str, str]]],
    folder: Path,
    own: Sequence[Path] = (),
) -> Vocabularies:
    """Learns the vocabularies of a recipe from its training text, or converts its ``own``, and writes them.

    The files are deterministic: ``subwords.model`` (joint), ``subwords.source.model`` and ``subwords.target.model``, or
    ``vocab.source.txt`` and ``vocab.target.txt``, joint ``vocab.txt``; by codes of subword-nmt ``subwords.json``, or
    ``subwords.source.json`` and ``subwords.target.json``; for a language model, ``subwords.model`` or ``vocab.txt``.
    ``pairs_factory`` returns an iterator over the training pairs, and is called more than once. ``own`` are the files
    that the recipe names, see :mod:`econmt.data.text.own_vocabulary`.
    """
    subwords = data.subwords
    tags: list[str] = []
    if isinstance(data, Data):
        annotates = data.annotate_terms.share > 0.0
        tags = list(dict.fromkeys([*filter(None, data.tags), *(TERM_TAGS if annotates else ())]))
    if isinstance(subwords, CodesSubwords):
        _train_codes(subwords, pairs_factory, own, folder, tags)
    elif own:
        _convert(subwords, own, folder, tags)
    elif isinstance(subwords, (WordSubwords, TextWords)):
        _train_words(subwords, pairs_factory, folder, tags)
    else:
        _train_subwords(subwords, pairs_factory, folder, tags)
    return load_vocabularies(folder)


def _convert(
    settings: SentencePieceSubwords | TextSubwords | WordSubwords | TextWords,
    own: Sequence[Path],
    folder: Path,
    tags: Sequence[str],
) -> None:
    """Converts vocabularies that exist; ``tags`` are added to the source's."""
    if isinstance(settings, (WordSubwords, TextWords)):
        for (name, columns), path in zip(_sides(settings, JOINT_WORD_FILE, WORD_FILES), own, strict=True):
            fixed = [*SPECIAL_TOKENS, *(tags if 0 in columns else ())]
            _write_words(folder / name, dict.fromkeys([*fixed, *own_words(path, SPECIAL_TOKENS)]))
        return
    for name, path in zip((JOINT_FILE,) if len(own) == 1 else SUBWORD_FILES, own, strict=True):
        marked = [] if name == SUBWORD_FILES[1] else [f"{WORD_START}{tag}" for tag in tags]
        model = own_subwords(path, settings.type, SPECIAL_TOKENS, marked)
        SentencePieceVocabulary(model, str(path))
        write_atomically(folder / name, model)


def _train_words(
    settings: WordSubwords | TextWords,
    pairs_factory: Callable[[], Iterator[tuple[str, str]]],
    folder: Path,
    tags: Sequence[str],
) -> None:
    counts: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for pair in pairs_factory():
        for counter, text in zip(counts, pair, strict=True):
            counter.update(split_words(text))
    sizes = [settings.size] if isinstance(settings, TextWords) else [settings.source, settings.target]
    for (name, columns), limit in zip(_sides(settings, JOINT_WORD_FILE, WORD_FILES), sizes, strict=False):
        counter = sum((counts[column] for column in columns), Counter[str]())
        fixed = [*SPECIAL_TOKENS, *(tags if 0 in columns else ())]
        _write_words(folder / name, _ranked(counter, fixed, limit, settings.min_count))


def _sides(
    settings: CodesSubwords | SentencePieceSubwords | WordSubwords | TextSubwords | TextWords,
    joint: str,
    files: Sequence[str],
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the names of the vocabulary files, ``joint`` or both ``files``, each with its columns of a pair."""
    if isinstance(settings, (TextSubwords, TextWords)):
        return [(joint, (1,))]
    return [(joint, (0, 1))] if settings.joint else [(files[0], (0,)), (files[1], (1,))]


def _train_codes(
    settings: CodesSubwords,
    pairs_factory: Callable[[], Iterator[tuple[str, str]]],
    own: Sequence[Path],
    folder: Path,
    tags: Sequence[str],
) -> None:
    """Writes vocabularies of the subwords of the training text, the frequent ones first."""
    rules = [read_codes(path) for path in own[: len(settings.files)]]
    kept = [read_kept(path, settings.threshold) for path in own[len(settings.files) :]]
    sides = _sides(settings, JOINT_CODES_FILE, CODES_FILES)
    coded = [
        MergeCodes(*rules[min(side, len(rules) - 1)], kept[side] if kept else None)
        for side in range(len(sides))
    ]
    counts = [Counter[str]() for _ in sides]
    for pair in pairs_factory():
        for codes, counter, (_, columns) in zip(coded, counts, sides, strict=True):
            for column in columns:
                for pieces in pieces_of(pair[column], codes, tags):
                    counter.update(pieces)
    for codes, counter, (name, columns) in zip(coded, counts, sides, strict=True):
        whole = [*tags] if 0 in columns else []
        fixed = [*SPECIAL_TOKENS, WORD_START, *(WORD_START + tag for tag in whole)]
        content = {
            "version": codes.version,
            "rules": [" ".join(rule) for rule in codes.rules],
            "kept": None if codes.kept is None else sorted(codes.kept),
            "tags": whole,
            "pieces": _ranked(counter, fixed, settings.size, settings.min_count),
        }
        write_atomically(folder / name, json.dumps(content, ensure_ascii=False, indent=0).encode() + b"\n")


def _train_subwords(
    settings: SentencePieceSubwords | TextSubwords,
    pairs_factory: Callable[[], Iterator[tuple[str, str]]],
    folder: Path,
    tags: Sequence[str],
) -> None:
    # The first pass also detects errors in the text, which SentencePiece would hide in an error of its own.
    count = sum(1 for _ in pairs_factory())
    for name, columns in _sides(settings, JOINT_FILE, SUBWORD_FILES):

        def sentences(most: int, columns: tuple[int, ...] = columns) -> Iterator[str]:
            for pair in sample_pairs(pairs_factory(), count, most):
                for column in columns:
                    if pair[column].strip():
                        yield _SPECIAL_TEXT.sub("< ", normalized(pair[column]))

        marked = [f"{WORD_START}{tag}" for tag in tags] if 0 in columns else []
        most = min(count, SAMPLE_PAIRS)
        words = _counted_words(sentences, most) if settings.type == "bpe" else None
        lines, kind = (sentences(most), "text") if words is None else (words, "tsv")
        model = without_input_format(_train_model(settings, lines, marked, kind))
        learnt = SentencePieceVocabulary(model, "the new subword model").size
        if learnt < settings.size:
            notice(
                f"the training text supports only {learnt} subwords, fewer than data.subwords.size {settings.size}; "
                f"using {learnt}"
            )
        write_atomically(folder / name, model)


def _counted_words(sentences: Callable[[int], Iterator[str]], most: int) -> Iterator[str] | None:
    """Counts the words of a text, which are all that byte-pair encoding learns from.

    SentencePiece makes the same model of them as of the sentences, which it would hold in memory, and leaves out the
    same ones. ``sentences`` returns those of a number of pairs, at first ``most``, fewer if their words are long.

    Returns:
        Each word with a tab and its count; None for a text with tabs, which this form cannot hold.
    """
    counts = Counter[str]()
    for sentence in sentences(most):
        if "\t" in sentence:
            return None
        if _RESERVED not in sentence and len(sentence.encode()) <= _LONGEST_SENTENCE_BYTES:
            counts.update(sentence.split(" "))
    del counts[""]
    characters = sum(map(len, counts))
    if characters > MOST_CHARACTERS and most > 1:
        counts.clear()
        return _counted_words(sentences, int(most * (MOST_CHARACTERS / characters) ** 1.25) or 1)
    return (f"{word}\t{count}" for word, count in counts.items())


def sample_pairs(pairs: Iterator[tuple[str, str]], count: int, limit: int) -> Iterator[tuple[str, str]]:
    """Yields a deterministic uniform sample of ``limit`` of ``count`` pairs in their order.

    Uses selection sampling (Knuth, The Art of Computer Programming 2, algorithm 3.4.2 S), which needs no memory.
    """
    if count <= limit:
        yield from pairs
        return
    draw = random.Random(count)
    still_needed = limit
    for remaining, pair in zip(range(count, 0, -1), pairs, strict=False):
        if draw.random() * remaining < still_needed:
            yield pair
            still_needed -= 1


def _train_model(
    settings: SentencePieceSubwords | TextSubwords,
    lines: Iterator[str],
    symbols: Sequence[str],
    input_format: str,
) -> bytes:
    """Returns the model that SentencePiece learns from sentences ("text") or words with counts ("tsv")."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=lines,
            input_format=input_format,
            model_writer=model,
            model_type=settings.type,
            vocab_size=settings.size,
            character_coverage=settings.character_coverage,
            hard_vocab_limit=False,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            unk_surface=SPECIAL_TOKENS[UNK],
            user_defined_symbols=symbols,
            normalization_rule_name="identity",
            max_sentence_length=_LONGEST_SENTENCE_BYTES,
            num_threads=_TRAINING_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        text = str(error)
        needed = re.search(r"smaller than required_chars\. \d+ vs (\d+)", text)
        if needed:
            raise InputError(
                f"data.subwords.size {settings.size} is too small: the training text needs at least {needed[1]} "
                "(its characters and the special symbols); raise it or lower data.subwords.character_coverage"
            ) from error
        if "sentences_.empty()" in text:
            raise InputError("the training text has no line to learn subwords from") from error
        raise InputError(
            f"SentencePiece cannot learn subwords from the training text: {text.splitlines()[0]}"
        ) from error
    return model.getvalue()


def train_factor_vocabularies(rows: Iterator[Sequence[str]], streams: int, folder: Path) -> None:
    """Writes the vocabulary of each stream of source factors: all tokens in ``rows``, most frequent first."""
    counts = [Counter[str]() for _ in range(streams)]
    for row in rows:
        for counter, text in zip(counts, row, strict=True):
            counter.update(split_words(text))
    for number, counter in enumerate(counts, 1):
        _write_words(folder / FACTOR_FILE.format(number), _ranked(counter, SPECIAL_TOKENS, limits.WORDS))


def _write_words(path: Path, words: Iterable[str]) -> None:
    """Writes one word a line."""
    write_atomically(path, "".join(word + "\n" for word in words).encode())


def _ranked(counter: Counter[str], fixed: Sequence[str], limit: int, least: int = 1) -> list[str]:
    """Returns the ``fixed`` tokens, then the most frequent ones that occur ``least`` times, ``limit`` in total."""
    others = [word for word, count in counter.items() if count >= least and word not in fixed]
    ranked = sorted(others, key=lambda word: (-counter[word], word))
    return [*fixed, *ranked[: max(0, limit - len(fixed))]]


def vocabulary_files(folder: Path) -> list[Path]:
    """Returns the vocabulary files in ``folder``: one or two, then one per source-factor stream; empty if none."""
    for names in _VOCABULARY_FILES:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return [*paths, *_factor_files(folder)]
    return []


def target_vocabulary_file(folder: Path) -> Path:
    """Returns the vocabulary file of the target side, or of both sides, in a folder that has one."""
    names = next(names for names in _VOCABULARY_FILES if all((folder / name).is_file() for name in names))
    return folder / names[-1]


def _factor_files(folder: Path) -> list[Path]:
    numbered = (folder / FACTOR_FILE.format(number) for number in range(1, limits.FACTORS + 1))
    return list(takewhile(Path.is_file, numbered))


def load_vocabularies(folder: Path) -> Vocabularies:
    """Loads the vocabularies that :func:`train_vocabularies` wrote; raises InputError if one is damaged or missing."""
    files = vocabulary_files(folder)
    if not files:
        raise InputError(
            f"{folder}: no vocabulary (" + ", ".join(" and ".join(names) for names in _VOCABULARY_FILES) + ")"
        )
    factors = _factor_files(folder)
    loaded = [_load(path) for path in files]
    words = loaded[: len(files) - len(factors)]
    return Vocabularies(words[0], words[-1], tuple(loaded[len(words) :]))


def _load(path: Path) -> Vocabulary:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot read the vocabulary: {error.strerror}") from error
    if path.name.endswith(".model"):
        return SentencePieceVocabulary(content, str(path))
    if path.suffix == ".json":
        return _load_codes(content, path)
    try:
        words = content.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: the vocabulary is not valid UTF-8") from error
    if words[-1] != "" or tuple(words[:4]) != SPECIAL_TOKENS or len(set(words)) != len(words):
        raise InputError(
            f"{path}: damaged vocabulary; expected one word a line, {' '.join(SPECIAL_TOKENS)} first, without "
            "duplicates"
        )
    return WordVocabulary(words[:-1])


def _load_codes(content: bytes, path: Path) -> CodesVocabulary:
    try:
        read = json.loads(content)
        rules, pieces, tags = (_texts(read[key]) for key in ("rules", "pieces", "tags"))
        kept = None if read["kept"] is None else _texts(read["kept"])
        pairs = [(left, right) for left, right in (rule.split(" ") for rule in rules)]
        damaged = tuple(pieces[: len(SPECIAL_TOKENS)]) != SPECIAL_TOKENS or len(set(pieces)) != len(pieces)
        damaged = damaged or read["version"] not in (1, 2)
    except (ValueError, TypeError, KeyError, RecursionError):
        damaged = True
    if damaged:
        raise InputError(f"{path}: damaged vocabulary of codes; copy it again, or prepare the data again")
    return CodesVocabulary(MergeCodes(pairs, read["version"], kept), pieces, tags)


def _texts(value: object) -> list[str]:
    """Returns a list of texts; raises ValueError if it is something else."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError
    return value


def fingerprint(folder: Path) -> str:
    """Returns the SHA-256 of the names and contents of the vocabulary files in ``folder``."""
    files = vocabulary_files(folder)
    if not files:
        raise InputError(f"{folder}: no vocabulary files")
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
