"""Constraints of a batch's translations, tracked through a beam search.

Target prefixes are forced, avoided phrases and repeated n-grams are ruled out, and the beam is allocated so that every
translation contains its phrases. Log-probabilities remain those of the model.

Shapes: B sentences, R rows, V target vocabulary, W candidate tokens of a row, M tokens of constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.data.text.subwords import EOS
from econmt.decoding.constraints.avoidance import START, Avoidance, Moves
from econmt.decoding.constraints.inclusion import Automata, Phrase, Phrases, share_out
from econmt.decoding.search.beam import Places, SearchOptions, highest, places_of

_RISKY = -2
"""The column of continuations with a token that writes an avoided phrase unless a word goes on."""


class DecodingConstraints(NamedTuple):
    """Constraints on one sentence's translation.

    Attributes:
        phrases: phrases that it must contain.
        prefix: tokens that it begins with.
        avoidances: automata of phrases that it must not contain.
    """

    phrases: tuple[Phrase, ...] = ()
    prefix: tuple[int, ...] = ()
    avoidances: tuple[Avoidance, ...] = ()

    @property
    def ids(self) -> list[int]:
        """The tokens that it may take to write what the translation must hold."""
        return [*self.prefix, *(token for phrase in self.phrases for token in phrase.ids)]


class ConstrainedContinuations:
    """Chooses the continuations of a search's hypotheses; see :class:`econmt.decoding.search.beam.ContinuationChooser`.

    Args:
        sentence_constraints: constraints of each sentence.
        joins: (V,) bool, True for tokens that continue a word.
        options: options of the search.
    """

    def __init__(
        self, sentence_constraints: Sequence[DecodingConstraints], joins: Tensor, options: SearchOptions
    ) -> None:
        flags = joins.tolist()
        self._beam, self._block, self._joins = options.beam_size, options.block_ngram_repeat, joins
        self._automata = Automata(
            [Phrases(constraints.phrases, flags) for constraints in sentence_constraints], joins
        )
        self._prefixes = [constraints.prefix for constraints in sentence_constraints]
        longest = max(len(prefix) for prefix in self._prefixes) + 1
        padded = [[*prefix, *[-1] * (longest - len(prefix))] for prefix in self._prefixes]
        self._forced = torch.tensor(padded, dtype=torch.int64)
        self._states, self._wanted = self._automata.start(self._prefixes)
        self._owners = torch.arange(len(sentence_constraints))
        self._history = torch.zeros(len(sentence_constraints), 0, dtype=torch.int64)
        self._avoidances = [constraints.avoidances for constraints in sentence_constraints]
        self._reached = [(START,) * len(constraints.avoidances) for constraints in sentence_constraints]
        self._avoids = any(self._avoidances)

    def limits(self, limits: Tensor) -> Tensor:
        """Returns ``limits`` (B,), increased where prefix and constraints would not fit."""
        least = [len(prefix) + wanted for prefix, wanted in zip(self._prefixes, self._wanted, strict=True)]
        return torch.maximum(limits, torch.tensor(least))

    def extend(
        self, log_probs: Tensor, totals: Tensor, sentences: Tensor, places: Tensor, free: Tensor, room: Tensor
    ) -> Places:
        """See :meth:`ContinuationChooser.extend`."""
        values, tokens = self._continuations(log_probs, room)
        after = self._automata.after(self._states, self._owners, tokens)
        wanted = self._automata.remaining(after)
        needed = wanted.clone()
        needed[:, _RISKY] += 1  # a word that is avoided unless it continues needs room to do so
        values = values.masked_fill(needed > room.clamp(min=0)[:, None], -torch.inf)
        shape = len(free), self._beam, values.shape[1]
        grid = totals.new_full(shape, -torch.inf)
        grid[sentences, places] = totals[:, None] + values
        # Hypotheses with all phrases get a bank of their own from the next token on; else those that have postponed
        # their last phrase the longest would always replace them.
        settled = (wanted == 0) & (self._automata.remaining(self._states) == 0)[:, None]
        held = torch.zeros(shape, dtype=torch.int64)
        held[sentences, places] = self._automata.sizes[self._owners][:, None] - wanted + settled
        flat = grid.view(len(free), -1)
        if self._avoids:
            flat = _few(grid, shape[2] + _RISKY, free // 2).view(len(free), -1)
        chosen = share_out(flat, held.view(len(free), -1), self._beam)
        row_at = sentences.new_zeros(shape[:2])
        row_at[sentences, places] = torch.arange(len(sentences))
        return places_of(flat.gather(1, chosen), chosen, row_at, tokens, free)

    def grow(self, parents: Tensor, tokens: Tensor) -> None:
        """See :meth:`ContinuationChooser.grow`."""
        self._owners = self._owners[parents]
        moved = self._automata.after(self._states[parents], self._owners, tokens[:, None])[:, 0]
        self._automata.expand(moved)
        self._states = moved
        self._history = torch.cat([self._history[parents], tokens[:, None]], dim=1)
        if self._avoids:
            rows = zip(self._owners.tolist(), parents.tolist(), tokens.tolist(), strict=True)
            before = self._reached
            self._reached = [
                tuple(
                    avoidance.after(reached, token)
                    for avoidance, reached in zip(self._avoidances[owner], before[row], strict=True)
                )
                for owner, row, token in rows
            ]

    def _continuations(self, log_probs: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities (R, W + M + 3) of candidate tokens, and the tokens; -inf if ruled out.

        Candidates are the most probable tokens, those of constraints, EOS, one that may lead to an avoided phrase, and
        one that continues the last word of a constraint.
        """
        device, position = log_probs.device, self._history.shape[1]
        wanted = self._automata.remaining(self._states)
        # If the next token must be one of a constraint, it is taken even if it is ruled out.
        open_rows = wanted <= room
        forced = self._forced[self._owners, min(position, self._forced.shape[1] - 1)]
        given = log_probs.gather(1, forced.clamp(min=0)[:, None].to(device)).cpu()
        said = self._moves(open_rows) if self._avoids else []
        self._rule_out_avoided(log_probs, said)
        sentence_constraints, offered = (
            self._automata.tokens[self._owners].clamp(min=0),
            self._automata.offered(self._states),
        )
        offers = log_probs.gather(1, sentence_constraints.to(device)).cpu().masked_fill(~offered, -torch.inf)
        rest = [self._take_risky(log_probs, said, room), self._take_joining(log_probs)]
        if self._block:
            self._rule_out_repeated(log_probs, open_rows)
        log_probs[(wanted > 0).to(device), EOS] = -torch.inf
        found, words = (part.cpu() for part in highest(log_probs, min(self._beam, log_probs.shape[1])))
        end = log_probs[:, EOS].cpu()[:, None]
        tokens, values = words, found
        for more, theirs in (
            (sentence_constraints, offers),
            (torch.full_like(sentence_constraints[:, :1], EOS), end),
            *rest,
        ):
            listed = (more[:, :, None] == tokens[:, None, :]) & (values > -torch.inf)[:, None, :]
            tokens = torch.cat([tokens, more], dim=1)
            values = torch.cat([values, theirs.masked_fill(listed.any(dim=2), -torch.inf)], dim=1)
        only = (forced >= 0)[:, None]
        values = values.masked_fill(only, -torch.inf)
        values[:, :1] = torch.where(only, given, values[:, :1])
        tokens[:, :1] = torch.where(only, forced[:, None], tokens[:, :1])
        return values, tokens

    def _moves(self, rows: Tensor) -> list[tuple[Moves, Tensor]]:
        """Returns the consequences of next tokens for ``rows`` (R,) bool, each with the rows that it applies to."""
        found: dict[int, tuple[Moves, list[int]]] = {}
        for row in rows.nonzero()[:, 0].tolist():
            avoidances = self._avoidances[int(self._owners[row])]
            for avoidance, reached in zip(avoidances, self._reached[row], strict=True):
                moves = avoidance.moves(reached)
                found.setdefault(id(moves), (moves, []))[1].append(row)
        return [(moves, torch.tensor(at)) for moves, at in found.values()]

    def _rule_out_avoided(self, log_probs: Tensor, said: Sequence[tuple[Moves, Tensor]]) -> None:
        """Sets tokens that would complete an avoided phrase to -inf."""
        device = log_probs.device
        for moves, rows in said:
            at = rows.to(device)
            log_probs[at[:, None], moves.masked.to(device)] = -torch.inf
            if moves.only_joining:
                log_probs[at] = log_probs[at].masked_fill(~self._joins.to(device), -torch.inf)

    def _take_risky(
        self, log_probs: Tensor, said: Sequence[tuple[Moves, Tensor]], room: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sets tokens that complete an avoided phrase unless a word continues to -inf.

        Returns:
            (R, 1) the best of them in each row, and (R, 1) its log-probability; -inf if there is none, or no room for
            the word to continue.
        """
        tokens, values = torch.zeros(len(room), 1, dtype=torch.int64), torch.full((len(room), 1), -torch.inf)
        device = log_probs.device
        for moves, rows in said:
            if len(moves.risky):
                at, risky = rows.to(device)[:, None], moves.risky.to(device)
                best, which = (part.cpu() for part in log_probs[at, risky].max(dim=1))
                log_probs[at, risky] = -torch.inf
                better = (best > values[rows, 0]) & (room[rows] > 0)
                values[rows[better], 0] = best[better]
                tokens[rows[better], 0] = moves.risky[which[better]]
        return tokens, values

    def _take_joining(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sets tokens that continue a word to -inf where it has just ended a constraint; returns as _take_risky."""
        rows = self._automata.at_word_end(self._states)
        tokens, values = torch.zeros(len(rows), 1, dtype=torch.int64), torch.full((len(rows), 1), -torch.inf)
        if rows.any() and self._joins.any():
            at = rows.nonzero().to(log_probs.device)
            joining = self._joins.nonzero()[:, 0].to(log_probs.device)
            best, which = log_probs[at, joining].max(dim=1)
            log_probs[at, joining] = -torch.inf
            tokens[rows, 0], values[rows, 0] = joining[which].cpu(), best.cpu()
        return tokens, values

    def _rule_out_repeated(self, log_probs: Tensor, rows: Tensor) -> None:
        """Sets tokens that would write an n-gram of the same hypothesis again to -inf."""
        width, history = self._block, self._history
        if history.shape[1] < width:
            return
        windows = history.unfold(1, width, 1)
        begun = history[:, history.shape[1] - width + 1 :]
        same = (windows[:, :, :-1] == begun[:, None, :]).all(dim=2) & rows[:, None]
        row, at = same.nonzero(as_tuple=True)
        log_probs[row.to(log_probs.device), windows[row, at, -1].to(log_probs.device)] = -torch.inf


def _few(grid: Tensor, column: int, most: Tensor) -> Tensor:
    """Returns ``grid`` (B, K, N) with only the ``most`` (B,) best values of each column; the others are -inf."""
    order = grid[:, :, column].argsort(dim=1, descending=True, stable=True)
    late = (torch.arange(grid.shape[1]) >= most[:, None]).expand_as(order)
    fewer = grid.clone()
    fewer[:, :, column].masked_fill_(torch.zeros_like(late).scatter(1, order, late), -torch.inf)
    return fewer
