"""The data section of a recipe; :mod:`econmt.config.recipe` has the whole recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from econmt.config import limits
from econmt.config.model import Probability, Section

Positions = Annotated[int, Field(ge=1, le=limits.POSITIONS)]
VocabularySize = Annotated[int, Field(ge=5, le=limits.WORDS)]


def _check_language(name: str) -> str:
    if re.search(r"[/\\]", name):
        raise ValueError(f"a language is the suffix of a file's name, so it holds no slash; found {name!r}")
    return name


def _check_prefix(name: str) -> str:
    if Path(name).name in ("", "..") or name.endswith("/"):
        raise ValueError(
            f"expected the beginning of a file's name, as corpus/train for corpus/train.en; found {name!r}"
        )
    if name.startswith("~"):
        try:
            Path(name).expanduser()
        except RuntimeError:
            raise ValueError(
                f"there is no home folder {Path(name).parts[0]}; write the whole path, found {name!r}"
            ) from None
    return name


Language = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_check_language)]
TextPrefix = Annotated[str, AfterValidator(_check_prefix)]


class SentencePieceSubwords(Section):
    """Subwords learnt by SentencePiece from the raw training text."""

    type: Literal["bpe", "unigram"] = Field("bpe", description="segmentation model")
    size: int = Field(
        8000,
        ge=16,
        le=limits.SUBWORDS,
        description="number of subwords, special symbols included (of each side if separate)",
    )
    joint: bool = Field(True, description="one model for both languages; false: one a language")
    dropout: Probability = Field(
        0.0, description="BPE-dropout: probability that a merge is skipped, drawn anew every epoch (bpe only)"
    )
    character_coverage: float = Field(
        1.0,
        ge=0.98,
        le=1.0,
        description="share of characters that subwords cover (0.9995: Chinese, Japanese)",
    )

    @model_validator(mode="after")
    def _dropout_needs_bpe(self) -> SentencePieceSubwords:
        if self.dropout > 0.0 and self.type != "bpe":
            raise ValueError("dropout is BPE-dropout and needs type: bpe")
        return self


class WordSubwords(Section):
    """No subwords: words between spaces, for text that is tokenised already."""

    type: Literal["words"] = Field(description="whole words of pre-tokenised text")
    source: VocabularySize = Field(
        50000, description="most frequent source words kept; the others become <unk>"
    )
    target: VocabularySize = Field(
        50000, description="most frequent target words kept; the others become <unk>"
    )


def subword_type(value: Any) -> str:
    """The type that a section of subwords names."""
    return str(value.get("type", "bpe") if isinstance(value, dict) else getattr(value, "type", "bpe"))


Subwords = Annotated[
    Union[
        Annotated[SentencePieceSubwords, Tag("bpe")],
        Annotated[SentencePieceSubwords, Tag("unigram")],
        Annotated[WordSubwords, Tag("words")],
    ],
    Discriminator(subword_type),
]


class Filters(Section):
    """Which pairs of the training text are left out, beside those longer than ``data.max_length``."""

    min_words: int = Field(
        0, ge=0, le=limits.POSITIONS, description="pairs with fewer words between spaces than this on a side"
    )
    max_words: Positions | None = Field(
        None, description="pairs with more words between spaces than this on a side; null: none"
    )
    max_length_ratio: float | None = Field(
        None,
        ge=1.0,
        le=limits.OUTPUT_FACTOR,
        description="pairs with a side that has more than this times the other's characters; null: none",
    )
    duplicates: Literal["keep", "pairs", "source", "target"] = Field(
        "keep",
        description="what must not come twice in all of the training text, the first of its kind is kept: pairs, or "
        "lines of a side",
    )
    identical: Literal["keep", "drop"] = Field("keep", description="pairs whose sides are the same text")
    language_certainty: float | None = Field(
        None,
        gt=0.0,
        le=1.0,
        description="pairs with a side that py3langid, with at least this probability, finds to be in another "
        "language than data.source or data.target says (needs the package py3langid); null: none",
    )

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left out."""
        return self == Filters()


class Noise(Section):
    """What becomes of training pairs, drawn anew every epoch, so that a model learns to live with it.

    Nothing of it is kept in the token store; the draws follow from seed, epoch and place alone.
    """

    upper: Probability = Field(0.0, description="probability of a pair whose sides are both put in capitals")
    title: Probability = Field(
        0.0, description="probability of a pair whose words all begin with a capital, on both sides"
    )
    typos: Probability = Field(
        0.0,
        description="probability of a source with typing errors, one in ten words, at least one: letters swapped, "
        "doubled, left out or replaced",
    )
    emoji: Probability = Field(
        0.0,
        description="probability of a pair with the same emoji at the end, or the beginning, of both sides",
    )
    markup: Probability = Field(
        0.0, description="probability of a pair whose sides stand in the same tags, as <b>...</b>"
    )

    @model_validator(mode="after")
    def _one_case(self) -> Noise:
        if self.upper + self.title > 1.0:
            raise ValueError(
                f"upper {self.upper:g} and title {self.title:g} exclude each other: their sum must not exceed 1"
            )
        return self

    @property
    def is_idle(self) -> bool:
        """Whether nothing changes."""
        return self == Noise()


Weight = Annotated[float, Field(ge=0.0, le=limits.MIXED)]


