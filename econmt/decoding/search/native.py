"""Beam search on a CPU in one call of the C library, with the results of :mod:`econmt.decoding.search.beam`.

Shapes: B sentences, S source positions, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from econmt.decoding.search.beam import Hypothesis, SearchOptions, length_penalty
from econmt.decoding.search.slots import hypotheses
from econmt.model import IncrementalModel
from econmt.model.inference.native import NativeState
from econmt_ops.backends.c.search import MOST_PLACES, beam_search


def has_native_search(model: object, options: SearchOptions) -> bool:
    """Returns True if the C library supports the model and the options."""
    return (
        options.is_plain
        and options.sample is None
        and options.beam_size <= MOST_PLACES
        and isinstance(model, IncrementalModel)
        and model.native is not None
    )


def search_name(models: Sequence[object], *, in_c: bool = False) -> str:
    """Returns the name of a search for users: where its loop and steps run, and the precision of products.

    ``in_c``: True if the loop over steps runs in C.
    """
    known = [model for model in models if isinstance(model, IncrementalModel)]
    steps_in_c = all(model.native is not None for model in known) and len(known) == len(models)
    where = "C" if in_c else "PyTorch with steps in C" if steps_in_c else "PyTorch"
    return ", ".join([where, *sorted({str(model.precision).removeprefix("torch.") for model in known})])


@torch.inference_mode()
def native_search(
    model: IncrementalModel,
    source: Tensor,
    lengths: Tensor,
    limits: Tensor,
    options: SearchOptions,
    poll: Callable[[], object] = lambda: None,
    allowed: Tensor | None = None,
) -> list[list[Hypothesis]]:
    """Searches for the translations with the highest scores.

    Args:
        model, options: model and options that :func:`has_native_search` accepts.
        source, lengths, limits: see :func:`~econmt.decoding.search.beam.beam_search`.
        poll: called every few steps; an exception that it raises ends the search.
        allowed: mask of the words of each sentence, (B, V); None: all words.
    """
    if not len(source):
        return []
    decoder, state, words = model.native, model.encode(source, lengths), None
    assert decoder is not None
    assert isinstance(state, NativeState)
    if allowed is not None:
        words = allowed.any(dim=0).nonzero()[:, 0]
        state = decoder.restrict(state, words, allowed[:, words])
    weights, sizes, tensors = decoder.arguments(state)
    (count, positions), beam = source.shape, options.beam_size
    steps = int(limits.max()) + 1
    penalties = length_penalty(torch.arange(steps + 1), options)
    ended = torch.empty(count, beam, 2, dtype=torch.float64)
    ends, grown = torch.empty(count, dtype=torch.int64), torch.empty(count, steps, beam, dtype=torch.int64)
    seen = torch.empty(count, steps, beam, positions) if options.attention else None
    sizes |= {"beam": beam, "steps": steps, "nbest": options.nbest_size}
    tensors |= {
        "first": state.sources.first,
        "ids": words,
        "limits": limits.contiguous(),
        "penalties": penalties,
        "ended": ended,
        "count": ends,
        "grown": grown,
        "seen": seen,
    }
    beam_search(weights, sizes, tensors, poll)
    by_length = penalties.tolist()
    results = []
    for number, (ended_count, length, limit) in enumerate(
        zip(ends.tolist(), lengths.tolist(), limits.tolist(), strict=True)
    ):
        of_sentence = ended[number, :ended_count]
        taken = int(of_sentence[:, 1].max()) // beam if ended_count else 0
        attention = None if seen is None else seen[number, :taken]
        histories = of_sentence, grown[number, :taken], attention
        results.append(hypotheses(*histories, length, limit, by_length, options.nbest_size))
    if words is None:
        return results
    return [[each._replace(ids=words[each.ids].tolist()) for each in best] for best in results]
