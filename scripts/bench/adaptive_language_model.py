"""Measures perplexity of a model that adapts to the text.

    python -m scripts.bench adaptive-language-model runs/wikitext2-awd test.txt.gz --cache 3785

Neural cache (Grave et al. 2017, arXiv 1612.04426). With h_t the input of the output layer at position t, and x_{t+1}
the token that follows, the model's distribution p is mixed with that of the last n positions:

    (1 - lambda) p(w) + lambda sum_i 1[x_{i+1} = w] exp(theta h_t . h_i) / sum_i exp(theta h_t . h_i)

Dynamic evaluation (Krause et al. 2018, arXiv 1709.07432). The text is read in segments. After each, with g the gradient
of its mean loss and q_0 the trained parameters, the parameters q change by

    - rate g + decay (q_0 - q)                                                   stochastic gradient descent
    - rate g / (r + eps) + min(decay r / mean(r), 1) (q_0 - q)                   with statistics, r = sqrt(mean(g'^2))

where g' are the gradients of segments of a training text in 100 rows, and mean(r) is the mean over all parameter
tensors of their means.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import econmt
from econmt.data.text.corpus import read_lines
from econmt.data.text.vocabulary import EOS
from econmt.decoding.text_reader import WINDOW
from econmt.model.language_model import LanguageModel, State
from econmt_ops import linear_cross_entropy
from econmt_ops.core.precision import autocast_to
from scripts.bench.frame import Bench

EPSILON = 1e-3
ROWS = 100


def losses_of(
    model: LanguageModel, inputs: Tensor, targets: Tensor, state: State | None, precision: torch.dtype
) -> tuple[Tensor, Tensor, State]:
    """Returns the output layer's inputs (N, D), the loss of each token (N,), and the detached states after them."""
    with autocast_to(inputs.device, precision):
        hidden, after = model(inputs, state)
        hidden, output = hidden.flatten(0, 1), model.output
        losses = linear_cross_entropy(
            hidden, output.weight, targets.flatten(), bias=output.bias, reduction="none"
        )
    return hidden.detach(), losses, tuple(tuple(part.detach() for part in parts) for parts in after)


