"""The model section of a recipe, and what all sections have in common; :mod:`econmt.config.recipe` has the whole recipe."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple, Union

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from econmt.config import limits
from econmt.config.lengths import LengthTask

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Width = Annotated[int, Field(ge=1, le=limits.WIDTH)]


def _check_regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"no regular expression ({error})") from None
    return pattern


Regex = Annotated[str, Field(min_length=1, max_length=limits.REGEX), AfterValidator(_check_regex)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, types are strict, values never change once loaded."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class CellRules(NamedTuple):
    """What can be asked of a cell."""

    input_feeding: bool = False
    """Whether a decoder of it can feed the attentional hidden vector into the next step."""
    ranks: bool = False
    """Whether its matrices can be products of two factors."""


CELLS = {
    "lstm": CellRules(input_feeding=True, ranks=True),
    "lnlstm": CellRules(),
    "gru": CellRules(),
    "sru": CellRules(),
    "ssru": CellRules(),
    "qrnn": CellRules(),
    "gilr_lstm": CellRules(),
}
"""Every cell by its name."""


class RecurrentStack(Section):
    """A stack of recurrent layers."""

    cell: Literal["lstm", "lnlstm", "gru", "sru", "ssru", "qrnn", "gilr_lstm"] = Field(
        "lstm",
        description="recurrent cell; lnlstm: an LSTM with layer normalisation; sru, ssru, qrnn (window 1) and "
        "gilr_lstm are linear recurrences, all steps of which are computed at once",
    )
    rank: Width | None = Field(
        None,
        description="each layer's two weight matrices are products of two factors of this rank, which makes the model "
        "smaller and faster (Prabhavalkar et al., 2016); null: whole matrices",
    )
    layers: int = Field(1, ge=1, le=limits.LAYERS, description="number of layers")
    first_residual_layer: int = Field(
        2,
        ge=1,
        le=limits.LAYERS,
        description="the lowest layer, counted from 1, that adds what it reads if residual is true; of the bottom one "
        "that is embeddings of the same width. Another than 2 is computed step by step",
    )

    @model_validator(mode="after")
    def _rank_has_a_cell(self) -> RecurrentStack:
        if self.rank is not None and not CELLS[self.cell].ranks:
            known = ", ".join(name for name, rules in CELLS.items() if rules.ranks)
            raise ValueError(
                f"rank {self.rank} needs cell: {known}; of cell {self.cell} all matrices are whole"
            )
        return self


class EncoderSection(RecurrentStack):
    """A stack of recurrent layers over the source."""

    size: Width = Field(
        512,
        description="width of every layer's output; a bidirectional layer has half of it in each direction",
    )
    bidirectional: Literal["none", "bottom", "all"] = Field(
        "bottom", description="which layers read the source in both directions"
    )
    residual: bool = Field(
        False, description="add each layer's input to its output, from the second layer on"
    )
    reverse_input: bool = Field(False, description="read the source backwards (Sutskever et al., 2014)")

    @model_validator(mode="after")
    def _two_directions_halve(self) -> EncoderSection:
        if self.bidirectional != "none" and self.size % 2:
            raise ValueError(
                f"size {self.size} must be even: a bidirectional layer has half of it in each direction"
            )
        return self


class DecoderSection(RecurrentStack):
    """A stack of recurrent layers over the target, with attention."""

    size: Width = Field(512, description="width of every layer and of the attentional hidden vector")
    input_feeding: bool = Field(
        True,
        description="feed the attentional hidden vector into the next step (Luong et al., 2015); false: GNMT style, "
        "attention from the bottom layer, its context read by the upper ones, the whole target at once",
    )
    residual: bool = Field(
        False, description="add each layer's input to its output, from the second layer on"
    )
    context_gating: bool = Field(
        False,
        description="a gate weighs state and context against one another (Tu et al., 2017), computed step by step",
    )
    attention_in_upper_layers: bool = Field(
        False,
        description="with input feeding: attention from the bottom layer, whose context the upper ones read too, "
        "computed step by step",
    )
    copy_attention: bool = Field(
        False,
        description="words of the source are copied by the attention, beside those that the output layer gives (See et "
        "al., 2017); needs data.subwords.joint",
    )
    state_init: Literal["last", "avg", "zero"] = Field(
        "last", description="first state from the encoder's last state, from the mean of its outputs, or zero"
    )

    @model_validator(mode="after")
    def _feeding_has_a_cell(self) -> DecoderSection:
        if self.input_feeding and not CELLS[self.cell].input_feeding:
            known = ", ".join(name for name, rules in CELLS.items() if rules.input_feeding)
            raise ValueError(
                f"cell {self.cell} needs input_feeding: false, or take cell: {known}; with input feeding each step "
                "waits for the attention of the step before"
            )
        return self


class Coverage(Section):
    """How much each source position was attended to, as an input of the attention (Tu et al., 2016)."""

    type: Literal["none", "tanh", "sigmoid", "relu", "softrelu", "gru", "fertility", "count"] = Field(
        "none",
        description="count: the sum of the attention; fertility: that over how often a position is expected; gru, or "
        "an activation: a layer over the coverage before, the attention, the position and the decoder's state",
    )
    num_hidden: Width = Field(1, description="width of the coverage of a position; of count and fertility 1")
    max_fertility: int = Field(2, ge=1, le=limits.WIDTH, description="how often at most (fertility only)")

    @model_validator(mode="after")
    def _counts_are_numbers(self) -> Coverage:
        if self.type in ("count", "fertility") and self.num_hidden != 1:
            raise ValueError(f"num_hidden {self.num_hidden}: coverage of type {self.type} is one number")
        return self


class AttentionSection(Section):
    """How a decoder state is compared with the encoder's outputs."""

    type: Literal["additive", "dot", "scaled_dot", "bilinear", "mhdot", "fixed", "location"] = Field(
        "additive",
        description="additive: w . tanh(q + k) (Bahdanau et al., 2015); dot: h . v; "
        "scaled_dot: h . v / sqrt(size of h); bilinear: h . W v (Luong et al., 2015). Computed step by step: mhdot: "
        "several scaled products (Vaswani et al., 2017); fixed: the last position, always; location: by the position's "
        "number, from the decoder's state alone (Luong et al., 2015)",
    )
    size: Width = Field(
        512,
        description="width of the comparison (additive, mhdot), most positions looked at (location); the others use "
        "the decoder's size",
    )
    mhdot_heads: int = Field(8, ge=1, le=limits.WIDTH, description="products (mhdot only)")
    function: Literal["softmax", "sparsemax"] = Field(
        "softmax",
        description="what makes weights of scores; sparsemax: many of them are 0 (Martins and Astudillo, 2016), "
        "computed step by step",
    )
    use_prev_word: bool = Field(
        False,
        description="the query is of the word before, too (additive, bilinear, mhdot, location), computed step by step",
    )
    coverage: Coverage = Field(Coverage(), description="additive only, computed step by step")
    layer_norm: bool = Field(False, description="layer normalisation of q + k before tanh (additive only)")

    @model_validator(mode="after")
    def _norm_needs_additive(self) -> AttentionSection:
        if self.layer_norm and self.type != "additive":
            raise ValueError(f"layer_norm needs type: additive, not {self.type}")
        if self.coverage.type != "none" and self.type != "additive":
            raise ValueError(f"coverage needs type: additive, not {self.type}")
        if self.use_prev_word and self.type in ("dot", "scaled_dot", "fixed"):
            raise ValueError(
                f"use_prev_word: type {self.type} makes no query; give additive, bilinear, mhdot or location"
            )
        if self.function != "softmax" and self.type == "fixed":
            raise ValueError(f"function {self.function}: type fixed has no scores")
        if self.type == "mhdot" and self.size % self.mhdot_heads:
            raise ValueError(f"size {self.size} must be a multiple of mhdot_heads {self.mhdot_heads}")
        return self


