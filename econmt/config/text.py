"""The sections of a language model's recipe: one text, and the stack of layers that reads it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, Discriminator, Field, Tag

from econmt.config import limits
from econmt.config.data import Language, TextPrefix, VocabularySize, subword_type
from econmt.config.model import Initialization, Probability, Section, Width


class TextWords(Section):
    """No subwords: words between spaces, for text that is tokenised already."""

    type: Literal["words"] = Field(description="whole words of pre-tokenised text")
    size: VocabularySize = Field(
        50000, description="most frequent words kept, special symbols included; the others become <unk>"
    )


class TextSubwords(Section):
    """Subwords learnt by SentencePiece from the raw training text."""

    type: Literal["bpe", "unigram"] = Field("bpe", description="segmentation model")
    size: int = Field(
        8000, ge=16, le=limits.SUBWORDS, description="number of subwords, special symbols included"
    )
    character_coverage: float = Field(
        1.0,
        ge=0.98,
        le=1.0,
        description="share of characters that subwords cover (0.9995: Chinese, Japanese)",
    )


class TextData(Section):
    """Where the text of a language model is and how it becomes token ids."""

    text: Language = Field(description="the suffix of its files: txt for PREFIX.txt")
    train: list[TextPrefix] = Field(
        min_length=1,
        description="prefixes of the training text: PREFIX.<text>, also .gz, read one after the other; looked up as "
        "those of a translation recipe",
    )
    valid: TextPrefix = Field(description="prefix of the validation text")
    test: TextPrefix | None = Field(
        None, description="prefix of a test text, whose perplexity is told when training ends"
    )
    subwords: Annotated[
        Union[
            Annotated[TextSubwords, Tag("bpe")],
            Annotated[TextSubwords, Tag("unigram")],
            Annotated[TextWords, Tag("words")],
        ],
        Discriminator(subword_type),
    ] = Field(TextSubwords(), description="how text is cut into tokens; each line's end is one more")
    prepared: str | None = Field(
        None, description="folder of the prepared token store; null: prepared/ in the model folder"
    )


class TextDropout(Section):
    """What a language model drops in training."""

    embedding: Probability = Field(
        0.0, description="whole words: every occurrence in a batch (Gal and Ghahramani, 2016)"
    )
    inputs: Probability = Field(0.0, description="values of embeddings, as the bottom layer reads them")
    layers: Probability = Field(0.0, description="values between layers")
    output: Probability = Field(0.0, description="values of the top layer, before the output layer")
    weights: Probability = Field(
        0.0,
        description="values of the recurrent matrices, one mask a batch (weight-drop; Merity et al., 2018)",
    )
    variational: bool = Field(
        False,
        description="one mask a row for all positions of a batch (locked dropout) in inputs, layers and output",
    )


def _dropout_kind(value: Any) -> str:
    return "section" if isinstance(value, (dict, TextDropout)) else "number"


class LanguageModelSection(Section):
    """The language model: an embedding, a stack of layers, an output layer."""

    embedding: Width = Field(512, description="width of the embedding")
    cell: Literal["lstm"] = Field("lstm", description="recurrent cell")
    layers: int = Field(2, ge=1, le=limits.LAYERS, description="number of layers")
    size: Width = Field(description="width of every layer")
    dropout: Annotated[
        Union[Annotated[Probability, Tag("number")], Annotated[TextDropout, Tag("section")]],
        Discriminator(_dropout_kind),
    ] = Field(0.0, description="one probability for inputs, layers and output, or a section with one a place")
    weight_tying: Literal["none", "softmax"] = Field(
        "none",
        description="softmax: embedding and output layer share one matrix; layers of another width are mapped to it",
    )
    initialization: Initialization = Field(Initialization(), description="first values of the parameters")

    @property
    def widest(self) -> int:
        """The width of its widest layer."""
        return max(self.size, self.embedding)

    @property
    def dropouts(self) -> TextDropout:
        """The dropout section, also where the recipe gives one probability."""
        if isinstance(self.dropout, TextDropout):
            return self.dropout
        return TextDropout(inputs=self.dropout, layers=self.dropout, output=self.dropout)


def model_kind(value: Any) -> str:
    """Which model section a recipe has: "text" if it has a key that only a language model has."""
    if isinstance(value, dict):
        of_pairs = value.keys() & {"encoder", "decoder", "attention"}
        return "text" if value.keys() & {"size", "layers", "cell"} and not of_pairs else "pairs"
    return "text" if isinstance(value, LanguageModelSection) else "pairs"


def data_kind(value: Any) -> str:
    """Which data section a recipe has: "text" or "pairs"."""
    if isinstance(value, dict):
        return "text" if "text" in value else "pairs"
    return "text" if isinstance(value, TextData) else "pairs"


_OF_PAIRS = (
    "decoding",
    "ops.decoder",
    "ops.attention",
    "training.batch.type",
    "training.max_buckets",
    "training.bucket_width",
    "training.trim_batches",
    "training.decode_and_evaluate",
    "training.decode_and_evaluate_device",
    "training.fixed_param_strategy",
    "training.bleu_tokenizer",
    "training.early_stopping.metric",
)
_OF_TEXT = ("training.bptt", "training.bptt_jitter", "training.valid_rows")


def check_task(recipe: Any) -> None:
    """Makes sure that a recipe's sections and keys are those of its task.

    Raises:
        ValueError: naming the first that is not.
    """
    text = recipe.task == "language_model"
    kinds = {"data": data_kind(recipe.data), "model": model_kind(recipe.model)}
    for section, kind in kinds.items():
        if (kind == "text") != text:
            wanted = {
                ("data", True): "data.text, data.train and data.valid",
                ("data", False): "data.source and data.target",
                ("model", True): "model.size and model.layers, and no encoder and decoder",
                ("model", False): "model.encoder and model.decoder",
            }[section, text]
            raise ValueError(f"task: {recipe.task} needs {wanted}")
    if text and (
        recipe.model.initialization.source_embedding or recipe.model.initialization.target_embedding
    ):
        raise ValueError(
            "model.initialization has files of vectors for task: translation only; leave them out"
        )
    for key in _OF_PAIRS if text else _OF_TEXT:
        section, _, name = key.rpartition(".")
        holder: BaseModel = recipe
        for part in filter(None, section.split(".")):
            holder = getattr(holder, part)
        if getattr(holder, name) != type(holder).model_fields[name].get_default(call_default_factory=True):
            raise ValueError(f"{key} means nothing with task: {recipe.task}; leave it out")
