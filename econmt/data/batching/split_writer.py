"""Writer of one split of prepared data: token ids, and the raw lines of validation and test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import compress, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from econmt.config import limits
from econmt.config.recipe import Data, TextData
from econmt.data.batching.token_store import TokenStoreWriter
from econmt.data.progress_bars import counted, counting, status_line
from econmt.data.text.annotation import AlignedTerms, GlossaryTerms, Terms, annotate, draw_terms
from econmt.data.text.corpus import Corpus, read_lines, read_pairs
from econmt.data.text.filters import KEPT, REASONS, Codes, LeftOut, no_pair_left
from econmt.data.text.glossary import read_glossary
from econmt.data.text.guides import GuideFile, check_words, parse_links, parse_weight, with_factors
from econmt.data.text.source_factors import count_of_ids, encode_sources, words_of_line
from econmt.data.text.vocabulary import EOS, UNK, Vocabularies, normalized, split_words
from econmt.errors import InputError

_BLOCK_PAIRS = 10_000


def _read(data: Data | TextData, corpus: Corpus, tag: str = "") -> Iterator[tuple[str, ...]]:
    """Yields the pairs of a corpus followed by their source factors; adds the tag to sources that are not blank.

    Lines of a language model have an empty source.
    """
    if isinstance(data, TextData):
        return (("", line) for line in read_lines(corpus.source))
    pairs = read_pairs(corpus)
    if corpus.factors:
        return with_factors(pairs, corpus)
    if not tag:
        return pairs
    return ((f"{tag} {source}" if source.strip() else source, target) for source, target in pairs)


class TrainingSplit(NamedTuple):
    """Training corpus, its tag, its filter codes (None: no filters) and its finder of terms (None: no annotation)."""

    corpus: Corpus
    tag: str = ""
    codes: Codes | None = None
    terms: Terms | None = None

    def kept(self, data: Data | TextData) -> Iterator[tuple[str, ...]]:
        """Yields the pairs that filters keep, with their source factors; vocabularies are learnt from them."""
        pairs = _read(data, self.corpus, self.tag)
        return pairs if self.codes is None else compress(pairs, self.codes == KEPT)


def terms_of(data: Data | TextData, train: Sequence[TrainingSplit], glossary: Path | None) -> Terms | None:
    """Returns the finder of terms to annotate in training pairs, by a glossary's file or alignment; None: no terms."""
    if isinstance(data, TextData) or data.annotate_terms.share == 0.0:
        return None
    if glossary is not None:
        return GlossaryTerms(read_glossary(glossary), data.source)
    with status_line() as say:
        say("aligning the words of the training text")
        languages = data.source, data.target
        return AlignedTerms(
            lambda: ((row[0], row[1]) for each in train for row in each.kept(data)), languages
        )


class _Guides(NamedTuple):
    """Guides of the pairs of one text file, read along with them; ``tag_words`` stand before each source."""

    alignment: GuideFile | None
    weight: GuideFile | None
    tag_words: int

    @classmethod
    def of(cls, corpus: Corpus, tag: str) -> _Guides:
        """Opens the files of a corpus."""
        paths = corpus.alignment, corpus.weights
        files = [None if path is None else GuideFile(path, corpus.source) for path in paths]
        return cls(files[0], files[1], 1 if tag else 0)

    @property
    def files(self) -> list[GuideFile]:
        """Files that the corpus has."""
        return [file for file in (self.alignment, self.weight) if file is not None]

    def take(self, count: int) -> list[tuple[str, str]]:
        """Returns the lines of alignment and weight of the next pairs; empty if there is no such file."""
        columns = [
            [""] * count if file is None else file.take(count) for file in (self.alignment, self.weight)
        ]
        return list(zip(*columns, strict=True))

    def weights(self, rows: Sequence[tuple[str, str]], lines: Sequence[int]) -> list[int] | None:
        """Parses the weights of pairs; None without a file."""
        if self.weight is None:
            return None
        path = self.weight.path
        return [parse_weight(row[1], f"{path}:{line}") for row, line in zip(rows, lines, strict=True)]


