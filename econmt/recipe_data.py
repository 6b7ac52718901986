"""The data section of a recipe; :mod:`econmt.recipe` has the whole recipe."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from econmt import limits
from econmt.recipe_model import Probability, Section

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
        1.0, gt=0.9, le=1.0, description="share of characters that subwords cover (0.9995: Chinese, Japanese)"
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


class Data(Section):
    """Where the text is and how it becomes token ids."""

    source: Language = Field(description="source language: the suffix of its files")
    target: Language = Field(description="target language: the suffix of its files")
    train: list[TextPrefix] = Field(
        min_length=1,
        description="prefixes of the training text: PREFIX.<source> and PREFIX.<target>, each also .gz, or one "
        "tab-separated file PREFIX.tsv(.gz) with source and target; looked up beside the recipe, in --data-dir / "
        "ECONMT_DATA, in the cache, then in the catalog of known data sets",
    )
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
