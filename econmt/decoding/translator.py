"""From lines of text to lines of text.

The trainer validates with the same :class:`Translator` that ``econmt translate`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from econmt import recipe
from econmt.data.subwords import EOS, PAD, Vocabularies
from econmt.decoding.continuous import ContinuousSearch, Sentence
from econmt.decoding.ensemble import as_one
from econmt.decoding.sampling import sample
from econmt.decoding.search import Hypothesis, SearchOptions, beam_search, output_limits
from econmt.decoding.search_model import SearchModel
from econmt.errors import EconmtError
from econmt.model import IncrementalModel
from econmt.model.inference.grid import Grid

CHUNK_SIZE = 1024

_CHARACTERS_A_TOKEN = 50
"""More than tokens have on average: lines with more characters than the longest source can have are not even cut into
tokens, which takes minutes for a word of megabytes."""


class NBestEntry(NamedTuple):
    """One translation of a line: a hypothesis as text.

    Attributes:
        text: detokenised text, always a single line.
        tokens: the same as the vocabulary cuts it, EOS left out.
        ids, score, log_probability, attention, cut: see :class:`~econmt.decoding.search.Hypothesis`.
    """

    text: str
    tokens: list[str]
    ids: list[int]
    score: float
    log_probability: float
    attention: Tensor | None
    cut: bool


class Translation(NamedTuple):
    """What became of one line; the fields up to ``attention`` are those of its best hypothesis.

    A blank line is translated by an empty line with probability 1, without asking the model; it has no hypotheses.
    """

    text: str
    score: float
    log_probability: float
    tokens: list[str]
    attention: Tensor | None
    hypotheses: list[NBestEntry]
    source_tokens: list[str]


EMPTY = Translation("", 0.0, 0.0, [], None, [], [])


def one_line(text: str) -> str:
    """``text`` without the line breaks that would shift all lines after it, and without blanks at its ends.

    Byte subwords can produce both, and the sign for a blank may come as a subword of its own.
    """
    return text.replace("\n", " ").replace("\r", " ").strip()


def pad_sources(sources: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Source ids (B, S) with EOS and padding, and lengths (B,) that count EOS, from ids without them."""
    lengths = torch.tensor([len(ids) + 1 for ids in sources], dtype=torch.int64)
    source = torch.full((len(sources), int(lengths.max())), PAD, dtype=torch.int64)
    for row, ids in enumerate(sources):
        source[row, : len(ids) + 1] = torch.tensor([*ids, EOS])
    return source.to(device), lengths.to(device)


def batches_by_length(lengths: Sequence[int], batch_size: int, tokens: int) -> list[list[int]]:
    """Batches of indices, sentences of like length together, longest first.

    Args:
        lengths: of each sentence. batch_size: most sentences in a batch. tokens: most padded tokens in a batch of more
            than one sentence, so that very long lines go alone.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    batches: list[list[int]] = []
    for index in order:
        last = batches[-1] if batches else []
        if last and len(last) < batch_size and (len(last) + 1) * lengths[last[0]] <= tokens:
            last.append(index)
        else:
            batches.append([index])
    return batches


@contextmanager
def evaluation_mode(models: Sequence[object]) -> Iterator[None]:
    """Switch dropout and cuDNN's TF32 off for the time of the context, and back to what they were.

    PyTorch lets cuDNN compute the LSTMs of whole sentences in TF32, but not the single steps of a search: with it a
    translation and the same words scored would differ in the fourth digit.
    """
    training = [model for model in models if isinstance(model, nn.Module) and model.training]
    allowed = torch.backends.cudnn.allow_tf32
    for model in training:
        model.eval()
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
        for model in training:
            model.train()


def autocast(device: torch.device, precision: torch.dtype) -> torch.autocast:
    """The context in which products are made in ``precision``, float32 or bfloat16."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == torch.bfloat16)


