"""Training text of the student, made of the teacher's translations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple

from econmt.api import InputError
from econmt.api.checked_json import Record, read_json
from econmt.api.files import read_lines, whole_folder
from econmt.api.recipes import tokenizer_of
from econmt_distill.inputs import StageInputs, differences, read_inputs, take_inputs, write_record
from econmt_distill.nearest import Candidates, choose
from econmt_distill.shards import INPUTS_FILE, Shards

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
        kept: Number of pairs that have the reference itself.
        blank: Number of lines without a word.
        copies: Number of pairs, blank ones apart, whose target is the source.
        ratio: Characters of the targets divided by those of the sources.
    """

    pairs: int
    chosen: int
    kept: int = 0
    blank: int = 0
    copies: int = 0
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
    processes: int,
    say: Callable[[str], object],
) -> DistilledText:
    """Writes the teacher's translations as parallel text, unless the folder has it already.

    Of several translations, the one with the highest sentence BLEU against the reference is taken (Kim and Rush, 2016,
    sequence-level interpolation). The reference itself is taken if that translation is empty, and for pairs that are
    longer than those of the teacher's training text.

    Args:
        folder: Folder of the text. shards: Translations.
        languages: Source and target language, the suffixes of the files.
        references: File of reference translations; None: the teacher's best translations are taken.
        trained: Inputs of the text that the student is trained on already; None: its training has not begun.
        processes: Number of processes that compare translations with references.
        say: Called with the current activity.

    Raises:
        InputError: The references do not fit the text, or the student is trained on other text.
    """
    recorded = read_inputs(folder / INPUTS_FILE, folder)
    settings = {"translations": shards.digest[:16], "languages": " to ".join(languages)}
    inputs = take_inputs(settings, {} if references is None else {"--target": references}, recorded)
    if trained is not None and (changes := differences(trained, inputs)):
        student = folder.parent / MODEL
        raise InputError(
            f"{student}: is trained on text made from other inputs: {'; '.join(changes)}; give the same, another "
            f"--output, or delete {student} to train again"
        )
    if recorded is None or differences(recorded, inputs) or not (folder / _STATISTICS).is_file():
        with whole_folder(folder) as partial:
            statistics = _write(partial / _PREFIX, shards, languages, references, processes, say)
            write_record(partial / _STATISTICS, statistics)
            write_record(partial / INPUTS_FILE, inputs)
    statistics = read_json(TextStatistics, folder / _STATISTICS, f"delete {folder} and run the command again")
    return DistilledText(folder / _PREFIX, inputs, statistics)


def _write(
    prefix: Path,
    shards: Shards,
    languages: tuple[str, str],
    references: Path | None,
    processes: int,
    say: Callable[[str], object],
) -> TextStatistics:
    lengths, pairs, chosen, kept, blank, copies = [0, 0], 0, 0, 0, 0, 0
    too_long = None if references is None else shards.teacher.longer_than_training()
    with ExitStack() as stack:
        files = [
            stack.enter_context(Path(f"{prefix}.{language}").open("w", encoding="utf-8", newline="\n"))
            for language in languages
        ]
        chunks = choose(_chunks(shards, references), tokenizer_of(languages[1]).name, processes)
        for chunk, best in chunks:
            targets = [texts[index] for texts, index in zip(chunk.translations, best, strict=True)]
            for index, reference in enumerate(chunk.references or ()):
                fails = not targets[index] or (too_long and too_long(chunk.sources[index], reference))
                if reference and fails:
                    targets[index], best[index], kept = reference, 0, kept + 1
            for side, (file, lines) in enumerate(zip(files, (chunk.sources, targets), strict=True)):
                lengths[side] += sum(map(len, lines))
                file.writelines(f"{line}\n" for line in lines)
            words = [[text.split() for text in side] for side in (chunk.sources, targets)]
            blank += words[0].count([])
            copies += sum(bool(source) and source == target for source, target in zip(*words, strict=True))
            pairs, chosen = pairs + len(best), chosen + sum(index > 0 for index in best)
            say(f"choosing translations: {pairs:,} of {shards.lines:,} lines")
    ratio = lengths[1] / max(1, lengths[0])
    return TextStatistics(pairs=pairs, chosen=chosen, kept=kept, blank=blank, copies=copies, ratio=ratio)


def _chunks(shards: Shards, references: Path | None) -> Iterator[Candidates]:
    """Yields the translations with their references; raises InputError if there are not as many of both."""
    together = zip_longest(shards, iter(()) if references is None else read_lines(references))
    while chunk := list(islice(together, _CHUNK)):
        for found, reference in chunk if references is not None else ():
            if found is None or reference is None:
                raise different_lines(references, "more" if found is None else "fewer", shards.lines)
        sources, translations = map(list, zip(*(found for found, _ in chunk), strict=True))
        yield Candidates(sources, translations, None if references is None else [each for _, each in chunk])


def different_lines(references: Path | None, than: str, lines: int) -> InputError:
    """Returns the error for references that are not as many as the ``lines`` of the source."""
    return InputError(
        f"{references}: has {than} lines than the --source, {lines:,}; line n of one must be the translation of line n "
        "of the other"
    )
