"""The largest numbers that recipes, options and programs may give: beyond them there is a typing error, not a wish.

They are generous: what a machine can hold is found out by memory budgets and estimates. Every check of a number reads
its bound here, so that a recipe, an option and a call from Python agree.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from econmt.errors import InputError

LAYERS = 64
WIDTH = 65_536
"""Of embeddings, layers, attention and ranks."""
SUBWORDS = 1_000_000
WORDS = 10_000_000
FACTORS = 20
"""Streams of source factors."""
POSITIONS = 10_000
"""Tokens on a side of a training pair, and of a bucket."""
STEPS = 2**24
"""Of a sequence that is only measured."""
INPUT_LENGTH = 1_000_000
"""Tokens of a line that is translated whole."""
BUCKETS = 100
BATCH = 1_000_000
"""Sentences or tokens of a training batch; pairs of a shape that is profiled."""
MICRO_BATCHES = 10_000
"""Batches whose gradients are added up."""
UPDATES = 10**12
TOKENS = 10**15
SECONDS = 10**9
"""Some thirty years."""
CHECKPOINTS = 1_000_000
SENTENCES = 10**9
LINE_BYTES = 1 << 26
"""Of a line of text."""
JUDGED = 100_000
"""Characters of a line that metrics compare: TER takes minutes for longer ones."""
LINES = 10_000_000
"""Lines that are read before any is translated."""
THREADS = 1024
PROCESSES = 1024
RESTARTS = 1000
SEED = 2**31 - 1
BEAM = 1000
NBEST = 100_000
SHORTLIST = 10_000
ITERATIONS = 1_000
"""Translations of a line; beam search has at most as many as its beam is wide."""
TRANSLATED = 100_000
"""Sentences that are translated or scored together."""
LENGTH_PENALTY_ALPHA = 10.0
LENGTH_PENALTY_BETA = 1000.0
PENALTY = 100.0
"""Weights of penalties, and scores that a pruned hypothesis may lie behind."""
OUTPUT_FACTOR = 100.0
TEMPERATURE = 1000.0
RATE = 1000.0
"""Learning rates, weight decay."""
GRADIENT = 1e9
WEIGHT = 100.0
"""First values of parameters."""
SAMPLES = 1_000_000
"""Resampled test sets."""
MIXED = 1e6
"""Weights of texts that are mixed."""
STAGES = 1000
PHRASES = 1000
"""That a translation of a line must hold, or must not."""
NGRAM = 100
"""Tokens of an n-gram that may not come twice."""
DIGITS = 15
"""After the point: more a float does not have."""
REPETITIONS = 10_000
"""Of a measurement."""
REGEX = 1000
"""Characters of a regular expression."""
TEXT = 4096
"""Characters of a name or path."""

BeamSize = Annotated[int, Field(ge=1, le=BEAM)]
LengthPenaltyAlpha = Annotated[float, Field(ge=0.0, le=LENGTH_PENALTY_ALPHA)]
LengthPenaltyBeta = Annotated[float, Field(ge=0.0, le=LENGTH_PENALTY_BETA)]
PenaltyWeight = Annotated[float, Field(ge=0.0, le=PENALTY)]
OutputFactor = Annotated[float, Field(gt=0.0, le=OUTPUT_FACTOR)]
TopTokens = Annotated[int, Field(ge=0, le=WORDS)]
Temperature = Annotated[float, Field(gt=0.0, le=TEMPERATURE)]
NGram = Annotated[int, Field(ge=0, le=NGRAM)]
NBestSize = Annotated[int, Field(ge=1, le=NBEST)]
Seed = Annotated[int, Field(ge=0, le=SEED)]


def check_whole(name: str, value: object, most: int) -> None:
    """Makes sure that what a program gave is a whole number from 1 on, or None.

    Raises:
        InputError: it is not; the message has ``name``.
    """
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
        return
    raise InputError(f"{name}: expected a whole number from 1 to {most}, found {str(value)[:40]}")