class Dropout(Section):
    """Where units are dropped in training."""

    embedding: Probability = Field(0.0, description="on source and target embeddings")
    layers: Probability = Field(0.0, description="between recurrent layers and on the encoder's outputs")
    output: Probability = Field(0.0, description="on the attentional hidden vector, before the output layer")
    variational: bool = Field(
        False, description="one mask a sentence for all its positions (Gal and Ghahramani, 2016)"
    )
    states: Probability = Field(
        0.0,
        description="on what layers multiply of their own state, one mask a sentence (Gal and Ghahramani, 2016), "
        "computed step by step, as the next three",
    )
    recurrent: Probability = Field(
        0.0, description="on what a step adds to the cell, without loss of memory (Semeniuta et al., 2016)"
    )
    zoneout_hidden: Probability = Field(
        0.0, description="values of the hidden state that stay as they were (Krueger et al., 2017)"
    )
    zoneout_cell: Probability = Field(0.0, description="the same of the cell state")


def _dropout_kind(value: Any) -> str:
    return "section" if isinstance(value, (dict, Dropout)) else "number"


DropoutChoice = Annotated[
    Union[Annotated[Probability, Tag("number")], Annotated[Dropout, Tag("section")]],
    Discriminator(_dropout_kind),
]


class Initialization(Section):
    """First values of the parameters."""

    weights: Literal["uniform", "xavier"] = Field(
        "xavier",
        description="uniform in [-scale, scale], or uniform by fan-in and fan-out (Glorot and Bengio, 2010)",
    )
    rnn_h2h: Literal["default", "orthogonal", "orthogonal_stacked"] = Field(
        "default",
        description="matrices that layers multiply their own state with: default: as weights says; orthogonal: all "
        "gates together have orthonormal columns (Saxe et al., 2014); orthogonal_stacked: each gate's own",
    )
    scale: float = Field(
        0.1, gt=0.0, le=limits.WEIGHT, description="half width of the uniform distribution (uniform only)"
    )
    source_embedding: Annotated[str, Field(min_length=1, max_length=limits.TEXT)] | None = Field(
        None,
        description="file of vectors for the source embeddings: text (word2vec, GloVe, fastText), .npz or .safetensors "
        "with tokens and vectors, as econmt embeddings writes them; tokens that it lacks are drawn; relative to the "
        "working directory",
    )
    target_embedding: Annotated[str, Field(min_length=1, max_length=limits.TEXT)] | None = Field(
        None, description="the same for the target embeddings"
    )
    forget_bias: float = Field(
        0.0, ge=-limits.WEIGHT, le=limits.WEIGHT, description="first value of the forget gates' bias"
    )


