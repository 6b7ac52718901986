"""Times beam search on a GPU, batched and continuous.

    python -m scripts.bench gpu.search                       # recipe multi30k, untrained parameters
    python -m scripts.bench gpu.search --precision bfloat16

Translates a thousand sentences of random words, as long as those of Multi30k, in batches launched kernel by kernel and
by continuous batching in CUDA graphs. An untrained model does not end its sentences: they are cut at lengths that are
drawn beforehand. Both ways give the same hypotheses, except where two have equal scores up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from econmt.bench.rows import Row
from econmt.config.recipe import load_recipe
from econmt.data.text.vocabulary import EOS
from econmt.decoding.batches import batches_by_length, evaluation_mode, pad_sources
from econmt.decoding.search.beam import Hypothesis, SearchOptions, beam_search
from econmt.decoding.search.continuous import ContinuousSearch, Sentence
from econmt.model import IncrementalModel, TranslationModel
from econmt.model.inference.grid import Grid
from econmt.tasks.translation import TranslationTask
from econmt_ops.dispatch.timing import synchronizer
from scripts.bench.frame import Bench

LENGTH, SPREAD, LONGEST = 14.5, 4.5, 40
"""Mean, standard deviation and maximum of the tokens of a sentence."""
PASSES = 4
"""Searches of each kind, of which the fastest counts."""

Search = Callable[[list[Sentence]], list[list[Hypothesis]]]


def make_model(device: torch.device) -> TranslationModel:
    """Makes a model whose parameters are spread so that its words differ."""
    torch.manual_seed(1)
    model = TranslationTask(load_recipe("multi30k"), 6000, 6000).build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
        model.output.bias[EOS] = -30.0
    return model.to(device).eval()


def make_sentences(count: int, words: int) -> list[Sentence]:
    """Draws sentences, whose translations are cut at about their length."""
    draw = torch.Generator().manual_seed(1)
    lengths = (LENGTH + SPREAD * torch.randn(count, generator=draw)).round().clamp(3, LONGEST).long()
    others = (lengths * (1.0 + 0.15 * torch.randn(count, generator=draw))).round().clamp(2, LONGEST).long()
    return [
        Sentence(torch.randint(EOS + 1, words, (length,), generator=draw).tolist(), limit)
        for length, limit in zip(lengths.tolist(), others.tolist(), strict=True)
    ]


def in_batches(
    model: IncrementalModel,
    options: SearchOptions,
    device: torch.device,
    size: int,
    sentences: list[Sentence],
) -> list[list[Hypothesis]]:
    """Searches batches of sentences of similar length."""
    results: list[list[Hypothesis]] = [[] for _ in sentences]
    for batch in batches_by_length([len(sentence.ids) for sentence in sentences], size, size * 80):
        source, lengths = pad_sources([sentences[index].ids for index in batch], device)
        limits = torch.tensor([sentences[index].limit for index in batch])
        for index, each in zip(batch, beam_search(model, source, lengths, limits, options), strict=True):
            results[index] = each
    return results


def timed(
    search: Search, sentences: list[Sentence], device: torch.device
) -> tuple[float, list[list[Hypothesis]]]:
    """Returns the seconds of a search, and its hypotheses."""
    synchronizer(device)()
    began = time.perf_counter()
    hypotheses = search(sentences)
    return time.perf_counter() - began, hypotheses


def compare(ours: list[list[Hypothesis]], theirs: list[list[Hypothesis]]) -> tuple[int, float]:
    """Returns the number of equal best hypotheses, and the largest difference of their scores."""
    pairs = [(one[0], other[0]) for one, other in zip(ours, theirs, strict=True)]
    same = sum(one.ids == other.ids for one, other in pairs)
    return same, max(abs(one.score - other.score) for one, other in pairs)


def main(words: Sequence[str] | None = None) -> int:
    bench = Bench(__doc__, device="cuda")
    add = bench.add_argument
    add("--precision", choices=("float32", "bfloat16"), default="float32")
    add("--batch", type=int, nargs="+", default=[64, 256], help="sentences of a batch")
    add("--beam", type=int, default=5, help="beam size (%(default)s)")
    add("--sentences", type=int, default=1000, help="sentences to translate (%(default)s)")
    given = bench.begin(words)
    device, alike = given.device, True
    model = make_model(device)
    steps = IncrementalModel(model, getattr(torch, given.precision))
    sentences = make_sentences(given.sentences, model.source_size)
    options = SearchOptions(beam_size=given.beam, attention=False)
    bench.print_header(given.precision, f"beam {given.beam}", f"{given.sentences} sentences")

    def rows(size: int) -> Iterator[Row]:
        nonlocal alike
        slots = ContinuousSearch(partial(Grid, steps), options, device, size, size * 80, bench.say)
        batches = partial(in_batches, steps, options, device, size)
        ways: dict[str, Search] = {"batches": batches, "continuous": slots.search}
        results = {}
        for label, search in ways.items():
            runs = [timed(search, sentences, device) for _ in range(PASSES)]
            results[label] = hypotheses = runs[-1][1]
            best = min(seconds for seconds, _ in runs)
            tokens = sum(len(each[0].ids) for each in hypotheses)
            row: Row = {"batch": size, "search": label, "first, s": runs[0][0], "seconds": best}
            row |= {"sentences/s": len(hypotheses) / best, "tokens/s": tokens / best}
            if label == "continuous":
                same, apart = compare(hypotheses, results["batches"])
                row |= {"same best": f"{same} of {len(sentences)}", "scores apart": f"{apart:.1e}"}
                alike &= same >= 0.99 * len(sentences) or given.precision != "float32"
            yield row

    with evaluation_mode([model]):
        bench.report(row for size in given.batch for row in rows(size))
    return 0 if alike else 1
