"""Translation of lines of text: encoding, constraints, choice of the search, and conversion of hypotheses to text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from econmt.config import recipe
from econmt.data.text.annotation import term_tag_ids
from econmt.data.text.glossary import Glossary
from econmt.data.text.source_factors import encode_sources
from econmt.data.text.vocabulary import Vocabularies, normalized
from econmt.data.text.words import has_words
from econmt.decoding.batches import batches_by_length, evaluation_mode, pad_sources
from econmt.decoding.constraints.batch import ConstrainedContinuations, DecodingConstraints
from econmt.decoding.constraints.tokens import ConstraintCompiler
from econmt.decoding.requests import Request, check_request
from econmt.decoding.results import copy_of, merged, translation_of
from econmt.decoding.search.beam import ContinuationChooser, Hypothesis, beam_search, output_limits
from econmt.decoding.search.continuous import ContinuousSearch, Sentence
from econmt.decoding.search.ensemble import as_one
from econmt.decoding.search.fusion import ShallowFusion
from econmt.decoding.search.model import SearchModel
from econmt.decoding.search.native import has_native_search, native_search, search_name
from econmt.decoding.search.options import CHUNK_SIZE as CHUNK_SIZE
from econmt.decoding.search.options import SearchOptions
from econmt.decoding.search.sampling import sample
from econmt.decoding.search.shortlist import Restricted, Shortlists
from econmt.decoding.terms import SourceTerms, annotated_source, plain_source
from econmt.decoding.translation import (
    EMPTY,
    Divide,
    Translation,
    in_capital_letters,
    is_in_capitals,
    with_small_prefix,
    without_capitals,
)
from econmt.errors import EconmtError, InputError
from econmt.model import IncrementalModel
from econmt.model.inference.grid import Grid

_CHARACTERS_A_TOKEN = 50
"""More characters than tokens have on average.

