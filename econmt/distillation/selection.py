"""Training text of the student, made of the teacher's translations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from econmt.checkpoint.tensor_files import write_text
from econmt.config.json_reader import Record, read_json
from econmt.data.files import whole_folder, writing
from econmt.data.text.corpus import read_lines
from econmt.distillation.inputs import StageInputs, differences, read_inputs, take_inputs, write_inputs
from econmt.distillation.shards import INPUTS_FILE, Shards
from econmt.errors import InputError
from econmt.evaluation.metrics import tokenizer_of
from econmt.evaluation.reranking import RerankCandidate, by_reference

MODEL = "model"
"""Name of the student's model folder, beside the folder of its text."""
_STATISTICS = "statistics.json"
_PREFIX = "train"
_CHUNK = 1024
"""Lines that are held in memory."""


class TextStatistics(Record):
    """Counts of the text.

    Attributes:
        pairs: Number of pairs.
        chosen: Number of pairs whose translation is not the teacher's best, but closer to the reference.
        ratio: Characters of the targets divided by those of the sources.
    """

    pairs: int
    chosen: int
    ratio: float


class DistilledText(NamedTuple):
    """Training text: its prefix for ``data.train``, what it was made from, and its statistics."""

    prefix: Path
    inputs: StageInputs
    statistics: TextStatistics


def make_text(
    folder: Path,
    shards: Shards,
    languages: tuple[str, str],
    references: Path | None,
    trained: StageInputs | None,
    say: Callable[[str], object],
) -> DistilledText:
    """Writes the teacher's translations as parallel text, unless the folder has it already.

    Of several translations, the one with the highest sentence BLEU against the reference is taken (Kim and Rush, 2016,
    sequence-level interpolation).

    Args:
        folder: Folder of the text. shards: Translations.
        languages: Source and target language, the suffixes of the files.
        references: File of reference translations; None: the teacher's best translations are taken.
        trained: Inputs of the text that the student is trained on already; None: its training has not begun.
        say: Called with the current activity.

    Raises:
        InputError: The references do not fit the text, or the student is trained on other text.
    """
    recorded = read_inputs(folder / INPUTS_FILE)
    settings = {"translations": shards.digest[:16], "languages": " to ".join(languages)}
    inputs = take_inputs(settings, {} if references is None else {"--target": references}, recorded)
    if trained is not None and (changes := differences(trained, inputs)):
        student = folder.parent / MODEL
        raise InputError(
            f"{student}: is trained on text made from other inputs: {'; '.join(changes)}; give the same, another "
            f"--output, or delete {student} to train again"
        )
    if recorded is None or differences(recorded, inputs):
        with writing(folder), whole_folder(folder) as partial:
            statistics = _write(partial / _PREFIX, shards, languages, references, say)
            write_text(partial / _STATISTICS, json.dumps(statistics.model_dump()) + "\n")
            write_inputs(partial / INPUTS_FILE, inputs)
    try:
        statistics = read_json(
            TextStatistics, folder / _STATISTICS, f"delete {folder} and run the command again"
        )
    except FileNotFoundError:
        raise InputError(
            f"{folder / _STATISTICS}: is missing; delete {folder} and run the command again"
        ) from None
    return DistilledText(folder / _PREFIX, inputs, statistics)


def _write(
    prefix: Path,
    shards: Shards,
    languages: tuple[str, str],
    references: Path | None,
    say: Callable[[str], object],
) -> TextStatistics:
    tokenizer = tokenizer_of(languages[1]).name
    lengths, pairs, chosen = [0, 0], 0, 0
    lines = iter(()) if references is None else read_lines(references)
    together = zip_longest(shards, lines)
    with ExitStack() as stack:
        files = [
            stack.enter_context(Path(f"{prefix}.{language}").open("w", encoding="utf-8", newline="\n"))
            for language in languages
        ]
        while chunk := list(islice(together, _CHUNK)):
            if references is not None:
                _check_lengths(chunk, shards.lines, references)
            lists = [translations for (_, translations), _ in chunk]
            best = [0] * len(chunk)
            if references is not None:
                best = closest(lists, [reference for _, reference in chunk], tokenizer)
            for ((source, _), _), translations, index in zip(chunk, lists, best, strict=True):
                for side, (file, text) in enumerate(zip(files, (source, translations[index]), strict=True)):
                    lengths[side] += len(text)
                    file.write(f"{text}\n")
            pairs, chosen = pairs + len(chunk), chosen + sum(index > 0 for index in best)
            say(f"choosing translations: {pairs:,} of {shards.lines:,} lines")
    return TextStatistics(pairs=pairs, chosen=chosen, ratio=lengths[1] / max(1, lengths[0]))


def _check_lengths(chunk: Sequence[tuple[object, object]], lines: int, references: Path) -> None:
    """Raises InputError if one of both texts has ended before the other."""
    for found, reference in chunk:
        if found is None or reference is None:
            raise InputError(
                f"{references}: has {'more' if found is None else 'fewer'} lines than the --source, {lines:,}; line n "
                "of one must be the translation of line n of the other"
            )


def closest(lists: Sequence[list[str]], references: Sequence[str], tokenizer: str) -> list[int]:
    """Returns the index of the translation with the highest sentence BLEU in each list; the first of equal ones.

    Args:
        lists: translations of each sentence. references: reference of each.
        tokenizer: sacreBLEU's name of the tokenizer.
    """
    candidates = [[RerankCandidate(0, text, "", 0.0) for text in texts] for texts in lists]
    scores = by_reference("bleu", references, tokenizer)(candidates, 0)
    return [max(range(len(each)), key=each.__getitem__) for each in scores]
