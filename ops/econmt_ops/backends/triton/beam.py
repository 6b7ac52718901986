"""One step of beam search in two kernels: the best next tokens per chunk, then the new hypotheses per sentence.

Sizes: B sentences, K hypotheses (places) each, R = B K rows, V vocabulary, W = min(K, V) candidates, C chunks of a
row's scores, T steps, N best finished scores. Missing entries hold the lowest value.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from econmt_ops.dispatch.device_limits import on_gpu_of

_CHUNK = 2048
"""Scores of a row that one program handles."""

_LOWEST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_ALL_BITS = tl.constexpr(0x7FFFFFFF)
_LEAST = tl.constexpr(-3e38)
"""Number that is subtracted from the scores of a chunk if all are -inf."""


@triton.jit
def _ordered(bits):
    """Maps the bits of a float32 to an int32 with the order of the floats, and back."""
    return tl.where(bits < 0, bits ^ _ALL_BITS, bits)


@triton.jit
def beam_candidates(
    scores, keys, maxima, sums, scores_row, size, BARRED: tl.constexpr, ALSO_BARRED: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Finds the best tokens of a chunk of a row; a key is a score above its token, where lower tokens win ties."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    place = row * tl.num_programs(1) + tl.program_id(1)
    x = tl.load(scores + row * scores_row + token, mask=token < size, other=-float("inf")).to(tl.float32)
    highest = tl.max(x, 0)
    tl.store(maxima + place, highest)
    tl.store(sums + place, tl.sum(tl.exp(x - tl.maximum(highest, _LEAST)), 0))
    x = tl.where((token == BARRED) | (token == ALSO_BARRED), -float("inf"), x)
    key = (_ordered(x.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (token ^ _ALL_BITS).to(tl.int64)
    for number in tl.static_range(WIDTH):
        best = tl.max(key, 0)
        tl.store(keys + place * WIDTH + number, best)
        key = tl.where(key == best, _LOWEST, key)


@triton.jit
def _continuations(
    found, totals, first_row, last, END: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Returns float64 totals (SIZE,) of a sentence's continuations, and their tokens, CHUNKS WIDTH per row.

    Args:
        found: pointer to the scores, their row stride, and what `beam_candidates` wrote.
        last: True if a hypothesis may only end.
    """
    scores, scores_row, keys, maxima, sums = found
    index = tl.arange(0, SIZE)
    own = index // (CHUNKS * WIDTH)
    inside = own < PLACES
    row = first_row + own
    highest = tl.full([SIZE], -float("inf"), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        own_highest = tl.load(maxima + row * CHUNKS + chunk, mask=inside, other=-float("inf"))
        highest = tl.maximum(highest, own_highest)
    total = tl.zeros([SIZE], tl.float32)
    for chunk in tl.static_range(CHUNKS):
        own_highest = tl.load(maxima + row * CHUNKS + chunk, mask=inside, other=0.0)
        total += tl.load(sums + row * CHUNKS + chunk, mask=inside, other=1.0) * tl.exp(own_highest - highest)
    key = tl.load(keys + first_row * (CHUNKS * WIDTH) + index, mask=inside, other=_LOWEST)
    token = (key & _ALL_BITS) ^ _ALL_BITS
    value = _ordered((key >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
    # At its length limit a hypothesis can only end: the first candidate of each row becomes the end token.
    is_first = inside & (index % (CHUNKS * WIDTH) == 0)
    end = tl.load(scores + row * scores_row + END, mask=is_first, other=-float("inf")).to(tl.float32)
    value = tl.where(last, end, value)
    token = tl.where(last, END, token)
    before = tl.load(totals + row, mask=inside, other=-float("inf"))
    after = before + ((value - highest) - tl.log(total)).to(tl.float64)
    return tl.where(inside & (after == after), after, -float("inf")), token


@triton.jit
def beam_advance(
    scores, keys, maxima, sums, totals, taken, count, limits, penalties, best_scores, ended, grown, tokens,
    rows, scores_row, steps, END: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr, SIZE: tl.constexpr, BEST: tl.constexpr, PLACES_PADDED: tl.constexpr,
    BEST_PADDED: tl.constexpr,
):  # fmt: skip
    """Extends the hypotheses of one sentence per program; see `advance`."""
    sentence = tl.program_id(0).to(tl.int64)
    done = tl.load(taken + sentence)
    number = tl.load(count + sentence)
    limit = tl.load(limits + sentence)
    free = PLACES - number
    place = tl.arange(0, PLACES_PADDED)
    own = sentence * PLACES + place
    before = tl.load(totals + own, mask=place < PLACES, other=-float("inf"))
    grew = tl.max(before, 0) > -float("inf")
    found = scores, scores_row, keys, maxima, sums
    after, token = _continuations(
        found, totals, sentence * PLACES, done + 1 > limit, END, PLACES, WIDTH, CHUNKS, SIZE
    )
    index, rank = tl.arange(0, SIZE), tl.arange(0, BEST_PADDED)
    to_beat = tl.load(best_scores + sentence * BEST + rank, mask=rank < BEST, other=float("inf"))
    penalty = tl.load(penalties + done + 1)
    growing = tl.full([PLACES_PADDED], -float("inf"), tl.float64)
    made = tl.zeros([PLACES_PADDED], tl.int64)
    for chosen in tl.static_range(PLACES):
        best = tl.max(after, 0)
        at = tl.min(tl.where(after == best, index, SIZE), 0)
        word = tl.sum(tl.where(index == at, token, 0), 0)
        after = tl.where(index == at, -float("inf"), after)
        parent = at // (CHUNKS * WIDTH)
        kept = (free > chosen) & (best > -float("inf"))
        ends = kept & (word == END)
        column = (sentence * (PLACES + 1) + tl.where(ends, number, PLACES)) * 2
        tl.store(ended + column, best)
        tl.store(ended + column + 1, ((done + 1) * PLACES + parent).to(tl.float64))
        number += ends.to(tl.int64)
        score = tl.where(ends, best / penalty, -float("inf"))
        # A score that is higher than the lowest of the best ones replaces it.
        lowest = tl.min(to_beat, 0)
        beaten = tl.min(tl.where(to_beat == lowest, rank, BEST_PADDED), 0)
        to_beat = tl.where(rank == beaten, tl.maximum(score, lowest), to_beat)
        growing = tl.where((place == chosen) & kept & (word != END), best, growing)
        made = tl.where(place == chosen, word * PLACES + parent, made)
    # Stops when no growing hypothesis can still exceed the lowest of the best finished scores.
    reach = tl.max(growing, 0) / tl.load(penalties + limit + 1)
    growing = tl.where(tl.min(to_beat, 0) < reach, growing, -float("inf"))
    inside = place < PLACES
    tl.store(totals + own, growing, mask=inside)
    tl.store(grown + (sentence * steps + done) * PLACES + place, made, mask=inside)
    tl.store(tokens + own, made // PLACES, mask=inside)
    tl.store(rows + own, sentence * PLACES + made % PLACES, mask=inside)
    tl.store(best_scores + sentence * BEST + rank, to_beat, mask=rank < BEST)
    tl.store(taken + sentence, done + grew.to(tl.int64))
    tl.store(count + sentence, number)


def advance(
    scores: Tensor,
    totals: Tensor,
    taken: Tensor,
    count: Tensor,
    limits: Tensor,
    penalties: Tensor,
    best_scores: Tensor,
    ended: Tensor,
    grown: Tensor,
    tokens: Tensor,
    rows: Tensor,
    *,
    masked: tuple[int, int],
    end: int,
) -> None:
    """Runs one step of a beam search; all arguments but ``scores``, ``limits`` and ``penalties`` are updated in place.

    Args:
        scores: (R, V) logits of the next token, rows contiguous. totals: (B, K) float64 log-probabilities, -inf for
            places without a growing hypothesis. taken, count: (B,) int64, steps taken and finished hypotheses of a
            sentence.
        limits: (B,) int64, maximum tokens before the end. penalties: (.,) float64, by length: divisors of
            log-probabilities.
        best_scores: (B, N) float64, the N best scores of finished hypotheses, in any order.
        ended: (B, K + 1, 2) float64, receives log-probability, and step times K plus place, of each finished
            hypothesis.
        grown: (B, T, K) int64, receives token times K plus the place extended. tokens: (B, K) int64, receives the
            tokens.
        rows: (B, K) int64, receives the rows that are extended.
        masked: two tokens that are masked. end: the token that ends a hypothesis.
    """
    batch, places = totals.shape
    size = scores.shape[1]
    width, chunks = min(places, size), triton.cdiv(size, _CHUNK)
    keys = totals.new_empty(len(scores), chunks, width, dtype=torch.int64)
    maxima, sums = (totals.new_empty(len(scores), chunks, dtype=torch.float32) for _ in range(2))
    chunk = min(_CHUNK, triton.next_power_of_2(size))
    found = scores, keys, maxima, sums
    candidates = triton.next_power_of_2(places * chunks * width)
    with on_gpu_of([scores]):
        beam_candidates[(len(scores), chunks)](
            *found, scores.stride(0), size, BARRED=masked[0], ALSO_BARRED=masked[1], WIDTH=width, CHUNK=chunk,
            num_warps=4,
        )  # fmt: skip
        beam_advance[(batch,)](
            *found, totals, taken, count, limits, penalties, best_scores, ended, grown, tokens, rows,
            scores.stride(0), grown.shape[1], END=end, PLACES=places, WIDTH=width, CHUNKS=chunks, SIZE=candidates,
            BEST=best_scores.shape[1], PLACES_PADDED=triton.next_power_of_2(places),
            BEST_PADDED=triton.next_power_of_2(best_scores.shape[1]), num_warps=1 if candidates <= 256 else 4,
        )  # fmt: skip
