"""Diverse beam search: groups of hypotheses that avoid each other's tokens (Vijayakumar et al., 2018).

The beam is divided into groups. At each position the groups choose one after the other, and a token costs
``diversity_strength`` for each earlier group that has chosen it (Hamming diversity, their equation 7). Only the choice
is affected: log-probabilities and scores of translations remain those of the model.

Shapes: B sentences, R rows, V target vocabulary, G groups, K beam size; each group has K / G places.
"""

from __future__ import annotations

import torch
from torch import Tensor

from econmt.decoding.search.beam import Places, SearchOptions, choose_places, highest


class Diversity:
    """Chooser of continuations in groups; implements :class:`econmt.decoding.search.beam.ContinuationChooser`."""

    def __init__(self, sentences: int, options: SearchOptions) -> None:
        self._count = options.beam_groups
        self._width = options.beam_size // options.beam_groups
        self._strength = options.diversity_strength
        self._owners = torch.arange(sentences)
        self._groups = torch.full((sentences,), -1)  # all groups extend the same initial row
        self._free = torch.full((sentences, self._count), self._width)
        self._chosen: dict[tuple[int, int], list[int]] = {}

    def limits(self, limits: Tensor, lengths: Tensor) -> Tensor:  # noqa: ARG002  groups need no room
        """Returns ``limits`` unchanged."""
        return limits

    def extend(
        self,
        log_probs: Tensor,
        totals: Tensor,
        sentences: Tensor,
        places: Tensor,  # noqa: ARG002  each group numbers its own places
        free: Tensor,
        room: Tensor,  # noqa: ARG002  there are no constraints that need room
        attention: Tensor,  # noqa: ARG002  nor terms with anchors
    ) -> Places:
        """See :meth:`ContinuationChooser.extend`."""
        owner_of = torch.zeros_like(free)
        owner_of[sentences] = self._owners
        costs = log_probs.new_zeros((len(free), log_probs.shape[1]))
        parts = []
        for group in range(self._count):
            rows = ((self._groups == group) | (self._groups < 0)).nonzero()[:, 0]
            if not len(rows):
                parts.append(_empty_places(len(free), self._width))
                continue
            sentence_of = sentences[rows]
            changed = log_probs[rows.to(log_probs.device)] - costs[sentence_of.to(costs.device)]
            values, words = (part.cpu() for part in highest(changed, min(self._width, changed.shape[1])))
            inside = torch.arange(len(rows)) - torch.searchsorted(sentence_of, sentence_of)
            part = choose_places(
                values, words, totals[rows], sentence_of, inside, self._free[owner_of, group], self._width
            )
            parents = rows[part.parents]
            real = log_probs[parents.to(log_probs.device), part.tokens.to(log_probs.device)].cpu()
            taken = part.ends | part.grows
            part = part._replace(
                totals=(totals[parents] + real).masked_fill(~taken, -torch.inf), parents=parents
            )
            parts.append(part)
            column = torch.full_like(owner_of, group)
            self._free.index_put_((owner_of, column), -part.ends.sum(dim=1), accumulate=True)
            at, places_taken = taken.nonzero(as_tuple=True)
            chosen = at.to(costs.device), part.tokens[at, places_taken].to(costs.device)
            costs.index_put_(chosen, costs.new_tensor(self._strength), accumulate=True)
        self._remember(parts)
        columns = zip(*(part[:5] for part in parts), strict=True)
        return Places(*(torch.cat(column, dim=1) for column in columns))

    def _remember(self, parts: list[Places]) -> None:
        """Records the groups of growing hypotheses by row and token, in the order of the search."""
        self._chosen = {}
        for group, part in enumerate(parts):
            cells = zip(part.parents[part.grows].tolist(), part.tokens[part.grows].tolist(), strict=True)
            for cell in cells:
                self._chosen.setdefault(cell, []).append(group)

    def added(self, parents: Tensor, penalty: Tensor) -> Tensor:  # noqa: ARG002  there are no terms
        """Returns zeros."""
        return torch.zeros(parents.shape, dtype=torch.float64)

    def grow(self, parents: Tensor, tokens: Tensor) -> None:
        """See :meth:`ContinuationChooser.grow`."""
        # Two groups may extend the initial row by the same token. These rows are equal, so the search keeps both or
        # neither, in the order of groups.
        groups = [self._chosen[cell].pop(0) for cell in zip(parents.tolist(), tokens.tolist(), strict=True)]
        self._owners = self._owners[parents]
        self._groups = torch.tensor(groups, dtype=torch.int64)


def _empty_places(sentences: int, width: int) -> Places:
    """Returns the places of a group without growing hypotheses."""
    shape = sentences, width
    none, zero = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.int64)
    totals = torch.full(shape, -torch.inf, dtype=torch.float64)
    return Places(totals, zero, zero, none, none)