class SplitWriter:
    """Encoder and writer of one split; training pairs are filtered, validation and test keep all pairs and raw lines.

    A language model's text keeps all lines, and the end of each line is a token.
    """

    COUNTS = (
        "lines",
        *REASONS,
        "source_tokens",
        "target_tokens",
        "source_unknown",
        "target_unknown",
        "words",
        "annotated",
    )

    def __init__(self, data: Data | TextData, vocabularies: Vocabularies, folder: Path, split: str) -> None:
        self._data, self._vocabularies, self._split = data, vocabularies, split
        self._folder, self._dropped = folder, LeftOut()
        size = max(count_of_ids(vocabularies), vocabularies.target.size)
        self._opened = contextlib.ExitStack()
        weighted = split == "train" and isinstance(data, Data) and data.weights is not None
        self._store = self._opened.enter_context(
            contextlib.closing(TokenStoreWriter(folder, split, size, weighted=weighted))
        )
        self._links: TokenStoreWriter | None = None
        factors = [f"factor{number}" for number in range(1, len(vocabularies.factors) + 1)]
        sides = [] if split == "train" else ["source", "target", *factors]
        self._raw: list[IO[bytes]] = [
            self._opened.enter_context((folder / f"{split}.{side}.txt").open("wb")) for side in sides
        ]
        self._files: list[str] = []
        self._counts = dict.fromkeys(self.COUNTS, 0)

    def close(self) -> None:
        """Closes the files, also if they are incomplete."""
        self._opened.close()

    def write(self, training: TrainingSplit, progress: bool) -> None:
        """Appends all pairs of a corpus."""
        self._store.begin_corpus()
        if training.corpus.alignment is not None and self._links is None:
            links = TokenStoreWriter(self._folder, f"{self._split}_links", limits.POSITIONS)
            self._links = self._opened.enter_context(contextlib.closing(links))
        pairs_done = 0
        for part in training.corpus.parts:
            self._store.begin_file(part.source, part.target)
            guides = _Guides.of(part, training.tag)
            if self._links is not None and part.alignment is not None:
                self._links.begin_file(part.alignment, None)
            self._files.append(str(part.source))
            first_line = 1
            with counting(f"writing {self._split}", None, "pairs", show=progress) as more:
                pairs = counted(_read(self._data, part, training.tag), more)
                while block := list(islice(pairs, _BLOCK_PAIRS)):
                    codes = [KEPT] * len(block)
                    if training.codes is not None:
                        codes = training.codes[pairs_done : pairs_done + len(block)].tolist()
                    self._write_block(training._replace(corpus=part), block, first_line, codes, guides)
                    first_line += len(block)
                    pairs_done += len(block)
            for file in guides.files:
                file.finish()

    def _write_block(
        self,
        training: TrainingSplit,
        block: Sequence[tuple[str, ...]],
        first_line: int,
        codes: Sequence[int],
        guides: _Guides,
    ) -> None:
        corpus = training.corpus

        def name_of(number: int, stream: int | None) -> str:
            return f"{corpus.source if stream is None else corpus.factors[stream]}:{first_line + number}"

        sources = encode_sources(
            self._vocabularies, [row[0] for row in block], [row[2:] for row in block], name_of
        )
        if training.terms is not None:
            self._annotate(training.terms, training.tag, block, sources)
        targets = self._vocabularies.target.encode_many([row[1] for row in block])
        lines = list(range(first_line, first_line + len(block)))
        if isinstance(self._data, TextData):
            targets = [[*ids, EOS] for ids in targets]
            self._counts["words"] += sum(len(split_words(row[1])) + 1 for row in block)
        self._counts["lines"] += len(block)
        rows = guides.take(len(block))
        for column, stream in enumerate(self._raw):
            stream.write("".join(row[column] + "\n" for row in block).encode())
        if self._split == "train" and isinstance(self._data, Data):
            kept_flags = []
            for source, target, line, code, row in zip(sources, targets, lines, codes, block, strict=True):
                reason = None if code == KEPT else REASONS[code - 1]
                reason = reason or self._reason(self._data, corpus, source, target, line)
                kept_flags.append(reason is None)
                if reason is not None:
                    self._dropped.add(reason, f"{corpus.source}:{line}", (row[0], row[1]))
            sources, targets = list(compress(sources, kept_flags)), list(compress(targets, kept_flags))
            lines, block = list(compress(lines, kept_flags)), list(compress(block, kept_flags))
            rows = list(compress(rows, kept_flags))
        if self._links is not None:
            self._write_links(guides, list(zip(block, sources, targets, lines, rows, strict=True)))
        for side, sentences in (("source", sources), ("target", targets)):
            self._counts[f"{side}_tokens"] += sum(map(len, sentences))
            if side == "source" and self._vocabularies.factors:
                sentences = [[i % self._vocabularies.source.size for i in ids] for ids in sentences]
            self._counts[f"{side}_unknown"] += sum(ids.count(UNK) for ids in sentences)
        self._store.add(sources, targets, lines, guides.weights(rows, lines))

    def _write_links(self, guides: _Guides, pairs: Sequence[tuple[Any, ...]]) -> None:
        """Adds the links of pairs: texts, source ids, target ids, line and guides of each."""
        assert self._links is not None
        assert guides.alignment is not None
        both, size = self._vocabularies.sides, self._vocabularies.source.size
        numbers, links = [], []
        for texts, source, target, line, (alignment, _) in pairs:
            where = f"{guides.alignment.path}:{line}"
            words = [len(words_of_line(text, side)) for text, side in zip(texts, both, strict=False)]
            for ids, vocabulary, count in zip(([i % size for i in source], target), both, words, strict=True):
                check_words(ids, vocabulary, count, where)
            first = guides.tag_words if texts[0].strip() else 0
            parsed = parse_links(alignment, where, words[0] - first, words[1])
            links.append(([word + first for word, _ in parsed], [word for _, word in parsed]))
            numbers.append(line)
        self._links.add([link[0] for link in links], [link[1] for link in links], numbers)

    def _annotate(
        self, terms: Terms, tag: str, block: Sequence[tuple[str, ...]], sources: list[list[int]]
    ) -> None:
        """Replaces the ids of sources, of pairs drawn at random, by those with annotated terms, if not too long."""
        assert isinstance(self._data, Data)
        texts: dict[int, str] = {}
        for number, row in enumerate(block):
            pair = normalized(row[0]), normalized(row[1])
            first = self._counts["lines"] + number
            found = draw_terms(terms, self._data.annotate_terms.share, first, pair, tag)
            if found:
                texts[number] = annotate(pair[0], found).text
        for number, ids in zip(texts, self._vocabularies.source.encode_many([*texts.values()]), strict=True):
            if len(ids) <= self._data.max_length:
                sources[number] = ids
                self._counts["annotated"] += 1

    def _reason(
        self, data: Data, corpus: Corpus, source: Sequence[int], target: Sequence[int], line: int
    ) -> str | None:
        """Returns why a pair that passed the filters is left out; None if it is kept."""
        if not source or not target:
            if data.empty_lines == "error":
                side = "target" if source else "source"
                path = corpus.target or corpus.source if source else corpus.source
                raise InputError(
                    f"{path}:{line}: the {side} side of this training pair is empty; correct the text, or leave out "
                    "such pairs with data.empty_lines: skip"
                )
            return "empty"
        return "too_long" if max(len(source), len(target)) > data.max_length else None

    def finish(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Syncs the files; returns the descriptions of the stores by name, and the split's statistics."""
        for stream in self._raw:
            stream.flush()
            os.fsync(stream.fileno())
        description = self._store.finish()
        descriptions = {self._split: description}
        if self._links is not None:
            descriptions[f"{self._split}_links"] = self._links.finish()
        counts = self._counts
        if self._split == "train" and isinstance(self._data, Data):
            counts |= self._dropped.counts
            # An empty text of a language model is an error earlier, when it is read.
            if not description["pairs"]:
                raise no_pair_left(self._files, counts, self._data)
            self._dropped.write(self._folder, self._data, counts["lines"])
        return descriptions, {"pairs": description["pairs"], **counts}
