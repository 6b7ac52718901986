"""``econmt average``: averages the parameters of several checkpoints of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from torch import Tensor

from econmt.checkpoint.quantized import restored
from econmt.cli.computing import use_threads
from econmt.cli.inspection import checkpoint_scores
from econmt.config import limits
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.decoding.averaging import average_tensors, choose_checkpoints
from econmt.errors import InputError, printable
from econmt.export.model_folder import DerivedModel, read_metrics
from econmt.options.option_groups import option
from econmt.options.shared_options import AllCoresOption, ModelOption, NewModelOption


def average(
    model: ModelOption,
    output: NewModelOption,
    count: int = option(4, "-n", help="Number of checkpoints to average.", min=1, max=limits.CHECKPOINTS),
    strategy: Literal["best", "last"] = option(
        "best", help="Average the best checkpoints on disk by the early stopping metric, or the last ones."
    ),
    threads: AllCoresOption = None,
) -> None:
    """Average the parameters of several checkpoints of a run, and write them to a new model folder.

    Only checkpoints whose parameters still exist can be averaged; training.keep_last_params is the number kept.

    \b
    Example:
      econmt average -m runs/multi30k -n 3 -o runs/multi30k-average
    """
    use_threads(threads)
    derived = DerivedModel(model, output)
    folder, recipe = derived.folder, derived.recipe
    files = folder.numbered_parameters()
    metrics = read_metrics(folder.metrics)
    scores = checkpoint_scores(recipe, metrics) if strategy == "best" else None
    chosen = choose_checkpoints(files, scores, count)
    if not chosen:
        raise InputError(f"{model}: has no checkpoint with metrics; give a folder that econmt train wrote")
    if len(chosen) < count:
        notice(
            f"averaging {len(chosen)} checkpoints, all that {model} has; train with a higher "
            f"training.keep_last_params (now {recipe.training.keep_last_params}) to keep more"
        )
    metadata: dict[str, str] = {}

    def parts(say: Callable[[str], None]) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for number, update in enumerate(chosen, 1):
            say(f"checkpoint {number} of {len(chosen)}: {files[update]}")
            path, tensors, stored = derived.read(update)
            metadata.update(stored)
            yield str(path), restored(tensors, path)

    with status_line() as say:
        averaged = average_tensors(parts(say))
        metadata.pop("quantized", None)
        metadata["averaged"] = " ".join(map(str, chosen))
        say(f"writing {output}")
        derived.write(averaged, metadata)
    notice(f"averaged the checkpoints of updates {', '.join(map(str, chosen))}")
    print(printable(output))
