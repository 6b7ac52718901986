"""Predicts the memory of a beam search, which limits the batches of validation within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from econmt.config.recipe import Recipe
from econmt.engine.outside_memory import workspace_bytes
from econmt.estimate.training_step import cublas_workspaces, replacements, simulate
from econmt.model import IncrementalModel, build_model
from econmt_memory.estimate.fake import fake_tensors
from econmt_memory.measure.storages import BLOCK
from econmt_memory.measure.tracker import Tracker

_CPU = torch.device("cpu")


def estimate_search(
    recipe: Recipe,
    source_size: int,
    target_size: int,
    shape: tuple[int, int, int],
    device: str,
    factor_sizes: Sequence[int] = (),
) -> int:
    """Predicts the most bytes of a beam search in float32, including weights, without optimizer state and gradients.

    The search holds prepacked copies of weights, perhaps a table of the words' gate inputs, two copies of keys and
    values when sentences are removed, logits of all hypotheses, and attention and back pointers of every position.

    Args:
        source_size, target_size: Sizes of the vocabularies, including special tokens.
        shape: Sentences, source positions, and positions of the longest translation.
        device: "cpu" or "cuda".
        factor_sizes: Sizes of the source factors' vocabularies.
    """
    sentences, source_length, target_length = shape
    beam = recipe.decoding.beam_size
    cuda = device == "cuda"
    with fake_tensors(device), torch.no_grad():
        model = build_model(recipe, source_size, target_size, factor_sizes).eval()
        source = torch.ones(sentences, source_length, dtype=torch.int64)
        lengths = torch.ones(sentences, dtype=torch.int64)
        rows = torch.zeros(sentences * beam, dtype=torch.int64)
        tracker = Tracker(_CPU, block=BLOCK if cuda else 1, replacements=replacements(device))
        # Those of training, which continues afterwards.
        workspaces = cublas_workspaces(tracker, 2, workspace_bytes(torch.float32)) if cuda else []
        for parameter in model.parameters():
            tracker.label(parameter, "weights", "other")
        with tracker.recording():
            tracker.begin("forward")
            attention = torch.empty(target_length, len(rows), source_length)
            pointers = torch.empty(2, target_length, len(rows), dtype=torch.int64)
            incremental = IncrementalModel(model)
            state = incremental.encode(source, lengths).select(rows, rows, beam)
            for _ in range(2):  # the second step needs more, since it starts with the results of the first
                log_probabilities, _, state = incremental.step(rows, state)
                chosen = log_probabilities.topk(min(beam, target_size), dim=1)
                state = state.select(rows, rows, beam).keep(torch.arange(sentences))
            del attention, pointers, log_probabilities, chosen, state, incremental, workspaces
    return simulate(tracker, in_graphs=False).peak_reserved if cuda else tracker.peak()[0]


def search_rows(needed: Callable[[int], int], limit: int, most: int) -> int:
    """Returns how many sentences, at most ``most``, can be translated together in ``limit`` bytes; 0 if not even one.

    ``needed`` returns the bytes for a number of sentences, a linear function.
    """
    for_most = needed(most)
    if for_most <= limit:
        return most
    for_one = needed(1)
    if for_one > limit:
        return 0
    return 1 + (limit - for_one) * (most - 1) // (for_most - for_one)
