"""Averaging of the parameters of several checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from econmt.errors import InputError


def average_tensors(parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Returns the mean of each tensor, summed in float64 and rounded once to its type.

    ``parts`` yields the origin, for messages, and the tensors of each set; of an iterator one set at a time is held.

    Raises:
        InputError: Two sets do not have the same tensors; the message names the set and the tensor.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count, first = 0, ""
    for where, tensors in parts:
        count += 1
        if count == 1:
            first = where
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in tensors.items()}
        for name in sorted(set(sums) ^ set(tensors)):
            raise InputError(
                f"{where}: parameter '{name}' is not in both this file and {first}; average one run's files"
            )
        for name, tensor in tensors.items():
            if tensor.shape != sums[name].shape:
                raise InputError(
                    f"{where}: parameter '{name}' has shape {tuple(tensor.shape)}, in {first} it has "
                    f"{tuple(sums[name].shape)}; average one run's files"
                )
            sums[name] += tensor
    assert count, "nothing to average"
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}


def choose_checkpoints(updates: Iterable[int], scores: Mapping[int, float] | None, count: int) -> list[int]:
    """Returns the updates of the ``count`` best checkpoints, oldest first; of the last ones if there are no scores.

    Higher scores are better; updates without a score or with NaN are never among the best.
    """
    if scores is None:
        return sorted(updates)[-count:]
    scored = [update for update in updates if update in scores and scores[update] == scores[update]]
    return sorted(sorted(scored, key=lambda update: (-scores[update], update))[:count])