class Translator:
    """Translates lines with one model or an ensemble.

    Args:
        models: models on ``device``, all with these vocabularies; :class:`econmt.model.IncrementalModel` makes one of a
            trained model.
        vocabularies: source and target vocabulary.
        options: how to search; a recipe's ``decoding`` section also gives the batch size.
        device: where the models are.
        batch_size: sentences translated together; None: the recipe's, or 64.
        chunk_size: lines read before any is translated; sorted by length within.
        max_length: the longest source the models were trained on, in tokens; lines beyond it are warned of.
        max_input_length: the longest source, in tokens, that is translated whole; None: a recipe's default.
        long_lines: what becomes of a longer one: "cut" translates its beginning, "skip" gives an empty line.
        warn: takes one line about a doubtful input line.
        watch: called between the steps of a search; what it raises ends it.
        continuous: whether beam search with one model lets sentences take one another's places, on a GPU in CUDA graphs
            (:mod:`econmt.decoding.continuous`), where there are enough of them; None: on a GPU. Results are the same.
    """

    def __init__(
        self,
        models: Sequence[SearchModel],
        vocabularies: Vocabularies,
        options: recipe.Decoding | SearchOptions,
        device: torch.device | str = "cpu",
        *,
        batch_size: int | None = None,
        chunk_size: int = CHUNK_SIZE,
        max_length: int | None = None,
        max_input_length: int | None = None,
        long_lines: Literal["cut", "skip"] = "cut",
        warn: Callable[[str], None] | None = None,
        watch: Callable[[], object] = lambda: None,
        continuous: bool | None = None,
    ) -> None:
        if isinstance(options, recipe.Decoding):
            batch_size, options = batch_size or options.batch_size, SearchOptions.from_recipe(options)
        self.options = options
        self.batch_size = batch_size or recipe.Decoding().batch_size
        self.chunk_size = chunk_size
        self.models = tuple(models)
        self.model = as_one(self.models, self.options.ensemble_mode)
        self.vocabularies = vocabularies
        self.device = torch.device(device)
        self.max_length = max_length
        self.max_input_length = max_input_length or recipe.Decoding().max_input_length
        self.long_lines = long_lines
        self.warn = warn
        self.watch = watch
        longest = max_length or recipe.Data.model_fields["max_length"].default
        self._tokens = self.batch_size * longest
        self._continuous: ContinuousSearch | None = None
        wanted = self.device.type == "cuda" if continuous is None else continuous
        if wanted and self.options.sample is None and isinstance(self.model, IncrementalModel):
            self._continuous = ContinuousSearch(
                partial(Grid, self.model), self.options, self.device, self.batch_size, self._tokens, warn
            )

    def translate(self, lines: Iterable[str], where: str = "input") -> Iterator[Translation]:
        """Translate a stream of lines, without their line ends, in order; a chunk is read before it is translated.

        Args:
            lines: the lines. where: what to call them in messages.
        """
        stream, first = iter(lines), 1
        while chunk := list(islice(stream, self.chunk_size)):
            yield from self.translate_chunk(chunk, first, where)
            first += len(chunk)

    def translate_chunk(
        self,
        lines: Sequence[str],
        first: int = 1,
        where: str = "input",
        done: Callable[[int], object] = lambda _: None,
    ) -> list[Translation]:
        """Translate a few lines.

        Args:
            lines: the lines. where: what to call them in messages.
            first: the number of the first of them, on which the draws of sampling depend.
            done: told how many more of them are done.

        Raises:
            EconmtError: if the model's probabilities are not finite.
        """
        sources = self._encode(lines, first, where)
        results = [EMPTY] * len(lines)
        # A line of nothing but blanks has no tokens either way, but word vocabularies need not agree on what is blank.
        filled = [index for index, line in enumerate(lines) if line.strip() and sources[index]]
        done(len(lines) - len(filled))
        with evaluation_mode(self.models):
            numbers = [first + index for index in filled]
            for position, hypotheses in self._search_all([sources[index] for index in filled], numbers):
                index = filled[position]
                if not hypotheses:
                    raise EconmtError(
                        f"{where}:{first + index}: the model gives no finite probability to any translation; "
                        "its parameters are broken: take another checkpoint"
                    )
                results[index] = self._translation(sources[index], hypotheses)
                done(1)
        return results

    def _encode(self, lines: Sequence[str], first: int, where: str) -> list[list[int]]:
        """The ids of lines, cut or left out past ``max_input_length``; lines beyond what is usual are warned of."""
        most, tell = self.max_input_length, self.warn or (lambda _: None)
        characters = most * _CHARACTERS_A_TOKEN
        sources = self.vocabularies.source.encode_many([line[:characters] for line in lines])
        for index, (line, ids) in enumerate(zip(lines, sources, strict=True)):
            length, place = len(ids), f"{where}:{first + index}"
            if length > most or len(line) > characters:
                size = f"{len(line):,} characters" if len(line) > characters else f"{length:,} source tokens"
                cut = self.long_lines == "cut"
                done = "only the beginning is translated" if cut else "left out, its translation is empty"
                tell(
                    f"{place}: {size}, more than a source of {most:,} tokens may have (max_input_length): {done}"
                )
                sources[index] = ids[:most] if cut else []
            elif self.max_length is not None and length > self.max_length:
                tell(
                    f"{place}: {length} source tokens, more than the {self.max_length} that the model was trained on; "
                    "the translation may be poor or incomplete"
                )
        return sources

    def _search_all(
        self, sources: Sequence[Sequence[int]], numbers: Sequence[int]
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """The hypotheses of each source with its index, in any order; ``numbers`` are those of the lines."""
        lengths = [len(ids) for ids in sources]
        rest = list(range(len(sources)))
        if self._continuous is not None:
            for part in self._continuous.worthwhile(lengths):
                limits = self._limits([lengths[index] for index in part]).tolist()
                sentences = [
                    Sentence(sources[index], limit) for index, limit in zip(part, limits, strict=True)
                ]
                yield from zip(part, self._continuous.search(sentences, self.watch), strict=True)
                rest = sorted({*rest}.difference(part))
        for batch in batches_by_length([lengths[index] for index in rest], self.batch_size, self._tokens):
            chosen = [rest[position] for position in batch]
            found = self._search([sources[index] for index in chosen], [numbers[index] for index in chosen])
            yield from zip(chosen, found, strict=True)

    def _limits(self, lengths: Sequence[int]) -> Tensor:
        """Most tokens before EOS by source tokens, EOS not counted."""
        return output_limits(torch.tensor(lengths) + 1, self.options.max_output_factor, self.max_length)

    def _search(self, sources: Sequence[Sequence[int]], numbers: Sequence[int]) -> list[list[Hypothesis]]:
        batch = *pad_sources(sources, self.device), self._limits([len(ids) for ids in sources])
        if self.options.sample is None:
            return beam_search(self.model, *batch, self.options, self.watch)
        return sample(self.model, *batch, self.options, numbers)

    def _translation(self, source: Sequence[int], hypotheses: Sequence[Hypothesis]) -> Translation:
        target = self.vocabularies.target
        entries = [
            NBestEntry(one_line(target.decode(hypothesis.ids)), target.tokens(hypothesis.ids), *hypothesis)
            for hypothesis in hypotheses
        ]
        text, tokens, _, score, log_probability, attention, _ = entries[0]
        source_tokens = self.vocabularies.source.tokens(source)
        return Translation(text, score, log_probability, tokens, attention, entries, source_tokens)
