"""Upper bounds of numbers in recipes, command-line options and calls; larger values are taken for typing errors.

The bounds are generous; whether a model fits into memory is the matter of budgets and estimates. All checks use these
constants, so that recipes, options and Python calls agree.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from econmt.errors import InputError

LAYERS = 64
WIDTH = 65_536
"""Width of embeddings, layers and attention; rank of factorised matrices."""
SUBWORDS = 1_000_000
WORDS = 10_000_000
FACTORS = 20
"""Streams of source factors."""
POSITIONS = 10_000
"""Tokens on a side of a training pair or bucket."""
STEPS = 2**24
"""Time steps of a sequence in a benchmark."""
INPUT_LENGTH = 1_000_000
"""Tokens of a line to translate."""
BUCKETS = 128
BATCH = 1_000_000
"""Sentences or tokens of a training batch; pairs of a profiled batch."""
MICRO_BATCHES = 10_000
"""Batches whose gradients are accumulated."""
UPDATES = 10**12
LOSS_SCALE = 2**60
TOKENS = 10**15
SECONDS = 10**9
"""About thirty years."""
CHECKPOINTS = 1_000_000
SENTENCES = 10**9
LINE_BYTES = 1 << 26
"""Bytes of a line of text."""
JUDGED = 100_000
"""Characters of a line that metrics compare; TER takes minutes for longer lines."""
LINES = 10_000_000
"""Lines read before the first is translated."""
THREADS = 1024
PROCESSES = 1024
RESTARTS = 1000
SEED = 2**31 - 1
BEAM = 1000
NBEST = 100_000
"""Translations returned for a line; beam search returns at most its beam size."""
SHORTLIST = 10_000
ITERATIONS = 1_000
TRANSLATED = 100_000
"""Sentences translated or scored together."""
LENGTH_PENALTY_ALPHA = 10.0
LENGTH_PENALTY_BETA = 1000.0
PENALTY = 100.0
"""Weights of penalties, and the score difference of beam pruning."""
OUTPUT_FACTOR = 100.0
TEMPERATURE = 1000.0
RATE = 1000.0
"""Learning rates, weight decay."""
GRADIENT = 1e9
WEIGHT = 100.0
"""Initial values of parameters."""
SAMPLES = 1_000_000
"""Bootstrap resamples of a test set."""
MIXED = 1e6
"""Mixing weights of corpora."""
STAGES = 1000
PHRASES = 1000
"""Phrases required or forbidden in the translation of a line."""
NGRAM = 100
"""Tokens of an n-gram that may not be repeated."""
DIGITS = 15
"""Digits after the decimal point; a float has no more."""
REGEX = 1000
"""Characters of a regular expression."""
TEXT = 4096
"""Characters of a name or path."""

BeamSize = Annotated[int, Field(ge=1, le=BEAM)]
PenaltyWeight = Annotated[float, Field(ge=0.0, le=PENALTY)]
OutputFactor = Annotated[float, Field(gt=0.0, le=OUTPUT_FACTOR)]
RepetitionPenalty = Annotated[float, Field(ge=1.0, le=PENALTY)]
TopShare = Annotated[float, Field(gt=0.0, le=1.0)]
TopTokens = Annotated[int, Field(ge=0, le=WORDS)]
Temperature = Annotated[float, Field(gt=0.0, le=TEMPERATURE)]
NBestSize = Annotated[int, Field(ge=1, le=NBEST)]
Seed = Annotated[int, Field(ge=0, le=SEED)]


def check_number(name: str, value: object, most: float, *, whole: bool = False, above: bool = False) -> None:
    """Raises InputError unless an argument is a number from 0 to ``most``; ``above``: more than 0."""
    kinds = (int,) if whole else (int, float)
    if (
        isinstance(value, kinds)
        and not isinstance(value, bool)
        and 0 <= value <= most
        and (value or not above)
    ):
        return
    kind, least = "a whole number" if whole else "a number", "more than 0" if above else "0"
    raise InputError(f"{name}: expected {kind} from {least} to {most:g}, found {str(value)[:40]}")


def check_whole(name: str, value: object, most: int) -> None:
    """Raises InputError unless an argument is None or an integer from 1 to ``most``."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most):
        return
    raise InputError(f"{name}: expected a whole number from 1 to {most}, found {str(value)[:40]}")


def is_list_of(value: Any, kinds: type | tuple[type, ...]) -> bool:
    """Returns True if a value is a sequence, but not a text, of instances of ``kinds``."""
    is_sequence = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    return is_sequence and all(isinstance(each, kinds) for each in value)


def natural(text: str) -> int | None:
    """Reads a number of at most 15 digits from 0 to 9; None for any other text.

    ``int`` raises an error for thousands of digits, and ``str.isdigit`` accepts characters that ``int`` does not.
    """
    return int(text) if re.fullmatch("[0-9]{1,15}", text) else None
