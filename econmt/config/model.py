"""Model section of a translation recipe, and layer shapes derived from a recipe."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Union

from pydantic import Field, Tag, model_validator

from econmt.config import limits
from econmt.config.section import Probability, Section, Width, number_or_section
from econmt.config.stacks import DecoderSection, EncoderSection


class CoverageSection(Section):
    """Coverage: the attention each source position got so far, as an input of the attention (Tu et al., 2016)."""

    type: Literal["none", "tanh", "sigmoid", "relu", "softrelu", "gru", "fertility", "count"] = Field(
        "none",
        description="update of the coverage: count: sum of the attention; fertility: that sum divided by a predicted "
        "fertility; gru or an activation: a layer over the previous coverage, attention, encoder output and state",
    )
    num_hidden: Width = Field(
        1, description="width of the coverage vector of a position; 1 for count and fertility"
    )


class AttentionSection(Section):
    """Attention of the decoder over the encoder's outputs."""

    type: Literal["additive", "dot", "scaled_dot", "bilinear"] = Field(
        "additive",
        description="score function: additive: w . tanh(q + k) (Bahdanau et al., 2015); dot: h . v; scaled_dot: h . v "
        "/ sqrt(size of h); bilinear: h . W v (Luong et al., 2015)",
    )
    size: Width = Field(512, description="width of queries and keys (additive only)")
    coverage: CoverageSection = Field(
        CoverageSection(), description="coverage of source positions (additive only)"
    )
    layer_norm: bool = Field(
        False, description="apply layer normalisation to q + k before tanh (additive only)"
    )


class Dropout(Section):
    """Dropout probabilities by position in the model."""

    embedding: Probability = Field(0.0, description="dropout of source and target embeddings")
    layers: Probability = Field(
        0.0, description="dropout between recurrent layers and of the encoder's outputs"
    )
    output: Probability = Field(
        0.0, description="dropout of the attentional hidden vector, before the output layer"
    )
    variational: bool = Field(
        False, description="use the same mask at all positions of a sentence (Gal and Ghahramani, 2016)"
    )


class Initialization(Section):
    """Initial values of the parameters."""

    weights: Literal["uniform", "xavier", "torch"] = Field(
        "xavier",
        description="uniform in [-scale, scale]; or scaled by fan-in and fan-out (Glorot and Bengio, 2010); or as "
        "torch.nn.LSTM and Linear: uniform within 1 / sqrt(fan-in), in recurrent layers, biases included, within "
        "1 / sqrt(width). Embeddings are normal with expected norm 1 (xavier) or variance 1 (torch)",
    )
    scale: float = Field(
        0.1, gt=0.0, le=limits.WEIGHT, description="bound of the uniform distribution (uniform only)"
    )
    embedding_scale: Annotated[float, Field(gt=0.0, le=limits.WEIGHT)] | None = Field(
        None,
        description="bound of the uniform distribution of embeddings and of an output layer tied to them; null: as "
        "weights",
    )
    forget_bias: float = Field(
        0.0,
        ge=-limits.WEIGHT,
        le=limits.WEIGHT,
        description="initial bias of the forget gates; weights torch adds random values",
    )


