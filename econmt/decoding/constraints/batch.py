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

from econmt.data.text.vocabulary import EOS
from econmt.decoding.constraints.anchors import Anchors
from econmt.decoding.constraints.avoidance import START, Avoidance, Moves
from econmt.decoding.constraints.inclusion import Automata, Phrase, Phrases, share_out
from econmt.decoding.search.beam import Places, SearchOptions, highest, length_penalty, places_of

_RISKY = -2
"""Column of the candidates that complete an avoided phrase unless the word continues."""


class DecodingConstraints(NamedTuple):
    """Constraints on one sentence's translation.

    Attributes:
        phrases: phrases that it must contain.
        prefix: tokens that it begins with.
        avoidances: automata of phrases that it must not contain.
        spans: source positions that each of the first phrases translates; none for the rest.
    """

    phrases: tuple[Phrase, ...] = ()
    prefix: tuple[int, ...] = ()
    avoidances: tuple[Avoidance, ...] = ()
    spans: tuple[tuple[int, ...], ...] = ()

    @property
    def ids(self) -> list[int]:
        """Tokens of the prefix and of all phrases."""
        return [*self.prefix, *(token for phrase in self.phrases for token in phrase.ids)]


class ConstrainedContinuations:
    """Chooser of continuations under constraints; implements :class:`econmt.decoding.search.beam.ContinuationChooser`.

    ``joins`` (V,) bool is True for tokens that continue a word.
    """

    def __init__(
        self, constraints: Sequence[DecodingConstraints], joins: Tensor, options: SearchOptions
    ) -> None:
        flags = joins.tolist()
        self._options, self._beam, self._joins = options, options.beam_size, joins
        self._block = options.block_ngram_repeat
        self._automata = Automata([Phrases(each.phrases, flags) for each in constraints], joins)
        self._prefixes = [each.prefix for each in constraints]
        longest = max(len(prefix) for prefix in self._prefixes) + 1
        padded = [[*prefix, *[-1] * (longest - len(prefix))] for prefix in self._prefixes]
        self._forced = torch.tensor(padded, dtype=torch.int64)
        self._states, self._needed = self._automata.start(self._prefixes)
        self._owners = torch.arange(len(constraints))
        spans = [[*each.spans, *[()] * (len(each.phrases) - len(each.spans))] for each in constraints]
        self._ignored: Tensor | None = None
        self._usual_penalties = torch.ones(len(constraints))
        self._anchors = Anchors([each.phrases for each in constraints], spans, self._automata)
        self._history = torch.zeros(len(constraints), 0, dtype=torch.int64)
        self._avoidances = [each.avoidances for each in constraints]
        self._reached = [(START,) * len(each.avoidances) for each in constraints]
        self._avoids = any(self._avoidances)

    def limits(self, limits: Tensor, lengths: Tensor) -> Tensor:
        """See :meth:`ContinuationChooser.limits`."""
        self._usual_penalties = length_penalty(lengths + self._anchors.growth, self._options)
        least = [len(prefix) + needed for prefix, needed in zip(self._prefixes, self._needed, strict=True)]
        return torch.maximum(limits, torch.tensor(least))

    def extend(
        self,
        log_probs: Tensor,
        totals: Tensor,
        sentences: Tensor,
        places: Tensor,
        free: Tensor,
        room: Tensor,
        attention: Tensor,
    ) -> Places:
        """See :meth:`ContinuationChooser.extend`."""
        withheld = None
        if self._anchors.any:
            self._anchors.look(attention, self._owners)
            anywhere = self._falls_back(log_probs, sentences, free, room)[:, None]
            withheld, self._ignored = (
                mask & ~anywhere for mask in self._anchors.away(self._states, self._owners)
            )
        unchanged = log_probs.clone() if self._avoids else log_probs
        values, tokens, remaining = self._possible(log_probs, room, withheld, self._moves())
        if self._avoids:
            goes_on = free < self._beam
            goes_on[sentences[(values > -torch.inf).any(dim=1)]] = True
            stuck = ~goes_on[sentences, None]
            # Constraints may leave room for avoided phrases only, which are better than no translation at all.
            if stuck.any():
                others = self._possible(unchanged, room, withheld, [])
                values, tokens, remaining = (
                    torch.where(stuck, new, old)
                    for new, old in zip(others, (values, tokens, remaining), strict=True)
                )
        costs = None
        if self._anchors.any:
            outside = remaining >= self._automata.remaining(self._states)[:, None]
            costs = self._anchors.costs(values, tokens, outside)
            values = values.masked_fill(self._lost(sentences, free)[:, None], -torch.inf)
        shape = len(free), self._beam, values.shape[1]
        grid = totals.new_full(shape, -torch.inf)
        grid[sentences, places] = totals[:, None] + values - (0.0 if costs is None else costs)
        # Hypotheses with all phrases get a separate bank from the next token on; otherwise those that complete their
        # last phrase now would always replace them.
        settled = (remaining == 0) & (self._automata.remaining(self._states) == 0)[:, None]
        banks = torch.zeros(shape, dtype=torch.int64)
        banks[sentences, places] = self._automata.sizes[self._owners][:, None] - remaining + settled
        flat = grid.view(len(free), -1)
        if self._avoids:
            flat = _few(grid, shape[2] + _RISKY, free // 2).view(len(free), -1)
        chosen = share_out(flat, banks.view(len(free), -1), self._beam)
        found = places_of(flat.gather(1, chosen), chosen, sentences, places, tokens, free)
        return found if costs is None else found._replace(costs=costs[found.parents, chosen % shape[2]])

    def added(self, parents: Tensor, penalty: Tensor) -> Tensor:
        """See :meth:`ContinuationChooser.added`."""
        if not self._anchors.any:
            return torch.zeros(parents.shape, dtype=torch.float64)
        # All translations of a sentence have the same terms. If they are improbable, length must not outweigh them.
        usual, given = self._usual_penalties[self._owners[parents]], self._anchors.given[parents]
        return given / usual.clamp(max=penalty) - given / penalty

    def _lost(self, sentences: Tensor, free: Tensor) -> Tensor:
        """Returns (R,) bool, True for rows that have translated a term in another way, where there are better ones."""
        lost = self._anchors.lost(self._owners)
        better = torch.zeros(len(free), dtype=torch.bool)
        better[sentences[~lost]] = True
        better |= free < self._beam  # a translation with all terms has ended
        return lost & better[sentences]

    def _falls_back(self, log_probs: Tensor, sentences: Tensor, free: Tensor, room: Tensor) -> Tensor:
        """Returns (R,) bool, True for rows whose missing terms may begin anywhere.

        These are the rows of sentences without a better one, with fewer missing tokens, that would end now, or have no
        room to wait.
        """
        remaining = self._automata.remaining(self._states)
        least = torch.full((len(free),), torch.iinfo(torch.int64).max)
        least = least.scatter_reduce(0, sentences, remaining, "amin")
        least[free < self._beam] = 0  # a translation with all phrases has ended
        ends = (log_probs.argmax(dim=1) == EOS).cpu()
        return (ends & (remaining == least[sentences])) | (remaining >= room)

    def grow(self, parents: Tensor, tokens: Tensor) -> None:
        """See :meth:`ContinuationChooser.grow`."""
        self._owners = self._owners[parents]
        ignored = None if self._ignored is None else self._ignored[parents]
        moved = self._automata.after(self._states[parents], self._owners, tokens[:, None], ignored)[:, 0]
        self._automata.expand(moved)
        if self._anchors.any:
            self._anchors.grow(parents, self._owners, tokens, self._states[parents], moved)
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

    def _possible(
        self, log_probs: Tensor, room: Tensor, withheld: Tensor | None, moves: Sequence[tuple[Moves, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns candidates as :meth:`_continuations`, ruled out without room for the rest, and what remains then."""
        values, tokens = self._continuations(log_probs, room, withheld, moves)
        after = self._automata.after(self._states, self._owners, tokens, self._ignored)
        remaining = self._automata.remaining(after)
        needed = remaining.clone()
        needed[:, _RISKY] += 1  # a word that is avoided unless it continues needs room to do so
        return values.masked_fill(needed > room.clamp(min=0)[:, None], -torch.inf), tokens, remaining

    def _continuations(
        self, log_probs: Tensor, room: Tensor, withheld: Tensor | None, moves: Sequence[tuple[Moves, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities (R, W + M + 3) of candidate tokens, and the tokens; -inf if ruled out.

        Candidates are the most probable tokens, those of constraints, EOS, one that may lead to an avoided phrase, and
        one that continues the last word of a constraint.
        """
        device, position = log_probs.device, self._history.shape[1]
        remaining = self._automata.remaining(self._states)
        forced = self._forced[self._owners, min(position, self._forced.shape[1] - 1)]
        of_forced = log_probs.gather(1, forced.clamp(min=0)[:, None].to(device)).cpu()
        self._rule_out_avoided(log_probs, moves, room)
        offered = self._automata.offered(self._states)
        if withheld is not None:
            offered &= ~withheld
        offers = self._automata.tokens[self._owners].clamp(min=0)
        of_offers = log_probs.gather(1, offers.to(device)).cpu().masked_fill(~offered, -torch.inf)
        rest = [self._take_risky(log_probs, moves), self._take_joining(log_probs)]
        if self._block:
            # If the next token must be one of a constraint, it is taken even if it repeats an n-gram.
            self._rule_out_repeated(log_probs, remaining <= room)
        log_probs[(remaining > 0).to(device), EOS] = -torch.inf
        best = highest(log_probs, min(self._beam, log_probs.shape[1]))
        values, tokens = (part.cpu() for part in best)
        end = torch.full((len(tokens), 1), EOS), log_probs[:, EOS].cpu()[:, None]
        for more, more_values in ((offers, of_offers), end, *rest):
            listed = (more[:, :, None] == tokens[:, None, :]) & (values > -torch.inf)[:, None, :]
            tokens = torch.cat([tokens, more], dim=1)
            values = torch.cat([values, more_values.masked_fill(listed.any(dim=2), -torch.inf)], dim=1)
        only = (forced >= 0)[:, None]
        values = values.masked_fill(only, -torch.inf)
        values[:, :1] = torch.where(only, of_forced, values[:, :1])
        tokens[:, :1] = torch.where(only, forced[:, None], tokens[:, :1])
        return values, tokens

    def _moves(self) -> list[tuple[Moves, Tensor]]:
        """Returns the consequences of next tokens, each with the rows that share it."""
        by_moves: dict[int, tuple[Moves, list[int]]] = {}
        for row, owner in enumerate(self._owners.tolist() if self._avoids else ()):
            for avoidance, reached in zip(self._avoidances[owner], self._reached[row], strict=True):
                moves = avoidance.moves(reached)
                by_moves.setdefault(id(moves), (moves, []))[1].append(row)
        return [(moves, torch.tensor(at)) for moves, at in by_moves.values()]

    def _rule_out_avoided(
        self, log_probs: Tensor, moves_of: Sequence[tuple[Moves, Tensor]], room: Tensor
    ) -> None:
        """Sets tokens to -inf that would complete an avoided phrase, or have no room to avoid it by continuing."""
        device = log_probs.device
        for moves, rows in moves_of:
            at = rows.to(device)
            log_probs[at[:, None], moves.masked.to(device)] = -torch.inf
            last = rows[room[rows] <= 0].to(device)
            log_probs[last[:, None], moves.risky.to(device)] = -torch.inf
            if moves.only_joining:
                log_probs[at] = log_probs[at].masked_fill(~self._joins.to(device), -torch.inf)

    def _take_risky(
        self, log_probs: Tensor, moves_of: Sequence[tuple[Moves, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """Sets tokens that complete an avoided phrase unless a word continues to -inf.

        Returns:
            (R, 1) the best of them in each row, and (R, 1) its log-probability; -inf if there is none.
        """
        count = len(log_probs)
        tokens, values = torch.zeros(count, 1, dtype=torch.int64), torch.full((count, 1), -torch.inf)
        device = log_probs.device
        for moves, rows in moves_of:
            if len(moves.risky):
                at, risky = rows.to(device)[:, None], moves.risky.to(device)
                best, which = (part.cpu() for part in log_probs[at, risky].max(dim=1))
                log_probs[at, risky] = -torch.inf
                better = best > values[rows, 0]
                values[rows[better], 0] = best[better]
                tokens[rows[better], 0] = moves.risky[which[better]]
        return tokens, values

    def _take_joining(self, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Does the same for tokens that continue the word that has just completed a phrase."""
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
    """Returns ``grid`` (B, K, N) with all but the ``most`` (B,) best values of one column set to -inf."""
    order = grid[:, :, column].argsort(dim=1, descending=True, stable=True)
    late = (torch.arange(grid.shape[1]) >= most[:, None]).expand_as(order)
    fewer = grid.clone()
    fewer[:, :, column].masked_fill_(torch.zeros_like(late).scatter(1, order, late), -torch.inf)
    return fewer
