"""Data section of a translation recipe: corpora, subwords, filters, mixing and noise."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from econmt.config import limits
from econmt.config.section import NO_MEMORY, NO_PARAMETERS, NO_PREPARED_TEXT, Probability, Section

Positions = Annotated[int, Field(ge=1, le=limits.POSITIONS)]
VocabularySize = Annotated[int, Field(ge=5, le=limits.WORDS)]


def _check_language(name: str) -> str:
    if re.search(r"[/\\]", name):
        raise ValueError(
            f"a language is the suffix of a file name and cannot contain a slash; found {name!r}"
        )
    return name


def _check_prefix(name: str) -> str:
    if Path(name).name in ("", "..") or name.endswith("/"):
        raise ValueError(
            f"expected a path without the language suffix, as corpus/train for corpus/train.en; found {name!r}"
        )
    if name.startswith("~"):
        try:
            Path(name).expanduser()
        except RuntimeError:
            raise ValueError(
                f"home folder {Path(name).parts[0]} does not exist; write the full path, found {name!r}"
            ) from None
    return name


Language = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_check_language)]
TextPrefix = Annotated[str, AfterValidator(_check_prefix)]


MinimumCount = Annotated[int, Field(ge=1, le=limits.TOKENS)]
FileName = Annotated[str, Field(min_length=1)]
_COVERED = "share of the characters in the text that subwords cover; 0.9995 suits Chinese and Japanese"
Coverage = Annotated[float, Field(ge=0.98, le=1.0, description=_COVERED)]
_PREPARED = "folder of the prepared data (token ids and vocabularies); null: prepared/ in the model folder"
PreparedFolder = Annotated[
    str | None, NO_PARAMETERS, NO_MEMORY, NO_PREPARED_TEXT, Field(description=_PREPARED)
]


class _SubwordFiles(Section):
    """Subwords of which files may be given: one for both languages, or, if ``joint`` is false, one for each."""

    @model_validator(mode="after")
    def _files_fit_languages(self) -> _SubwordFiles:
        values = dict(self)
        joint = values["joint"]
        for key in ("models", "lists", *(["files"] if joint else []), "vocabularies"):  # codes may serve both
            files = values.get(key)
            if files and len(files) != (1 if joint else 2):
                raise ValueError(
                    f"{key} has {len(files)} files and joint is {str(joint).lower()}; give one file with joint: true, "
                    "or those of source and target with joint: false"
                )
        return self


class SentencePieceSubwords(_SubwordFiles):
    """Subwords of SentencePiece, learnt from the raw training text or of a model that exists."""

    type: Literal["bpe", "unigram"] = Field("bpe", description="segmentation model")
    size: int = Field(
        8000,
        ge=16,
        le=limits.SUBWORDS,
        description="number of subwords, special tokens included; per language if joint is false",
    )
    joint: bool = Field(
        True, description="true: one subword model for both languages; false: one per language"
    )
    models: list[FileName] = Field(
        [],
        max_length=2,
        description="SentencePiece models to use, of any program: one for both languages, or, if joint is false, "
        "[source, target]; searched where the text is. Its special tokens are replaced by econmt's; empty: learn them",
    )
    dropout: Annotated[Probability, NO_PREPARED_TEXT] = Field(
        0.0, description="BPE-dropout: probability of skipping a merge, drawn again in every epoch (bpe only)"
    )
    character_coverage: Coverage = 1.0


class WordSubwords(_SubwordFiles):
    """Section ``subwords`` of text that is already tokenised: its vocabulary is made of whole words."""

    type: Literal["words"] = Field(description="words: whole words of tokenised text")
    source: VocabularySize = Field(
        50000,
        description="size of the source vocabulary, special tokens included; rarer words become <unk>; if joint is "
        "true, that of the only one",
    )
    target: VocabularySize = Field(
        50000, description="size of the target vocabulary, special tokens included; rarer words become <unk>"
    )
    joint: bool = Field(False, description="true: one vocabulary for both languages; false: one per language")
    min_count: MinimumCount = Field(
        1, description="words that occur less often in the training text become <unk>, on both sides"
    )
    lists: list[FileName] = Field(
        [],
        max_length=2,
        description="[source, target], or one if joint is true: lists of words to use, one a line, with or without a "
        "count, or Sockeye's JSON; searched where the text is; empty: learn them",
    )


class CodesSubwords(_SubwordFiles):
    """Section ``subwords`` of tokenised text whose words are divided by codes of subword-nmt that exist."""

    type: Literal["codes"] = Field(description="codes: subwords by codes of subword-nmt")
    files: list[FileName] = Field(
        min_length=1,
        max_length=2,
        description="files of subword-nmt learn-bpe: one for both languages or [source, target]; searched where the "
        "text is",
    )
    joint: bool = Field(True, description="true: one vocabulary for both languages; false: one per language")
    size: VocabularySize = Field(
        50000,
        description="largest size of the vocabulary, special tokens included; per language if joint is false; rarer "
        "subwords become <unk>",
    )
    min_count: MinimumCount = Field(
        1, description="subwords that occur less often in the training text become <unk>"
    )
    vocabularies: list[FileName] = Field(
        [],
        max_length=2,
        description="files of subword-nmt get-vocab: one or, if joint is false, [source, target]; subwords that they "
        "lack are divided again",
    )
    threshold: MinimumCount = Field(
        1, description="count in the files of vocabularies below which subwords are divided again"
    )


def subword_type(value: Any) -> str:
    """Returns the type of a subwords section, which selects its schema."""
    return str(value.get("type", "bpe") if isinstance(value, dict) else getattr(value, "type", "bpe"))


Subwords = Annotated[
    Union[
        Annotated[SentencePieceSubwords, Tag("bpe")],
        Annotated[SentencePieceSubwords, Tag("unigram")],
        Annotated[WordSubwords, Tag("words")],
        Annotated[CodesSubwords, Tag("codes")],
    ],
    Discriminator(subword_type),
]


class Filters(Section):
    """Filters that leave out training pairs, besides ``data.max_length``."""

    min_words: int = Field(
        0,
        ge=0,
        le=limits.POSITIONS,
        description="leave out pairs with fewer space-separated words than this on a side",
    )
    max_words: Positions | None = Field(
        None,
        description="leave out pairs with more space-separated words than this on a side; null: no limit",
    )
    max_length_ratio: float | None = Field(
        None,
        ge=1.0,
        le=limits.OUTPUT_FACTOR,
        description="leave out pairs with one side over this times as long, in characters; null: no limit",
    )
    max_repeats: int | None = Field(
        None,
        ge=1,
        le=limits.POSITIONS,
        description="leave out pairs with a side that has the same one to eight words more often than this in a row, "
        "as in translations that got stuck; null: no limit",
    )
    duplicates: Literal["keep", "pairs", "source", "target"] = Field(
        "keep",
        description="keep: no filter; else leave out all but the first of equal pairs, sources or targets",
    )
    identical: Literal["keep", "drop"] = Field(
        "keep", description="drop leaves out pairs whose two sides are the same text"
    )
    language_certainty: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="leave out pairs with a side that py3langid assigns, with at least this probability, to a language "
        "other than data.source or data.target (needs the package py3langid); null: off",
    )


class Noise(Section):
    """Random changes of training pairs, drawn again in every epoch, that make a model robust to them.

    The token store is unchanged; the changes depend on the seed, the epoch and the position of a pair only. A pair that
    would become too long for ``data.max_length`` or the buckets of the text stays as it is.
    """

    upper: Probability = Field(
        0.0,
        description="probability that both sides of a pair are put in capitals; pairs that would become too long stay "
        "as they are, so that fewer long pairs are changed",
    )
    title: Probability = Field(
        0.0, description="probability that all words of both sides of a pair are capitalised"
    )
    typos: Probability = Field(
        0.0,
        description="probability that a source gets typing errors in one of ten words, at least one: letters swapped, "
        "doubled, left out or replaced",
    )
    emoji: Probability = Field(
        0.0,
        description="probability that both sides of a pair get the same emoji at the end or at the beginning",
    )
    markup: Probability = Field(
        0.0, description="probability that both sides of a pair are enclosed in the same tags, as <b>...</b>"
    )

    @model_validator(mode="after")
    def _one_case(self) -> Noise:
        if self.upper + self.title > 1.0:
            raise ValueError(
                f"upper {self.upper:g} and title {self.title:g} exclude each other; their sum must be at most 1"
            )
        return self


Weight = Annotated[float, Field(ge=0.0, le=limits.MIXED)]


class Mixing(Section):
    """Mixing of the prefixes of ``data.train`` by weight, in consecutive stages.

    An epoch has ``epoch_pairs`` pairs, divided among the prefixes by weight. Each prefix goes through its own pairs in
    random order; none is repeated before all have been used.
    """

    weights: list[Annotated[list[Weight], Field(min_length=1)]] = Field(
        [],
        max_length=limits.STAGES,
        description="for each stage, the weights of the prefixes of data.train; empty: do not mix",
    )
    epochs: list[Annotated[int, Field(ge=1, le=limits.UPDATES)]] = Field(
        [], description="number of epochs of each stage except the last, which lasts until the end"
    )
    epoch_pairs: int | None = Field(
        None,
        ge=1,
        le=2**31 - 1,
        description="number of pairs in an epoch; null: as many as the training text has",
    )

    @model_validator(mode="after")
    def _stages_fit(self) -> Mixing:
        if len(self.epochs) != max(0, len(self.weights) - 1):
            raise ValueError(
                f"weights has {len(self.weights)} stages and epochs has {len(self.epochs)}: give epochs for each stage "
                "except the last"
            )
        for number, stage in enumerate(self.weights, 1):
            if not any(stage):
                raise ValueError(f"all weights of stage {number} are 0; at least one must be positive")
        return self


class TermAnnotation(Section):
    """Terms written into training sources with their translations, so that a model learns to follow glossaries."""

    share: Probability = Field(
        0.0,
        description="probability that terms of a training source are replaced by the target's words for them, as in "
        "<term> Auto </term>, so that the model learns to follow glossaries; 0: off",
    )
    glossary: str | None = Field(
        None,
        description="file of terms to annotate, in the format of --glossary, where both sides have them; null: words "
        "that word alignment of the training text pairs",
    )


def _check_tag(tag: str) -> str:
    if tag and (not re.fullmatch(r"<[A-Za-z0-9_-]+>", tag) or tag in ("<pad>", "<unk>", "<s>", "<term>")):
        raise ValueError(f"expected a tag of letters and digits, as <BT>, or '' for no tag; found {tag!r}")
    return tag


class Data(Section):
    """Text of a translation run and its conversion to token ids."""

    source: Language = Field(description="source language, the suffix of its files")
    target: Language = Field(description="target language, the suffix of its files")
    train: list[TextPrefix] = Field(
        min_length=1,
        description="prefixes of the training text: PREFIX.<source> and PREFIX.<target>, plain or .gz, or one "
        "tab-separated file PREFIX.tsv(.gz) with source and target, or PREFIX.tmx(.gz), PREFIX.parquet or its shards "
        "PREFIX-*.parquet; searched beside the recipe, in --data-dir, in ECONMT_DATA, in the cache, then in the "
        "catalog of known data sets",
    )
    source_factors: list[Language] = Field(
        [],
        max_length=limits.FACTORS,
        description="suffixes of files with source factors, as [pos, case]: each line of PREFIX.pos (or .gz) has one "
        "token for each space-separated word of the source line; needed for data.train, data.valid and data.test. A "
        "subword gets the factors of its word",
    )
    alignment: Language | None = Field(
        None,
        description="suffix of files with word alignments for training.guided_alignment_weight: line n of PREFIX.align "
        "(or .gz) has the pairs of words of line n, source-target from 0, as 0-0 1-2 (Pharaoh format of fast_align, "
        "eflomal and others); needed for data.train; with one of data.valid, metrics.tsv has valid_alignment_loss",
    )
    weights: Language | None = Field(
        None,
        description="suffix of files with a weight for each training pair: line n of PREFIX.weights (or .gz) is the "
        "factor of the losses of pair n, from 0 to 4000. The divisor of an update stays its number of target tokens, "
        "so weights of mean 1 keep the learning rate",
    )
    tags: list[Annotated[str, AfterValidator(_check_tag)]] = Field(
        [],
        description="a tag for each prefix of data.train, put before its sources as a separate token, as ['', <BT>] "
        "for back-translated text; '': no tag for this prefix; empty list: no tags",
    )
    annotate_terms: TermAnnotation = Field(
        TermAnnotation(), description="terms with their translations in training sources"
    )
    mixing: Annotated[Mixing, NO_PREPARED_TEXT] = Field(
        Mixing(), description="mixing of the prefixes of data.train by weight"
    )
    noise: Annotated[Noise, NO_PREPARED_TEXT] = Field(Noise(), description="random changes of training pairs")
    filters: Filters = Field(Filters(), description="filters that leave out training pairs")
    valid: TextPrefix = Field(description="prefix of the validation text")
    test: Annotated[TextPrefix | None, NO_PARAMETERS] = Field(
        None, description="prefix of the test text, translated and scored when training ends; null: none"
    )
    subwords: Subwords = Field(SentencePieceSubwords(), description="division of text into tokens")
    max_length: Positions = Field(
        100, description="leave out training pairs with more tokens than this on a side"
    )
    empty_lines: Literal["error", "skip"] = Field(
        "error",
        description="training pairs with an empty side: error stops and names the line, skip leaves them out",
    )
    prepared: PreparedFolder = None

    @model_validator(mode="after")
    def _factors_are_their_own(self) -> Data:
        taken = [self.source, self.target]
        others = [("alignment", self.alignment), ("weights", self.weights)]
        for key, name in [*(("source_factors", name) for name in self.source_factors), *others]:
            if name in taken:
                raise ValueError(
                    f"{key}: {name!r} is also the suffix of other files; each needs its own suffix"
                )
            taken += [] if name is None else [name]
        return self

    @model_validator(mode="after")
    def _each_prefix_has_one(self) -> Data:
        count = len(self.train)
        if self.tags and len(self.tags) != count:
            raise ValueError(
                f"tags has {len(self.tags)} entries but train has {count}: give one tag for each prefix"
            )
        for number, stage in enumerate(self.mixing.weights, 1):
            if len(stage) != count:
                raise ValueError(
                    f"mixing.weights has {len(stage)} weights in stage {number} but train has {count} prefixes: give "
                    "one weight for each"
                )
        return self

    def tag(self, number: int) -> str:
        """Returns the tag of a prefix of ``train``, given by its index; empty if it has none."""
        return self.tags[number] if self.tags else ""
