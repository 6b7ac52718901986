"""Creates the encoder and decoder that a recipe's model section describes."""

from __future__ import annotations

from econmt.config import recipe
from econmt.config.unfused import decoder_steps, encoder_steps
from econmt.model.decoder import Decoder, InputFeedingDecoder, ParallelDecoder
from econmt.model.encoder import Encoder
from econmt.model.unfused.decoder import UnfusedDecoder
from econmt.model.unfused.encoder import UnfusedEncoder


def make_encoder(config: recipe.Model, dropout: recipe.Dropout) -> Encoder:
    """The encoder."""
    if encoder_steps(config):
        lhuc = config.lhuc in ("encoder", "all")
        return UnfusedEncoder(config.encoder, config.source_width, dropout, lhuc=lhuc)
    return Encoder(config.encoder, config.source_width, dropout)


def make_decoder(config: recipe.Model, dropout: recipe.Dropout) -> Decoder:
    """The decoder."""
    if decoder_steps(config):
        return UnfusedDecoder(config, dropout)
    kind = InputFeedingDecoder if config.decoder.input_feeding else ParallelDecoder
    return kind(config.decoder, config.attention, config.embedding, config.encoder.size, dropout)
