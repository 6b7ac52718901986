"""Translation of lines of text.

The trainer validates with the same :class:`Translator` that ``econmt translate`` uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Literal

import torch
from torch import Tensor, nn

from econmt.config import recipe
from econmt.data.text.source_factors import encode_sources
from econmt.data.text.subwords import EOS, PAD, UNK, Vocabularies
from econmt.decoding.alignment import copied, hard_alignment, joined
from econmt.decoding.capitals import is_in_capitals, without_capitals
from econmt.decoding.constraints.batch import ConstrainedContinuations, DecodingConstraints
from econmt.decoding.constraints.glossary import Glossary
from econmt.decoding.constraints.tokens import ConstraintCompiler
from econmt.decoding.markup import take_out
from econmt.decoding.requests import Request
from econmt.decoding.search.beam import (
    ContinuationChooser,
    Hypothesis,
    SearchOptions,
    beam_search,
    output_limits,
)
from econmt.decoding.search.continuous import ContinuousSearch, Sentence
from econmt.decoding.search.diversity import Diversity
from econmt.decoding.search.ensemble import as_one
from econmt.decoding.search.model import SearchModel
from econmt.decoding.search.native import has_native_search, native_search, search_name
from econmt.decoding.search.sampling import sample
from econmt.decoding.search.shortlist import Restricted, Shortlists
from econmt.decoding.translation import (
    EMPTY,
    NBestEntry,
    Translation,
    in_capital_letters,
    one_line,
    with_marks,
)
from econmt.errors import EconmtError, InputError
from econmt.model import IncrementalModel
from econmt.model.inference.grid import Grid

CHUNK_SIZE = 1024

_CHARACTERS_A_TOKEN = 50
"""More than tokens have on average: lines with more characters than the longest source can have are not even cut into
tokens, which takes minutes for a word of megabytes."""


def pad_sources(sources: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns source ids (B, S) with EOS and padding, and lengths (B,) including EOS, from ids without them."""
    lengths = torch.tensor([len(ids) + 1 for ids in sources], dtype=torch.int64)
    source = torch.full((len(sources), int(lengths.max())), PAD, dtype=torch.int64)
    for row, ids in enumerate(sources):
        source[row, : len(ids) + 1] = torch.tensor([*ids, EOS])
    return source.to(device), lengths.to(device)


def batches_by_length(lengths: Sequence[int], batch_size: int, tokens: int) -> list[list[int]]:
    """Returns batches of indices of sentences of similar length, longest first.

    Args:
        lengths: length of each sentence. batch_size: most sentences in a batch.
        tokens: most padded tokens in a batch of
            several sentences, so that very long lines are translated alone.
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
    """Disables dropout and cuDNN's TF32 within the context.

    PyTorch lets cuDNN compute the LSTMs of whole sentences in TF32, but not the single steps of a search: scores of a
    translation from searching and from scoring would differ in the fourth digit.
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