class Model(Section):
    """Attention-LSTM translation model."""

    embedding: Width = Field(512, description="width of source and target embeddings")
    source_factors_num_embed: list[Width] = Field(
        [], max_length=limits.FACTORS, description="embedding width of each of data.source_factors"
    )
    source_factors_combine: Literal["concat", "sum"] = Field(
        "concat",
        description="combination of a source word's embedding with those of its factors: concatenation or sum",
    )
    encoder: EncoderSection = Field(EncoderSection(), description="recurrent layers over the source")
    decoder: DecoderSection = Field(DecoderSection(), description="recurrent layers over the target")
    attention: AttentionSection = Field(
        AttentionSection(), description="attention over the encoder's outputs"
    )
    dropout: Annotated[
        Union[Annotated[Probability, Tag("number")], Annotated[Dropout, Tag("section")]], number_or_section
    ] = Field(
        0.0,
        description="one probability for embedding, layers and output, or a section with a value for each position",
    )
    layer_normalization: bool = Field(
        False,
        description="apply layer normalisation to the attentional hidden vector before tanh and to the decoder's "
        "initial states. Cells and attention have settings of their own",
    )
    weight_tying: Literal["none", "src_trg", "trg_softmax", "src_trg_softmax"] = Field(
        "none",
        description="matrices to share: source embedding (src), target embedding (trg), output layer (softmax)",
    )
    initialization: Initialization = Field(Initialization(), description="initial values of the parameters")

    @model_validator(mode="after")
    def _parts_fit(self) -> Model:
        attention, encoder, decoder = self.attention, self.encoder, self.decoder
        if attention.type in ("dot", "scaled_dot") and encoder.size != decoder.size:
            raise ValueError(
                f"attention.type {attention.type} needs encoder.size ({encoder.size}) equal to decoder.size "
                f"({decoder.size}); change one of them, or use bilinear or additive"
            )
        for part, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            limit = rank_limit(self, part)
            if stack.rank is not None and stack.rank > limit.rank:
                raise ValueError(f"{part}.rank {stack.rank} must be at most {limit.rank}: {limit.reason}")
        return self

    @property
    def source_width(self) -> int:
        """Width of the encoder's input: source embeddings with their factors."""
        factor_widths = self.source_factors_num_embed if self.source_factors_combine == "concat" else []
        return self.embedding + sum(factor_widths)

    @property
    def hidden_size(self) -> int:
        """Size that learning rate schedules take for the model's."""
        return self.decoder.size

    @property
    def widest(self) -> int:
        """Width of the widest layer."""
        return max(self.encoder.size, self.decoder.size)

    @property
    def dropouts(self) -> Dropout:
        """Dropout section; built from the single probability if the recipe gives one."""
        if isinstance(self.dropout, Dropout):
            return self.dropout
        return Dropout(embedding=self.dropout, layers=self.dropout, output=self.dropout)


class LayerShape(NamedTuple):
    """Recurrent layer: input width, output width per direction, number of directions."""

    inputs: int
    size: int
    directions: int


def layer_shapes(model: Model) -> tuple[list[LayerShape], list[LayerShape]]:
    """Returns the shapes of the recurrent layers of encoder and decoder, bottom first."""
    encoder, decoder = model.encoder, model.decoder
    encoder_layers, decoder_layers = [], []
    for layer in range(encoder.layers):
        inputs = model.source_width if layer == 0 else encoder.size
        two_directions = encoder.bidirectional == "all" or (encoder.bidirectional == "bottom" and layer == 0)
        directions = 2 if two_directions else 1
        encoder_layers.append(LayerShape(inputs, encoder.size // directions, directions))
    for layer in range(decoder.layers):
        if decoder.input_feeding:
            inputs = model.embedding + decoder.size if layer == 0 else decoder.size
        else:
            inputs = model.embedding if layer == 0 else decoder.size + encoder.size
        decoder_layers.append(LayerShape(inputs, decoder.size, 1))
    return encoder_layers, decoder_layers


class RankLimit(NamedTuple):
    """Largest rank at which factorised matrices have fewer values than full ones, and the matrix that limits it."""

    rank: int
    reason: str


def rank_limit(model: Model, part: str) -> RankLimit:
    """Returns the limit for the LSTM matrices of the encoder or decoder (``part``); 0 if no rank saves memory."""
    layers = layer_shapes(model)[("encoder", "decoder").index(part)]
    matrices = [
        (largest_rank(4 * shape.size, width), number, name, f"{4 * shape.size} x {width}")
        for number, shape in enumerate(layers, 1)
        for name, width in (("input", shape.inputs), ("hidden", shape.size))
    ]
    rank, number, name, size = min(matrices)
    matrix = f"the {name} matrix of layer {number}"
    return RankLimit(rank, f"{matrix} is {size}, and factors of a higher rank are not smaller than it")


def largest_rank(rows: int, columns: int) -> int:
    """Returns the largest rank at which two factors have fewer values than their product; 0 if there is none."""
    return (rows * columns - 1) // (rows + columns)
