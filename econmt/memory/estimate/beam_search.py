"""Predicts the memory of a beam search, which limits the batches of validation within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from econmt.config.recipe import Recipe
from econmt.memory.estimate.fake import ON_GPU, REPLACEMENTS, standing_in
from econmt.memory.estimate.training_step import cublas_workspaces, simulate
from econmt.memory.measure.tracker import BLOCK, Tracker
from econmt.model import IncrementalModel, build_model

_CPU = torch.device("cpu")


def estimate_search(
    recipe: Recipe,
    source_size: int,
    target_size: int,
    shape: tuple[int, int, int],
    device: str,
    precision: torch.dtype,
    factor_sizes: Sequence[int] = (),
) -> int:
    """Bytes at the peak of a search, weights included, optimizer state and gradients not.

    Weights are laid out anew, words' share in the gates may be looked up in a table; keys and values are there twice
    when sentences leave; logits are those of all hypotheses; attention and back pointers of every position are kept for
    the result.

    Args:
        recipe: its model and decoding sections.
        source_size: source vocabulary, special symbols counted.
        target_size: target vocabulary.
        shape: sentences, source positions, and positions of the longest translation.
        device: "cpu" or "cuda".
        precision: of products.
        factor_sizes: vocabularies of the source factors.
    """
    sentences, source_length, target_length = shape
    beam = recipe.decoding.beam_size
    cuda = device == "cuda"
    with standing_in(device), torch.no_grad():
        model = build_model(recipe, source_size, target_size, factor_sizes).eval()
        source = torch.ones(sentences, source_length, dtype=torch.int64)
        lengths = torch.ones(sentences, dtype=torch.int64)
        rows = torch.zeros(sentences * beam, dtype=torch.int64)
        tracker = Tracker(_CPU, block=BLOCK if cuda else 1, replacements=ON_GPU if cuda else REPLACEMENTS)
        workspaces = cublas_workspaces(tracker, 2) if cuda else []  # of training, which goes on afterwards
        for parameter in model.parameters():
            tracker.label(parameter, "weights", "other")
        with (
            tracker.recording(),
            torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == torch.bfloat16),
        ):
            tracker.begin("forward")
            seen = torch.empty(target_length, len(rows), source_length)
            pointers = torch.empty(2, target_length, len(rows), dtype=torch.int64)
            incremental = IncrementalModel(model, precision)
            state = incremental.encode(source, lengths).select(rows, rows, beam)
            for _ in range(2):  # the second step finds what the first has left
                log_probabilities, _, state = incremental.step(rows, state)
                chosen = log_probabilities.topk(min(beam, target_size), dim=1)
                state = state.select(rows, rows, beam).keep(torch.arange(sentences))
            del seen, pointers, log_probabilities, chosen, state, incremental, workspaces
    return simulate(tracker).peak_reserved if cuda else tracker.peak()[0]


def search_rows(needed: Callable[[int], int], limit: int, most: int) -> int:
    """The most sentences that can be translated together within a limit, at most ``most``; 0: not even one.

    Args:
        needed: bytes by sentences, which grow with them along a line.
        limit: bytes.
        most: sentences wanted.
    """
    all_of_them = needed(most)
    if all_of_them <= limit:
        return most
    one = needed(1)
    if one > limit:
        return 0
    return 1 + (limit - one) * (most - 1) // (all_of_them - one)
