"""Data and model sections of a language-model recipe, and the functions that tell them from those of translation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag, model_validator

from econmt.config import limits
from econmt.config.data import (
    Coverage,
    FileName,
    Language,
    MinimumCount,
    PreparedFolder,
    TextPrefix,
    VocabularySize,
    subword_type,
)
from econmt.config.model import Initialization
from econmt.config.section import (
    NO_PARAMETERS,
    Layers,
    Probability,
    Section,
    Width,
    number_or_section,
    width_or_widths,
)
from econmt.config.stacks import CELL_DESCRIPTION, CellName


class TextWords(Section):
    """Section ``subwords`` of text that is already tokenised: its vocabulary is made of whole words."""

    type: Literal["words"] = Field(description="words: whole words of tokenised text")
    size: VocabularySize = Field(
        50000, description="size of the vocabulary, special tokens included; rarer words become <unk>"
    )
    min_count: MinimumCount = Field(
        1, description="words that occur less often in the training text become <unk>"
    )
    lists: list[FileName] = Field(
        [], max_length=1, description="a list of words to use, as for translation; empty: learn it"
    )


class TextSubwords(Section):
    """Subwords learnt by SentencePiece from the raw training text."""

    type: Literal["bpe", "unigram"] = Field("bpe", description="segmentation model")
    size: int = Field(
        8000, ge=16, le=limits.SUBWORDS, description="number of subwords, special tokens included"
    )
    character_coverage: Coverage = 1.0
    models: list[FileName] = Field(
        [], max_length=1, description="a SentencePiece model to use, as for translation; empty: learn one"
    )


class TextData(Section):
    """Text of a language-model run and its conversion to token ids."""

    text: Language = Field(description="suffix of the text files, as txt for PREFIX.txt")
    train: list[TextPrefix] = Field(
        min_length=1,
        description="prefixes of the training text, PREFIX.<text>, plain or .gz, read one after the other; searched "
        "in the same folders as those of a translation recipe",
    )
    valid: TextPrefix = Field(description="prefix of the validation text")
    test: Annotated[TextPrefix | None, NO_PARAMETERS] = Field(
        None,
        description="prefix of the test text, whose perplexity is reported when training ends; null: none",
    )
    subwords: Annotated[
        Union[
            Annotated[TextSubwords, Tag("bpe")],
            Annotated[TextSubwords, Tag("unigram")],
            Annotated[TextWords, Tag("words")],
        ],
        Discriminator(subword_type),
    ] = Field(TextSubwords(), description="division of text into tokens; the end of a line is one more token")
    prepared: PreparedFolder = None


class TextDropout(Section):
    """Dropout probabilities of a language model."""

    embedding: Probability = Field(
        0.0,
        description="dropout of whole words: all occurrences in a batch together (Gal and Ghahramani, 2016)",
    )
    inputs: Probability = Field(0.0, description="dropout of the embeddings, the inputs of the bottom layer")
    layers: Probability = Field(0.0, description="dropout between layers")
    output: Probability = Field(0.0, description="dropout of the top layer's outputs")
    weights: Probability = Field(
        0.0,
        description="dropout of the recurrent matrices, one mask per batch (weight-drop; Merity et al., 2018)",
    )
    variational: bool = Field(
        False,
        description="use the same mask at all positions of a row in inputs, layers and output (locked dropout)",
    )


class LanguageModelSection(Section):
    """Language model: an embedding, a stack of recurrent layers, an output layer."""

    embedding: Width = Field(512, description="width of the embedding")
    cell: CellName = Field("lstm", description=CELL_DESCRIPTION)
    layers: Layers = Field(2, description="number of layers")
    size: Annotated[
        Union[Annotated[Width, Tag("number")], Annotated[list[Width], Tag("list")]], width_or_widths
    ] = Field(description="width of all layers, or a list of the width of each, bottom first")
    dropout: Annotated[
        Union[Annotated[Probability, Tag("number")], Annotated[TextDropout, Tag("section")]],
        number_or_section,
    ] = Field(
        0.0, description="one probability for inputs, layers and output, or a section with a value for each"
    )
    weight_tying: Literal["none", "softmax"] = Field(
        "none",
        description="softmax: embedding and output layer share one matrix. If size is one number that differs from "
        "embedding, a projection comes between; the last width of a list has to be that of the embedding",
    )
    initialization: Initialization = Field(Initialization(), description="initial values of the parameters")

    @model_validator(mode="after")
    def _widths_fit(self) -> LanguageModelSection:
        if isinstance(self.size, list):
            if len(self.size) != self.layers:
                raise ValueError(
                    f"size has {len(self.size)} widths and layers is {self.layers}; give one width for each layer"
                )
            if self.weight_tying == "softmax" and self.size[-1] != self.embedding:
                raise ValueError(
                    f"weight_tying softmax needs the last width of size, {self.size[-1]}, equal to embedding "
                    f"{self.embedding}; change one of them, or give one number for all layers, which adds a projection"
                )
        return self

    @property
    def sizes(self) -> list[int]:
        """Width of each layer, bottom first."""
        return self.size if isinstance(self.size, list) else [self.size] * self.layers

    @property
    def hidden_size(self) -> int:
        """Size that learning rate schedules take for the model's."""
        return max(self.sizes)

    @property
    def widest(self) -> int:
        """Width of the widest layer."""
        return max(*self.sizes, self.embedding)

    @property
    def dropouts(self) -> TextDropout:
        """Dropout section; built from the single probability if the recipe gives one."""
        if isinstance(self.dropout, TextDropout):
            return self.dropout
        return TextDropout(inputs=self.dropout, layers=self.dropout, output=self.dropout)


def model_kind(value: Any) -> str:
    """Returns "text" for the model section of a language model, "pairs" for that of a translation model."""
    if isinstance(value, dict):
        translation_keys = value.keys() & {"encoder", "decoder", "attention"}
        return "text" if value.keys() & {"size", "layers", "cell"} and not translation_keys else "pairs"
    return "text" if isinstance(value, LanguageModelSection) else "pairs"


def data_kind(value: Any) -> str:
    """Returns "text" for the data section of a language model, "pairs" for that of a translation model."""
    if isinstance(value, dict):
        return "text" if "text" in value else "pairs"
    return "text" if isinstance(value, TextData) else "pairs"