class Model(Section):
    """The attention-LSTM translation model."""

    embedding: Width = Field(512, description="width of source and target embeddings")
    source_factors_num_embed: list[Width] = Field(
        [], max_length=limits.FACTORS, description="width of the embedding of each of data.source_factors"
    )
    source_factors_combine: Literal["concat", "sum"] = Field(
        "concat",
        description="whether a source word's embedding and those of its factors are put side by side or added up",
    )
    encoder: EncoderSection = Field(EncoderSection(), description="the encoder")
    decoder: DecoderSection = Field(DecoderSection(), description="the decoder")
    attention: AttentionSection = Field(AttentionSection(), description="the attention")
    dropout: DropoutChoice = Field(
        0.0, description="one probability for embedding, layers and output, or a section with one a place"
    )
    layer_normalization: bool = Field(
        False,
        description="of the attentional hidden vector before tanh and of the decoder's first states, computed step by "
        "step; cells and attention have their own",
    )
    lhuc: Literal["none", "encoder", "decoder", "state_init", "all"] = Field(
        "none",
        description="scale every unit of the layers, or of the decoder's first states, by a factor from 0 to 2 that is "
        "learnt when a model is tuned (Vilar, 2018), computed step by step; training.initialize_from may name a model "
        "without, and fixed_param_names '(?!.*lhuc).*' learns nothing else",
    )
    length_task: LengthTask = Field(
        "none",
        description="a small network over the mean of the encoder's outputs learns how long translations are, for a "
        "learned brevity penalty: ratio: target over source length, by squared error; length: the same ratio by the "
        "Poisson loss of the length",
    )
    length_task_layers: int = Field(
        1,
        ge=1,
        le=limits.LAYERS,
        description="layers of that network; all but the last have the encoder's size",
    )
    weight_tying: Literal["none", "src_trg", "trg_softmax", "src_trg_softmax"] = Field(
        "none", description="which of source embedding, target embedding and output layer share one matrix"
    )
    initialization: Initialization = Field(Initialization(), description="first values of the parameters")

    @model_validator(mode="after")
    def _sizes_fit(self) -> Model:
        if self.attention.type in ("dot", "scaled_dot") and self.encoder.size != self.decoder.size:
            raise ValueError(
                f"attention.type {self.attention.type} needs encoder.size ({self.encoder.size}) equal to decoder.size "
                f"({self.decoder.size}); use bilinear or additive otherwise"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> Model:
        attention = self.attention
        if attention.type == "mhdot" and self.encoder.size % attention.mhdot_heads:
            raise ValueError(
                f"encoder.size {self.encoder.size} must be a multiple of attention.mhdot_heads {attention.mhdot_heads}"
            )
        return self

    @model_validator(mode="after")
    def _bottom_adds_its_width(self) -> Model:
        for part, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
            width = self.source_width if part == "encoder" else self.embedding
            if stack.residual and stack.first_residual_layer == 1 and width != stack.size:
                raise ValueError(
                    f"{part}.first_residual_layer 1 adds embeddings: embedding {width}"
                    f"{'' if width == self.embedding else ' with source factors'} must be {part}.size {stack.size}"
                )
        if self.lhuc in ("state_init", "all") and self.decoder.state_init == "zero":
            raise ValueError(
                f"lhuc {self.lhuc} scales the decoder's first states: give decoder.state_init last or avg"
            )
        return self

    @model_validator(mode="after")
    def _tables_get_vectors_once(self) -> Model:
        if self.weight_tying.startswith("src_trg") and self.initialization.target_embedding is not None:
            raise ValueError(
                f"weight_tying {self.weight_tying} makes one matrix of both embeddings: give "
                "initialization.source_embedding alone"
            )
        return self

    @model_validator(mode="after")
    def _states_are_multiplied(self) -> Model:
        how = self.initialization.rnn_h2h
        if how != "default":
            for part, stack in (("encoder", self.encoder), ("decoder", self.decoder)):
                if stack.cell in ("sru", "ssru", "qrnn"):
                    raise ValueError(
                        f"initialization.rnn_h2h {how}: {part}.cell {stack.cell} multiplies its state with no matrix; "
                        "leave it at default"
                    )
                if stack.rank is not None:
                    raise ValueError(
                        f"initialization.rnn_h2h {how}: {part}.rank {stack.rank} makes products of two factors of "
                        "these matrices; leave it at default, or rank at null"
                    )
        return self

    @model_validator(mode="after")
    def _ranks_save(self) -> Model:
        for part, rank in (("encoder", self.encoder.rank), ("decoder", self.decoder.rank)):
            limit = rank_limit(self, part)
            if rank is not None and rank > limit.rank:
                raise ValueError(f"{part}.rank {rank} must be at most {limit.rank}: {limit.reason}")
        return self

    @property
    def source_width(self) -> int:
        """The width of what the encoder reads: the source embeddings with their factors."""
        beside = self.source_factors_num_embed if self.source_factors_combine == "concat" else []
        return self.embedding + sum(beside)

    @property
    def widest(self) -> int:
        """The width of its widest layer."""
        return max(self.encoder.size, self.decoder.size)

    @property
    def dropouts(self) -> Dropout:
        """The dropout section, also where the recipe gives one probability for all places."""
        if isinstance(self.dropout, Dropout):
            return self.dropout
        return Dropout(embedding=self.dropout, layers=self.dropout, output=self.dropout)


class LayerShape(NamedTuple):
    """A recurrent layer of a model: what it reads, how wide it is in each direction, and in how many it runs."""

    inputs: int
    size: int
    directions: int


def layer_shapes(model: Model) -> tuple[list[LayerShape], list[LayerShape]]:
    """The recurrent layers of encoder and decoder, bottom first."""
    encoder, decoder = model.encoder, model.decoder
    below, above = [], []
    for layer in range(encoder.layers):
        inputs = model.source_width if layer == 0 else encoder.size
        both = encoder.bidirectional == "all" or (encoder.bidirectional == "bottom" and layer == 0)
        below.append(
            LayerShape(inputs, encoder.size // 2, 2) if both else LayerShape(inputs, encoder.size, 1)
        )
    for layer in range(decoder.layers):
        if decoder.input_feeding:
            inputs = model.embedding + decoder.size if layer == 0 else decoder.size
            inputs += encoder.size if layer and decoder.attention_in_upper_layers else 0
        else:
            inputs = model.embedding if layer == 0 else decoder.size + encoder.size
        above.append(LayerShape(inputs, decoder.size, 1))
    return below, above


class RankLimit(NamedTuple):
    """The largest rank of a part of a model at which all factors have fewer values than their matrix, and why."""

    rank: int
    reason: str


def rank_limit(model: Model, part: str) -> RankLimit:
    """The limit for the LSTM matrices of the encoder or the decoder; 0 if no rank saves anything."""
    layers = layer_shapes(model)[("encoder", "decoder").index(part)]
    matrices = [
        (largest_rank(4 * shape.size, width), number, name, f"{4 * shape.size} x {width}")
        for number, shape in enumerate(layers, 1)
        for name, width in (("input", shape.inputs), ("hidden", shape.size))
    ]
    rank, number, name, size = min(matrices)
    return RankLimit(
        rank,
        f"the {name} matrix of layer {number} is {size}, and factors of a higher rank have no fewer values than it",
    )


def largest_rank(rows: int, columns: int) -> int:
    """The largest rank at which two factors have fewer values than their product; 0 if there is none."""
    return (rows * columns - 1) // (rows + columns)