class Mixing(Section):
    """How the prefixes of ``data.train`` are mixed, in stages one after the other.

    An epoch has ``epoch_pairs`` pairs, of each prefix its share; each goes through its own pairs in an order of its
    own, all of them once before any comes again.
    """

    weights: list[Annotated[list[Weight], Field(min_length=1)]] = Field(
        [],
        max_length=limits.STAGES,
        description="by stage a list with the weight of each prefix of data.train; empty: all pairs once an epoch",
    )
    epochs: list[Annotated[int, Field(ge=1, le=limits.UPDATES)]] = Field(
        [], description="epochs of each stage but the last, which goes on to the end"
    )
    epoch_pairs: int | None = Field(
        None, ge=1, le=2**31 - 1, description="pairs of an epoch; null: as many as the training text has"
    )

    @model_validator(mode="after")
    def _stages_fit(self) -> Mixing:
        if len(self.epochs) != max(0, len(self.weights) - 1):
            raise ValueError(
                f"{len(self.weights)} stages of weights and {len(self.epochs)} of epochs: give epochs for each stage "
                "but the last"
            )
        if self.epoch_pairs is not None and not self.weights:
            raise ValueError("epoch_pairs is of a mixture: give weights, or leave it out")
        for number, stage in enumerate(self.weights, 1):
            if not any(stage):
                raise ValueError(f"all weights of stage {number} are 0; give one that is not")
        return self


def _check_tag(tag: str) -> str:
    if tag and (not re.fullmatch(r"<[A-Za-z0-9_-]+>", tag) or tag in ("<pad>", "<unk>", "<s>")):
        raise ValueError(f"expected a tag of letters and digits, as <BT>, or '' for none; found {tag!r}")
    return tag


class Data(Section):
    """Where the text is and how it becomes token ids."""

    source: Language = Field(description="source language: the suffix of its files")
    target: Language = Field(description="target language: the suffix of its files")
    train: list[TextPrefix] = Field(
        min_length=1,
        description="prefixes of the training text: PREFIX.<source> and PREFIX.<target>, each also .gz, or one "
        "tab-separated file PREFIX.tsv(.gz) with source and target, PREFIX.tmx(.gz), PREFIX.parquet or its shards "
        "PREFIX-*.parquet; looked up beside the recipe, in --data-dir / "
        "ECONMT_DATA, in the cache, then in the catalog of known data sets",
    )
    source_factors: list[Language] = Field(
        [],
        max_length=limits.FACTORS,
        description="suffixes of files with source factors, as [pos, case]: PREFIX.pos, also .gz, has one token for "
        "each word (what stands between spaces) of the source, line by line, for data.train, data.valid and data.test "
        "alike; each subword has the factors of its word",
    )
    tags: list[Annotated[str, AfterValidator(_check_tag)]] = Field(
        [],
        description="a tag for each prefix of data.train, put before its sources as a token of its own, as ['', <BT>] "
        "for text that was translated back; '' is none; empty: no tags",
    )
    mixing: Mixing = Field(Mixing(), description="how the prefixes of data.train are mixed")
    noise: Noise = Field(Noise(), description="what becomes of training pairs, drawn anew every epoch")
    filters: Filters = Field(Filters(), description="which training pairs are left out")
    valid: TextPrefix = Field(description="prefix of the validation text")
    test: TextPrefix | None = Field(
        None, description="prefix of a test text, translated and scored when training ends"
    )
    subwords: Subwords = Field(SentencePieceSubwords(), description="how text is cut into tokens")
    max_length: Positions = Field(
        100, description="training pairs with more tokens than this on a side are left out"
    )
    empty_lines: Literal["error", "skip"] = Field(
        "error",
        description="a training pair with an empty side: stop with its line number, or leave the pair out",
    )
    prepared: str | None = Field(
        None, description="folder of the prepared token store; null: prepared/ in the model folder"
    )

    @model_validator(mode="after")
    def _factors_are_their_own(self) -> Data:
        for number, name in enumerate(self.source_factors):
            if name in (self.source, self.target, *self.source_factors[:number]):
                raise ValueError(
                    f"source_factors: {name!r} is the suffix of other files too; give each its own"
                )
        return self

    @model_validator(mode="after")
    def _each_prefix_has_one(self) -> Data:
        count = len(self.train)
        if self.tags and len(self.tags) != count:
            raise ValueError(f"tags has {len(self.tags)} entries and train {count}: give one for each prefix")
        for number, stage in enumerate(self.mixing.weights, 1):
            if len(stage) != count:
                raise ValueError(
                    f"mixing.weights has {len(stage)} weights in stage {number} and train {count} prefixes: give one "
                    "for each"
                )
        return self

    def tag(self, number: int) -> str:
        """What stands before the sources of a prefix of ``train``, by its number; empty: nothing."""
        return self.tags[number] if self.tags else ""


def check_mixing(recipe: Any) -> None:
    """Makes sure that the batches of a mixture can be planned.

    Raises:
        ValueError: it is to be put into fixed buckets.
    """
    data = recipe.data
    if isinstance(data, Data) and recipe.training.bucket_width is not None:
        for name, section in (("mixing", data.mixing.weights), ("noise", not data.noise.is_idle)):
            if section:
                raise ValueError(
                    f"data.{name} changes the lengths of each epoch's pairs and needs buckets that are derived from "
                    "the text: leave training.bucket_width out"
                )