Longer lines than ``max_input_length`` tokens of this size are cut before they are tokenised, which takes minutes for a
word of megabytes.
"""
_NAMED_LINES = 3
"""Lines of a chunk, longer than those of the training text, that warnings name; the others are counted."""


class _Sentence(NamedTuple):
    """Sentence to search for: source ids without EOS, number that its draws depend on, and constraints, if any."""

    ids: Sequence[int]
    draws: int
    constraints: DecodingConstraints | None


class _Attempt(NamedTuple):
    """One of the searches for a sentence, which follow one another until the translations satisfy its constraints.

    Attributes:
        annotated: True if the annotated source is translated, False for the sentence itself.
        constraints: constraints of the search; None: none.
        expected: constraints that the translations satisfy, or else the next attempt follows; None: the last attempt.
    """

    annotated: bool
    constraints: DecodingConstraints | None
    expected: DecodingConstraints | None = None


class Translator:
    """Translates lines with one model or an ensemble.

    Args:
        models: models on ``device`` that share the vocabularies; :class:`econmt.model.IncrementalModel` makes one of a
            trained model.
        vocabularies: source and target vocabulary.
        data: data section of the models' recipe: lines of more source tokens than ``max_length`` cause a warning, and
            the languages say how capitals change.
        warn: called with a message about a doubtful input line.
        glossary: terms with the translations that they get, by annotated sources or by constraints.
        shortlists: target words allowed for each sentence; None: all.
        fusion: language model for ``options.lm_weight``.
        divide: divides lines into pieces, which are translated one by one, for the options ``markup`` and
            ``split_sentences``; None: lines are translated whole.

    Attributes:
        annotates: True if sources are annotated with the terms of glossaries.
        poll: called between the steps of a search; an exception that it raises ends the search.
        factor_files: names of the files of source factors, for messages.
        searches: names of the searches that have run, see :func:`~econmt.decoding.search.native.search_name`.
    """

    def __init__(
        self,
        models: Sequence[SearchModel],
        vocabularies: Vocabularies,
        options: SearchOptions,
        device: torch.device | str = "cpu",
        *,
        data: recipe.Data | None = None,
        warn: Callable[[str], None] | None = None,
        glossary: Glossary | None = None,
        shortlists: Shortlists | None = None,
        fusion: ShallowFusion | None = None,
        divide: Divide | None = None,
    ) -> None:
        self.options = options
        self.models = tuple(models)
        self.model = as_one(self.models, options.ensemble_mode)
        self.vocabularies = vocabularies
        self.device = torch.device(device)
        self.data = data
        self.max_length = None if data is None else data.max_length
        self.languages = ("", "") if data is None else (data.source, data.target)
        self._targets = {tag: code for code, tag in vocabularies.target_tags.items()}
        self.warn = warn
        self.factor_files: Sequence[str] = ()
        self.poll: Callable[[], object] = lambda: None
        self.searches: set[str] = set()
        longest = self.max_length or recipe.Data.model_fields["max_length"].default
        self._tokens = options.batch_size * longest
        self._continuous: ContinuousSearch | None = None
        self._shortlists = shortlists
        self._fusion = fusion
        self._glossary = glossary
        self.annotates = options.glossary_mode != "constrain" and bool(term_tag_ids(vocabularies.source))
        if options.glossary_mode == "annotate" and not self.annotates:
            raise InputError(
                "glossary_mode annotate: the model was not trained with data.annotate_terms; use auto or constrain"
            )
        if options.avoid or glossary is not None:
            if options.sample is not None and (options.avoid or not self.annotates):
                raise InputError(
                    "sample cannot be combined with avoided phrases or a glossary; remove either"
                )
            _ = self.constraint_compiler  # refuses lists that cannot be satisfied
        self._divide = divide
        if divide is None and (options.markup or options.split_sentences):
            raise InputError("markup and split_sentences need a function that divides lines; give divide too")
        for name in ("markup", "restore_case", "split_sentences") if vocabularies.factors else ():
            if getattr(options, name):
                raise InputError(f"{name} is not supported by models with source factors; remove it")
        if (
            (self.device.type == "cuda" if options.continuous is None else options.continuous)
            and options.is_plain
            and options.sample is None
            and shortlists is None
            and isinstance(self.model, IncrementalModel)
        ):
            make_grid = partial(Grid, self.model)
            self._continuous = ContinuousSearch(
                make_grid, options, self.device, options.batch_size, self._tokens, warn
            )

    @cached_property
    def constraint_compiler(self) -> ConstraintCompiler:
        """Compiler of constraints, which knows the lists for all sentences."""
        lists = self.options.avoid, self._glossary
        return ConstraintCompiler(self.vocabularies.target, *lists, language=self.languages[0])

    def translate(
        self,
        lines: Iterable[str | Request],
        where: str = "input",
        done: Callable[[int], object] = lambda _: None,
    ) -> Iterator[Translation]:
        """Translates a stream of lines without line ends, in order; reads a chunk before translating it.

        ``where`` and ``done``: see :meth:`translate_chunk`.
        """
        stream, first = iter(lines), 1
        while chunk := list(islice(stream, self.options.chunk_size)):
            yield from self.translate_chunk(chunk, first, where, done)
            first += len(chunk)

    def translate_chunk(
        self,
        lines: Sequence[str | Request],
        first: int = 1,
        where: str = "input",
        done: Callable[[int], object] = lambda _: None,
    ) -> list[Translation]:
        """Translates a chunk of lines.

        Args:
            lines: the lines. where: name of the input in messages.
            first: number of the first line; the draws of sampling depend on it.
            done: called with the number of lines translated since the last call.

        Raises:
            EconmtError: if the model's probabilities are not finite.
            InputError: if a line has characters that text cannot have, or constraints that cannot be satisfied.
        """
        requests = [Request(line) if isinstance(line, str) else line for line in lines]
        numbers = range(first, first + len(lines))
        for number, request in zip(numbers, requests, strict=True):
            check_request(request, f"{where}:{number}")
        if self._divide is None:
            return self._translate(requests, numbers, where, done)
        requests = list(map(self._tag_apart, requests))
        divided = [self._divide(request.text, self._target_of(request)) for request in requests]
        sentences: list[Request] = []
        for number, request, (pieces, _) in zip(numbers, requests, divided, strict=True):
            if len(pieces) > 1 and request.constrains:
                raise InputError(
                    f"{where}:{number}: constraints belong to one sentence, and this line has {len(pieces)}; give one "
                    "sentence a line"
                )
            sentences += [request._replace(text=piece) for piece in pieces]
        owners = [number for number, (pieces, _) in zip(numbers, divided, strict=True) for _ in pieces]
        found = iter(self._translate(sentences, owners, where, lambda _: None))
        done(len(lines))
        return [join([next(found) for _ in pieces]) for pieces, join in divided]

    def _tag_apart(self, request: Request) -> Request:
        """Moves a tag of a target language, with which a line of several sentences may begin, to the source prefix."""
        tag, _, text = request.text.lstrip().partition(" ")
        prefix = f"{request.source_prefix} {tag}".strip()
        return request._replace(text=text, source_prefix=prefix) if tag in self._targets else request

    def _target_of(self, request: Request) -> str:
        """Returns the language into which a request is translated, which a tag may choose."""
        return self._targets.get((request.start + request.text).lstrip().partition(" ")[0], self.languages[1])

    def _translate(
        self, requests: Sequence[Request], numbered: Sequence[int], where: str, done: Callable[[int], object]
    ) -> list[Translation]:
        """Translates sentences, which are in the lines ``numbered``; copies those without words."""
        copies = {
            index: copy_of(request.text, self.vocabularies)
            for index, (request, number) in enumerate(zip(requests, numbered, strict=True))
            if self._is_copied(request, f"{where}:{number}")
        }
        if copies and self.vocabularies.factors:  # those of copied lines must fit, too
            copied = [requests[index] for index in copies]
            texts, factors = [each.start + each.text for each in copied], [each.factors for each in copied]
            name_of = partial(self._name_of, where, [numbered[index] for index in copies])
            encode_sources(self.vocabularies, texts, factors, name_of)
        done(len(copies))
        rest = [index for index in range(len(requests)) if index not in copies]
        with_words = [requests[index] for index in rest], [numbered[index] for index in rest]
        found = iter(self._translate_words(*with_words, where, done))
        return [copies[index] if index in copies else next(found) for index in range(len(requests))]

    def _is_copied(self, request: Request, where: str) -> bool:
        """Returns True for a sentence without words whose copy satisfies its constraints."""
        if has_words(request.text):
            return False
        if request.is_plain and self._glossary is None and not self.options.avoid:
            return True
        constraints = self.constraint_compiler.of(request, where)
        copy = self.vocabularies.target.encode(request.text)
        return not constraints.prefix and self.constraint_compiler.satisfies(copy, constraints)

    def _translate_words(
        self, given: Sequence[Request], numbered: Sequence[int], where: str, done: Callable[[int], object]
    ) -> list[Translation]:
        spoken = self.languages[0]
        in_capitals = [self.options.restore_case and is_in_capitals(each.text, spoken) for each in given]
        requests, texts = list[Request](), list[str]()
        for request, capital in zip(given, in_capitals, strict=True):
            small = with_small_prefix(request, self._target_of(request)) if capital else request
            text = without_capitals(request.text, spoken) if capital else request.text
            requests.append(small._replace(text=request.start + request.text))
            texts.append(request.start + text)
        with_terms = [self._with_terms(*each) for each in zip(requests, texts, strict=True)]
        attempts = self._attempts(requests, with_terms, numbered, where)
        sources = self._encode(texts, [request.factors for request in requests], numbered, where)
        answers: dict[int, list[Hypothesis]] = {}
        # Blank lines have no tokens, but vocabularies of words may define blanks differently.
        filled = [i for i, request in enumerate(requests) if request.text.strip() and sources[i]]
        done(len(requests) - len(filled))
        # Pieces of one line have draws of their own.
        draws = [line + (at - bisect_left(numbered, line) << 32) for at, line in enumerate(numbered)]
        with evaluation_mode(self.models):
            searches = {index: (attempts[index], with_terms[index]) for index in filled}
            for index, hypotheses in self._search_until_satisfied(searches, sources, draws):
                if not hypotheses:
                    raise EconmtError(
                        f"{where}:{numbered[index]}: the model gives no finite probability to any translation; "
                        "its parameters are damaged; use another checkpoint"
                    )
                answers[index] = hypotheses
                done(1)
        found = [each.ids for hypotheses in answers.values() for each in hypotheses]
        written = iter(self.vocabularies.target.decode_many(found))
        results = [EMPTY] * len(requests)
        for index, hypotheses in answers.items():
            line = texts[index], sources[index], hypotheses, written, self.vocabularies, given[index].start
            translation = translation_of(*line, replace_unk=self.options.replace_unk)
            if in_capitals[index]:
                translation = in_capital_letters(translation, self._target_of(given[index]))
            results[index] = translation
        return results

    def _encode(
        self, lines: Sequence[str], factors: Sequence[Sequence[str]], numbers: Sequence[int], where: str
    ) -> list[list[int]]:
        """Returns the ids of lines, cut or left out past ``max_input_length``; warns of lines that are too long."""
        most, tell = self.options.max_input_length, self.warn or (lambda _: None)
        characters, longer = most * _CHARACTERS_A_TOKEN, 0
        name_of = partial(self._name_of, where, numbers)
        sources = encode_sources(self.vocabularies, lines, factors, name_of, characters, self.warn)
        for index, ids in enumerate(sources):
            length, written, location = len(ids), len(lines[index]), f"{where}:{numbers[index]}"
            if length > most or written > characters:
                size = f"{written:,} characters" if written > characters else f"{length:,} source tokens"
                cut = self.options.long_lines == "cut"
                done = "only the beginning is translated" if cut else "left out, its translation is empty"
                tell(
                    f"{location}: {size}, more than a source of {most:,} tokens may have (max_input_length): {done}"
                )
                sources[index] = ids[:most] if cut else []
            elif self.max_length is not None and length > self.max_length:
                longer += 1
                if longer <= _NAMED_LINES:
                    tell(
                        f"{location}: {length} source tokens, more than the {self.max_length} of the training text; "
                        "the translation may be poor or incomplete"
                    )
        if longer > _NAMED_LINES:
            tell(
                f"{where}: further lines of more than {self.max_length} source tokens: {longer - _NAMED_LINES:,}"
            )
        return sources

    def _name_of(self, where: str, numbers: Sequence[int], index: int, stream: int | None) -> str:
        """Returns the name in messages of a line, or of a stream of its factors."""
        names = [where, *self.factor_files]
        if stream is not None and not self.factor_files:
            return f"{where}:{numbers[index]}: factors[{stream}]"
        return f"{names[0 if stream is None else stream + 1]}:{numbers[index]}"

    def _with_terms(self, request: Request, text: str) -> SourceTerms:
        """Returns the source of a request with its terms; ``text`` is its text, perhaps in other case."""
        if self._glossary is None and request.glossary is None:
            return SourceTerms(text)
        most, before = self.options.max_input_length, len(normalized(request.source_prefix))
        terms = [each for each in self.constraint_compiler.terms(request) if each.start >= before]
        if not terms or len(normalized(text)) != len(normalized(request.text)):
            return SourceTerms(text, terms)
        vocabulary = self.vocabularies.source
        plain = plain_source(text[: most * _CHARACTERS_A_TOKEN], terms, vocabulary, most)
        if self.annotates and plain.terms:
            source = annotated_source(text, plain.terms, vocabulary)
            if source.length <= most:
                return source
        return plain

    def _attempts(
        self, requests: Sequence[Request], sources: Sequence[SourceTerms], numbers: Sequence[int], where: str
    ) -> list[list[_Attempt]]:
        """Returns the searches of each line: as without constraints, but for a prefix; annotated; with constraints."""
        unconstrained = DecodingConstraints() if self.options.block_ngram_repeat else None
        attempts: list[list[_Attempt]] = []
        for number, request, source in zip(numbers, requests, sources, strict=True):
            if not (request.constrains or source.terms or self.options.avoid):
                attempts.append([_Attempt(False, unconstrained)])
                continue
            annotated = source.attention is not None
            if self.options.sample is not None and (request.constrains or not annotated):
                raise InputError(
                    f"{where}:{number}: sample cannot be combined with constraints; remove either"
                )
            compile_ = partial(self.constraint_compiler.of, request, f"{where}:{number}")
            in_full = compile_(source.terms, source.spans_of_sentence if annotated else source.spans)
            begin = DecodingConstraints(prefix=in_full.prefix) if in_full.prefix else unconstrained
            searches, last = [_Attempt(False, begin, in_full)], _Attempt(False, in_full)
            if annotated:
                if self.options.glossary_mode == "annotate" or self.options.sample is not None:
                    last = _Attempt(True, compile_(()))
                searches.append(_Attempt(True, begin, last.constraints))
            attempts.append([*searches, last])
        return attempts

    def _search_until_satisfied(
        self,
        lines: Mapping[int, tuple[Sequence[_Attempt], SourceTerms]],
        sources: Sequence[Sequence[int]],
        draws: Sequence[int],
    ) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yields the index and the hypotheses of each line, in any order.

        Translations that satisfy the constraints of a line are kept if the best one does; the next search replaces the
        others. Draws are kept if all of them satisfy the constraints.
        """
        waiting, turn = sorted(lines), 0
        kept: dict[int, list[Hypothesis]] = {index: [] for index in waiting}
        while waiting:
            attempts = [lines[index][0][turn] for index in waiting]
            annotated = [index for index, attempt in zip(waiting, attempts, strict=True) if attempt.annotated]
            texts = [lines[index][1].text for index in annotated]
            ids = dict(zip(annotated, self.vocabularies.source.encode_many(texts), strict=True))
            sentences = [
                _Sentence(ids.get(index, sources[index]), draws[index], attempt.constraints)
                for index, attempt in zip(waiting, attempts, strict=True)
            ]
            lacking: list[int] = []
            for position, hypotheses in self._search_all(sentences):
                index, expected = waiting[position], attempts[position].expected
                if index in ids:
                    hypotheses = [lines[index][1].of_sentence(each) for each in hypotheses]
                good = hypotheses
                if expected is not None:
                    good = [
                        each for each in hypotheses if self.constraint_compiler.satisfies(each.ids, expected)
                    ]
                is_complete = len(good) == len(hypotheses)
                if is_complete or (
                    self.options.sample is None and (kept[index] or good[:1] == hypotheses[:1])
                ):
                    kept[index] = merged(kept[index], good, self.options.nbest_size)
                if is_complete or len(kept[index]) == self.options.nbest_size:
                    yield index, kept[index]
                else:
                    lacking.append(index)
            waiting, turn = sorted(lacking), turn + 1

    def _search_all(self, sentences: Sequence[_Sentence]) -> Iterator[tuple[int, list[Hypothesis]]]:
        """Yields the index and the hypotheses of each sentence, in any order."""
        lengths = [len(sentence.ids) for sentence in sentences]
        plain = [index for index, sentence in enumerate(sentences) if sentence.constraints is None]
        constrained = [index for index, sentence in enumerate(sentences) if sentence.constraints is not None]
        remaining = plain
        if self._continuous is not None:
            for group in self._continuous.worthwhile([lengths[index] for index in plain]):
                part = [plain[position] for position in group]
                limits = self._limits([lengths[index] for index in part]).tolist()
                self.searches.add(search_name(self.models))
                pairs = zip(part, limits, strict=True)
                limited = [Sentence(sentences[index].ids, limit) for index, limit in pairs]
                yield from zip(part, self._continuous.search(limited, self.poll), strict=True)
                remaining = sorted({*remaining}.difference(part))
        batch_size = self.options.batch_size
        for part in (remaining, constrained):
            for batch in batches_by_length([lengths[index] for index in part], batch_size, self._tokens):
                chosen = [part[position] for position in batch]
                yield from zip(chosen, self._search([sentences[index] for index in chosen]), strict=True)

    def _limits(self, lengths: Sequence[int]) -> Tensor:
        """Returns the maximum numbers of target tokens before EOS for source lengths without EOS."""
        return output_limits(torch.tensor(lengths) + 1, self.options.max_output_factor, self.max_length)

    def _search(self, sentences: Sequence[_Sentence]) -> list[list[Hypothesis]]:
        """Searches a batch, in which either all sentences have constraints or none has."""
        sources = [sentence.ids for sentence in sentences]
        batch = *pad_sources(sources, self.device), self._limits([len(ids) for ids in sources])
        constraints = [each.constraints for each in sentences if each.constraints is not None]
        model, restricted, allowed = self.model, None, None
        if self._shortlists is not None:
            allowed = self._shortlists.allowed(batch[0], [each.ids for each in constraints])
        if not constraints and isinstance(model, IncrementalModel) and has_native_search(model, self.options):
            self.searches.add(search_name(self.models, in_c=True))
            return native_search(model, *batch, self.options, self.poll, allowed)
        self.searches.add(search_name(self.models))
        if allowed is not None:
            # Constraints name words by their ids, and draws must not depend on the words of other sentences.
            whole = bool(constraints) or self.options.sample is not None
            model = restricted = Restricted(self.model, allowed, self.device, whole=whole)
        if self.options.sample is None:
            chooser: ContinuationChooser | None = None
            if constraints:
                chooser = ConstrainedContinuations(constraints, self.constraint_compiler.joins, self.options)
            results = beam_search(model, *batch, self.options, self.poll, chooser, self._fusion)
        else:
            results = sample(model, *batch, self.options, [each.draws for each in sentences], self._fusion)
        if restricted is None:
            return results
        return [[each._replace(ids=restricted.ids(each.ids)) for each in best] for best in results]
