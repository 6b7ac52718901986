"""Forms of a trained student for use: a lexicon for shortlists, a model folder in 8 bits, and a runtime folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from econmt.api import SavedModel
from econmt.api.export import export_runtime, make_lexicon, quantize_model
from econmt.api.recipes import Recipe, find_corpus
from econmt_distill.inputs import differences, read_inputs, take_inputs, write_record


class PackedStudent(NamedTuple):
    """Paths of a student's forms.

    Attributes:
        lexicon: Lexicon for shortlists. int8: Model folder in 8 bits.
        runtime: Folder that translates without PyTorch, in 8 bits and with the lexicon.
    """

    lexicon: Path
    int8: Path
    runtime: Path


def pack(
    output: Path, recipe: Recipe, search: Sequence[Path], shortlist: int, say: Callable[[str], object]
) -> PackedStudent:
    """Makes the forms of a student in ``output``, unless they are there and were made from the same parameters.

    Args:
        output: Folder of the distillation.
        recipe: The student's recipe. search: Folders in which its text is looked up.
        shortlist: Number of target words that each source word adds to a shortlist.
        say: Called with the current activity.

    Raises:
        InputError: The runtime does not support the student, or a file cannot be written.
    """
    packed = PackedStudent(output / "lexicon", output / "int8", output / "runtime")
    student, record = SavedModel(recipe.output), output / "packed.json"
    recorded = read_inputs(record, record)
    inputs = take_inputs({"--shortlist": str(shortlist)}, {"student": student.parameters}, recorded)
    if recorded is not None and not differences(recorded, inputs) and all(path.exists() for path in packed):
        return packed
    record.unlink(missing_ok=True)  # from here on the forms are incomplete
    packed.lexicon.unlink(missing_ok=True)
    for path in (packed.int8, packed.runtime):
        shutil.rmtree(path, ignore_errors=True)
    data = recipe.pairs
    corpora = [find_corpus(prefix, data.source, data.target, search, progress=False) for prefix in data.train]
    make_lexicon(
        student.folder, packed.lexicon, corpora, top_k=shortlist, say=lambda text: say(f"lexicon: {text}")
    )
    quantize_model(student.folder, packed.int8, say=say)
    say(f"writing {packed.runtime}")
    export_runtime(packed.int8, packed.runtime, "int8", packed.lexicon)
    write_record(record, inputs)
    return packed
