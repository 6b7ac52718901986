"""Sections of the recurrent layers of encoder and decoder, and the features of each cell."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field, model_validator

from econmt.config.section import Layers, Section, Width


class CellRules(NamedTuple):
    """Features that a recurrent cell supports."""

    recurrent: bool = False
    """True if it has a matrix that multiplies the hidden state before a step."""
    feeding: bool = False
    """True if decoders of it can have input feeding."""
    ranks: bool = False
    """True if its weight matrices can be factorised into two of lower rank."""


CELLS = {
    "lstm": CellRules(recurrent=True, feeding=True, ranks=True),
    "lnlstm": CellRules(recurrent=True, feeding=True),
    "lnglstm": CellRules(recurrent=True, feeding=True),
    "gru": CellRules(recurrent=True, feeding=True),
    "sru": CellRules(),
    "ssru": CellRules(),
    "qrnn": CellRules(),
    "qrnn2": CellRules(),
    "gilr_lstm": CellRules(recurrent=True),
    "min_gru": CellRules(),
    "min_lstm": CellRules(),
}
"""Features of each cell, by its name."""


CellName = Literal[
    "lstm", "lnlstm", "lnglstm", "gru", "sru", "ssru", "qrnn", "qrnn2", "gilr_lstm", "min_gru", "min_lstm"
]
CELL_DESCRIPTION = (
    "recurrent cell; lnlstm, lnglstm: an LSTM with layer normalisation over all gates or gate by gate; sru, ssru, "
    "qrnn (window of 1 step), qrnn2 (of 2), gilr_lstm, min_gru and min_lstm: linear recurrences, which compute all "
    "time steps in parallel"
)


class RecurrentStack(Section):
    """A stack of recurrent layers."""

    cell: CellName = Field(
        "lstm",
        description=f"{CELL_DESCRIPTION}. Decoders with input feeding have the cell "
        f"{' or '.join(name for name, rules in CELLS.items() if rules.feeding)}",
    )
    rank: Width | None = Field(
        None,
        description="factorise each weight matrix of a layer into two matrices of this rank, which makes the model "
        "smaller and faster (Prabhavalkar et al., 2016); null: full matrices",
    )
    layers: Layers = Field(1, description="number of layers")


class EncoderSection(RecurrentStack):
    """A stack of recurrent layers over the source."""

    size: Width = Field(
        512, description="output width of each layer; a bidirectional layer has half of it in each direction"
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

    size: Width = Field(512, description="output width of each layer and of the attentional hidden vector")
    input_feeding: bool = Field(
        True,
        description="feed the attentional hidden vector into the next step (Luong et al., 2015); false: as in GNMT, "
        "the bottom layer attends, the upper layers read its context, and all target positions are computed at once",
    )
    residual: bool = Field(
        False, description="add each layer's input to its output, from the second layer on"
    )
    context_gating: bool = Field(
        False, description="weigh decoder state and context with a gate (Tu et al., 2017)"
    )
    state_init: Literal["last", "avg", "zero"] = Field(
        "last",
        description="initial decoder state: from the encoder's last state, the mean of its outputs, or zero",
    )