class DynamicUpdates:
    """Updates of a model's parameters during dynamic evaluation; ``training`` are ids for the statistics, or empty."""

    def __init__(
        self,
        model: LanguageModel,
        rate: float,
        decay: float,
        segment: int,
        training: list[int],
        precision: torch.dtype,
    ) -> None:
        self.parameters = [*model.requires_grad_().parameters()]
        self.trained = [parameter.detach().clone() for parameter in self.parameters]
        self.rate, self.divisors = rate, [torch.ones_like(parameter) for parameter in self.trained]
        self.decays = [torch.full_like(parameter, decay) for parameter in self.trained]
        if training:
            roots = self._root_mean_squares(model, segment, training, precision)
            mean = torch.stack([root.mean() for root in roots]).mean()
            self.divisors = [root + EPSILON for root in roots]
            self.decays = [(decay * root / mean).clamp_(max=1.0) for root in roots]

    def _root_mean_squares(
        self, model: LanguageModel, segment: int, training: list[int], precision: torch.dtype
    ) -> list[Tensor]:
        rows = max(1, min(ROWS, len(training) // segment))
        length = len(training) // rows
        ids = torch.tensor([EOS, *training[: rows * length]], device=self.parameters[0].device)
        inputs, targets = ids[:-1].view(rows, length), ids[1:].view(rows, length)
        squares, state = [torch.zeros_like(parameter) for parameter in self.parameters], None
        windows = [slice(first, first + segment) for first in range(0, length, segment)]
        for window in windows:
            _, losses, state = losses_of(model, inputs[:, window], targets[:, window], state, precision)
            gradients = torch.autograd.grad(losses.mean(), self.parameters)
            torch._foreach_addcmul_(squares, gradients, gradients)
        return [(square / len(windows)).sqrt_() for square in squares]

    def learn(self, loss: Tensor) -> None:
        """Updates the parameters after a segment of this mean loss."""
        gradients = torch.autograd.grad(loss, self.parameters)
        with torch.no_grad():
            torch._foreach_lerp_(self.parameters, self.trained, self.decays)
            torch._foreach_addcdiv_(self.parameters, gradients, self.divisors, value=-self.rate)


def mix_with_cache(
    hidden: Tensor, targets: Tensor, log_probs: Tensor, first: int, size: int, theta: float, weight: float
) -> Tensor:
    """Mixes the log-probabilities of tokens from position ``first`` on with a cache of the positions before each."""
    start = max(0, first - size)
    here = torch.arange(first, first + len(log_probs), device=hidden.device)[:, None]
    cached = torch.arange(start, first + len(log_probs), device=hidden.device)
    scores = theta * hidden[here[:, 0]] @ hidden[cached].t()
    scores = scores.masked_fill((cached >= here) | (cached < here - size), -math.inf)
    same = scores.masked_fill(targets[here] != targets[cached], -math.inf)
    of_cache = same.logsumexp(1) - scores.logsumexp(1)
    mixed = torch.logaddexp(log_probs + math.log1p(-weight), of_cache.double() + math.log(weight))
    return torch.where(here[:, 0] > 0, mixed, log_probs)  # nothing is cached at the first token


def log_probabilities(
    model: LanguageModel,
    ids: list[int],
    precision: torch.dtype,
    *,
    updates: DynamicUpdates | None = None,
    segment: int = WINDOW,
    cache: tuple[int, float, float] | None = None,
) -> Tensor:
    """Returns the log-probability of each token of a text; ``cache`` is its size, theta and weight."""
    text = torch.tensor([EOS, *ids], device=next(model.parameters()).device)
    state, parts, states = None, [], []
    for window in text[1:].split(segment):
        first = sum(map(len, parts))
        inputs = text[first : first + len(window)]
        with torch.set_grad_enabled(updates is not None):
            hidden, losses, state = losses_of(model, inputs[None], window[None], state, precision)
        parts.append(-losses.detach().double())
        states.append(hidden.to(torch.promote_types(hidden.dtype, torch.float32)))
        if updates is not None and len(window) == segment:
            updates.learn(losses.mean())
    found = torch.cat(parts)
    if cache is None:
        return found
    hidden, targets = torch.cat(states), text[1:]
    positions = range(0, len(found), WINDOW)
    return torch.cat(
        [mix_with_cache(hidden, targets, found[each : each + WINDOW], each, *cache) for each in positions]
    )


def main(words: Sequence[str] | None = None) -> None:
    bench = Bench(__doc__)
    add = bench.add_argument
    add("model", type=Path, help="model folder of a language model")
    add("text", type=Path, help="text to score, also .gz")
    add("--cache", type=int, help="number of positions in a neural cache, for example 3785")
    add("--theta", type=float, default=0.6625)
    add("--weight", type=float, default=0.1279, help="lambda of the cache, below 1")
    add("--segment", type=int, help="tokens of a segment; turns dynamic evaluation on")
    add("--rate", type=float, help="0.3, or 0.002 with statistics")
    add("--decay", type=float, default=0.02)
    add("--statistics", type=Path, help="training text of the statistics, also .gz")
    given = bench.begin(words)
    loaded = econmt.load(given.model)
    model, precision, vocabulary = loaded.models[0], loaded.precision, loaded.vocabularies.target

    def ids_of(file: Path) -> tuple[list[int], int]:
        lines = list(read_lines(file))
        ids = [token for line in vocabulary.encode_many(lines) for token in (*line, EOS)]
        return ids, sum(len(line.split()) + 1 for line in lines)

    ids, count = ids_of(given.text)
    updates = None
    if given.segment:
        training = ids_of(given.statistics)[0] if given.statistics else []
        rate = given.rate or (0.002 if training else 0.3)
        updates = DynamicUpdates(model, rate, given.decay, given.segment, training, precision)
    cache = (given.cache, given.theta, given.weight) if given.cache else None
    found = log_probabilities(
        model, ids, precision, updates=updates, segment=given.segment or WINDOW, cache=cache
    )
    print(f"perplexity a word {math.exp(-float(found.sum()) / count):.2f}, {count:,} words")