class Translator:
    """Translates lines with one model or an ensemble.

    Args:
        models: models on ``device`` that share the vocabularies; :class:`econmt.model.IncrementalModel` makes one of a
            trained model.
        vocabularies: source and target vocabulary.
        options: options of the search; a recipe's ``decoding`` section also gives the batch size.
        device: device of the models.
        batch_size: sentences translated together; None: the recipe's, or 64.
        chunk_size: lines read before any is translated; they are sorted by length.
        max_length: longest source in training, in tokens; longer lines cause a warning.
        max_input_length: longest source, in tokens, that is translated completely; None: a recipe's default.
        long_lines: treatment of longer ones: "cut" translates the beginning, "skip" gives an empty line.
        warn: called with a message about a doubtful input line.
        watch: called between the steps of a search; an exception that it raises ends the search.
        continuous: True if beam search with one model replaces finished sentences by waiting ones, on a GPU in CUDA
            graphs (:mod:`econmt.decoding.search.continuous`); None: on a GPU. Results are the same.
        avoid: phrases that no translation may contain.
        glossary: terms; if one occurs in a source, its translation is a constraint.
        shortlists: target words allowed for each sentence; None: all.

    Attributes:
        factor_files: names of the files of source factors, for messages.
        searches: names of the searches that have run, see :func:`~econmt.decoding.search.native.search_name`.
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
        avoid: Sequence[str] = (),
        glossary: Glossary | None = None,
        shortlists: Shortlists | None = None,
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
        self.factor_files: Sequence[str] = ()
        self.watch = watch
        self.searches: set[str] = set()
        longest = max_length or recipe.Data.model_fields["max_length"].default
        self._tokens = self.batch_size * longest
        self._continuous: ContinuousSearch | None = None
        self._shortlists = shortlists
        wanted = self.device.type == "cuda" if continuous is None else continuous
        self._constraint_compiler: ConstraintCompiler | None = None
        if avoid or glossary is not None:
            self._constraint_compiler = ConstraintCompiler(vocabularies.target, avoid, glossary)
        for name in ("markup", "restore_case") if vocabularies.factors else ():
            if getattr(self.options, name):
                raise InputError(
                    f"the model reads source factors, of which {name} knows not what becomes: translate without it"
                )
        if self._constraint_compiler is not None and self.options.sample is not None:
            raise InputError(
                "translations are drawn, not searched for: give no avoided phrases and no glossary"
            )
        if self._constraint_compiler is not None and self.options.beam_groups > 1:
            raise InputError(
                "beam_groups cannot be combined with avoided phrases or a glossary; remove one of them"
            )
        if (
            wanted
            and self.options.is_plain
            and self.options.sample is None
            and shortlists is None
            and isinstance(self.model, IncrementalModel)
            and not self.model.plain
        ):
            self._continuous = ContinuousSearch(
                partial(Grid, self.model), self.options, self.device, self.batch_size, self._tokens, warn
            )

    @property
    def _is_plain(self) -> bool:
        """True if nothing rules out tokens in sentences without constraints."""
        return self.options.block_ngram_repeat == 0

    def translate(self, lines: Iterable[str | Request], where: str = "input") -> Iterator[Translation]:
        """Translates a stream of lines without line ends, in order; reads a chunk before translating it.

        Args:
            lines: lines, or requests with constraints.
            where: name of the input in messages.
        """
        stream, first = iter(lines), 1
        while chunk := list(islice(stream, self.chunk_size)):
            yield from self.translate_chunk(chunk, first, where)
            first += len(chunk)

    def translate_chunk(
        self,
        lines: Sequence[str | Request],
        first: int = 1,
        where: str = "input",
        done: Callable[[int], object] = lambda _: None,
        *,
        numbers: Sequence[int] | None = None,
    ) -> list[Translation]:
        """Translates a chunk of lines.

        Args:
            lines: the lines. where: name of the input in messages.
            first: number of the first line; the draws of sampling depend on it.
            done: called with the number of lines translated since the last call.
            numbers: numbers of all lines, if they are not consecutive from ``first``.

        Raises:
            EconmtError: if the model's probabilities are not finite.
            InputError: if what is wished of a line cannot be had.
        """
        requests = [Request(line) if isinstance(line, str) else line for line in lines]
        lengths = [len(request.text) for request in requests]
        most = self.max_input_length * _CHARACTERS_A_TOKEN
        marked = [take_out(request.text[:most]) for request in requests] if self.options.markup else []
        if marked:
            requests = [
                request._replace(text=each.text) for request, each in zip(requests, marked, strict=True)
            ]
        numbered = range(first, first + len(lines)) if numbers is None else numbers
        sentence_constraints = self._wishes_of(requests, numbered, where)
        in_capitals = [self.options.restore_case and is_in_capitals(request.text) for request in requests]
        texts = [
            without_capitals(request.text) if capital else request.text
            for request, capital in zip(requests, in_capitals, strict=True)
        ]
        sources = self._encode(texts, [request.factors for request in requests], lengths, numbered, where)
        answers: dict[int, list[Hypothesis]] = {}
        # A line of nothing but blanks has no tokens either way, but word vocabularies need not agree on what is blank.
        filled = [i for i, request in enumerate(requests) if request.text.strip() and sources[i]]
        done(len(lines) - len(filled))
        with evaluation_mode(self.models):
            found = self._search_all(
                [sources[i] for i in filled],
                [numbered[i] for i in filled],
                [sentence_constraints[i] for i in filled],
            )
            for position, hypotheses in found:
                index = filled[position]
                if not hypotheses:
                    raise EconmtError(
                        f"{where}:{numbered[index]}: the model gives no finite probability to any translation; "
                        "its parameters are broken: take another checkpoint"
                    )
                answers[index] = hypotheses
                done(1)
        written = iter(
            self.vocabularies.target.decode_many([each.ids for found in answers.values() for each in found])
        )
        results = [EMPTY] * len(lines)
        for index, hypotheses in answers.items():
            made = self._translation(texts[index], sources[index], hypotheses, written)
            results[index] = in_capital_letters(made) if in_capitals[index] else made
        return [with_marks(*each) for each in zip(results, marked, strict=True)] if marked else results

    def _encode(
        self,
        lines: Sequence[str],
        factors: Sequence[Sequence[str]],
        characters_of: Sequence[int],
        numbers: Sequence[int],
        where: str,
    ) -> list[list[int]]:
        """The ids of lines, cut or left out past ``max_input_length``; lines beyond what is usual are warned of.

        ``characters_of`` them are counted with their tags.
        """
        most, tell = self.max_input_length, self.warn or (lambda _: None)
        characters = most * _CHARACTERS_A_TOKEN

        def name_of(index: int, stream: int | None) -> str:
            names = [where, *self.factor_files]
            if stream is not None and not self.factor_files:
                return f"{where}:{numbers[index]}: factors[{stream}]"
            return f"{names[0 if stream is None else stream + 1]}:{numbers[index]}"

        sources = encode_sources(self.vocabularies, lines, factors, name_of, characters, self.warn)
        for index, ids in enumerate(sources):
            length, written, place = len(ids), characters_of[index], f"{where}:{numbers[index]}"
            if length > most or written > characters:
                size = f"{written:,} characters" if written > characters else f"{length:,} source tokens"
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

    def _wishes_of(
        self, requests: Sequence[Request], numbers: Sequence[int], where: str
    ) -> list[DecodingConstraints | None]:
        """Returns each line's constraints, or None without any."""
        if self._constraint_compiler is None:
            if all(request.is_plain for request in requests):
                return [None if self._is_plain else DecodingConstraints()] * len(requests)
            if self.options.sample is not None:
                number = next(n for n, each in zip(numbers, requests, strict=True) if not each.is_plain)
                raise InputError(
                    f"{where}:{number}: translations are drawn, not searched for: nothing can be wished of one"
                )
            if self.options.beam_groups > 1:
                number = next(n for n, each in zip(numbers, requests, strict=True) if not each.is_plain)
                raise InputError(
                    f"{where}:{number}: beam_groups cannot be combined with constraints, avoided phrases or a target "
                    "prefix; remove one of them"
                )
            self._constraint_compiler = ConstraintCompiler(self.vocabularies.target)
        found = [
            self._constraint_compiler.of(request, f"{where}:{number}")
            for number, request in zip(numbers, requests, strict=True)
        ]
        return [constraints or (None if self._is_plain else DecodingConstraints()) for constraints in found]

    def _search_all(
        self,
        sources: Sequence[Sequence[int]],
        numbers: Sequence[int],
        sentence_constraints: Sequence[DecodingConstraints | None],
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """The hypotheses of each source with its index, in any order; ``numbers`` are those of the lines."""
        lengths = [len(ids) for ids in sources]
        plain = [index for index, constraints in enumerate(sentence_constraints) if constraints is None]
        rest = plain
        if self._continuous is not None:
            for group in self._continuous.worthwhile([lengths[index] for index in plain]):
                part = [plain[position] for position in group]
                limits = self._limits([lengths[index] for index in part]).tolist()
                self.searches.add(search_name(self.models))
                sentences = [
                    Sentence(sources[index], limit) for index, limit in zip(part, limits, strict=True)
                ]
                yield from zip(part, self._continuous.search(sentences, self.watch), strict=True)
                rest = sorted({*rest}.difference(part))
        wished = [index for index, constraints in enumerate(sentence_constraints) if constraints is not None]
        for part in (rest, wished):
            for batch in batches_by_length([lengths[index] for index in part], self.batch_size, self._tokens):
                chosen = [part[position] for position in batch]
                found = self._search(
                    [sources[index] for index in chosen],
                    [numbers[index] for index in chosen],
                    [
                        constraints
                        for index in chosen
                        if (constraints := sentence_constraints[index]) is not None
                    ],
                )
                yield from zip(chosen, found, strict=True)

    def _limits(self, lengths: Sequence[int]) -> Tensor:
        """Most tokens before EOS by source tokens, EOS not counted."""
        return output_limits(torch.tensor(lengths) + 1, self.options.max_output_factor, self.max_length)

    def _search(
        self,
        sources: Sequence[Sequence[int]],
        numbers: Sequence[int],
        sentence_constraints: Sequence[DecodingConstraints],
    ) -> list[list[Hypothesis]]:
        """Searches a batch, in which either all sentences have constraints or none has."""
        batch = *pad_sources(sources, self.device), self._limits([len(ids) for ids in sources])
        model, restricted, allowed = self.model, None, None
        if self._shortlists is not None:
            allowed = self._shortlists.allowed(
                batch[0], [constraints.ids for constraints in sentence_constraints]
            )
        if (
            not sentence_constraints
            and isinstance(model, IncrementalModel)
            and has_native_search(model, self.options)
        ):
            self.searches.add(search_name(self.models, in_c=True))
            return native_search(model, *batch, self.options, self.watch, allowed)
        self.searches.add(search_name(self.models))
        if allowed is not None:
            # What is wished names words by their ids, and draws do not depend on which words others may have.
            whole = bool(sentence_constraints) or self.options.sample is not None
            model = restricted = Restricted(self.model, allowed, self.device, whole=whole)
        if self.options.sample is None:
            control: ContinuationChooser | None = None
            if self.options.beam_groups > 1:
                control = Diversity(len(sources), self.options)
            elif sentence_constraints:
                self._constraint_compiler = self._constraint_compiler or ConstraintCompiler(
                    self.vocabularies.target
                )
                control = ConstrainedContinuations(
                    sentence_constraints, self._constraint_compiler.joins, self.options
                )
            found = beam_search(model, *batch, self.options, self.watch, control)
        else:
            found = sample(model, *batch, self.options, numbers)
        if restricted is None:
            return found
        return [[each._replace(ids=restricted.ids(each.ids)) for each in hypotheses] for hypotheses in found]

    def _translation(
        self, text: str, source: Sequence[int], hypotheses: Sequence[Hypothesis], written: Iterator[str]
    ) -> Translation:
        """Makes the translation of a line's ``text`` and ids; ``written`` yields the hypotheses' texts in turn."""
        vocabulary = self.vocabularies.source
        source_tokens = vocabulary.tokens([token % vocabulary.size for token in source])
        entries = [self._entry(text, source_tokens, each, next(written)) for each in hypotheses]
        best = entries[0]
        return Translation(
            best.text, best.score, best.log_probability, best.tokens, best.attention, entries, source_tokens
        )

    def _entry(
        self, text: str, source_tokens: Sequence[str], hypothesis: Hypothesis, written: str
    ) -> NBestEntry:
        target, attention = self.vocabularies.target, hypothesis.attention
        tokens = target.tokens(hypothesis.ids)
        alignment: list[tuple[int, int]] = []
        if attention is not None:
            alignment = hard_alignment(attention, source_tokens, tokens, self.vocabularies)
            if self.options.replace_unk and UNK in hypothesis.ids:
                tokens = copied(attention, hypothesis.ids, text, self.vocabularies)
                written = joined(tokens, target)
        return NBestEntry(one_line(written), tokens, *hypothesis, alignment)
