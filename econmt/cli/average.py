"""``econmt average``: averages the parameters of several checkpoints of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from econmt.checkpoint.tensor_files import restored
from econmt.cli.computing import use_threads
from econmt.config import limits
from econmt.config.optimizer import METRICS
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
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
    scores = None
    if strategy == "best":
        metric = METRICS[recipe.training.early_stopping.metric]
        sign = 1.0 if metric.higher else -1.0
        scores = {int(row["update"]): sign * row.get(metric.column, math.nan) for row in metrics}
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


def average_tensors(parts: Iterable[tuple[str, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Returns the mean of each tensor, summed in float64 and rounded once to its type.

    ``parts`` yields the origin, for messages, and the tensors of each set; of an iterator one set at a time is held.

    Raises:
        InputError: Two sets do not have the same tensors; the message names the set and the tensor.
    """
    sums: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}
    count, first = 0, ""
    for where, tensors in parts:
        count += 1
        if count == 1:
            first = where
            dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
            sums = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in tensors.items()}
        for name in sorted(set(sums) ^ set(tensors)):
            raise InputError(
                f"{where}: parameter '{name}' is not in both this file and {first}; average one run's files"
            )
        for name, tensor in tensors.items():
            if tensor.shape != sums[name].shape:
                raise InputError(
                    f"{where}: parameter '{name}' has shape {tuple(tensor.shape)}, in {first} it has "
                    f"{tuple(sums[name].shape)}; average one run's files"
                )
            sums[name] += tensor
    assert count, "nothing to average"
    return {name: (total / count).to(dtypes[name]) for name, total in sums.items()}


def choose_checkpoints(updates: Iterable[int], scores: Mapping[int, float] | None, count: int) -> list[int]:
    """Returns the updates of the ``count`` best checkpoints, oldest first; of the last ones if there are no scores.

    Higher scores are better; updates without a score or with NaN are never among the best.
    """
    if scores is None:
        return sorted(updates)[-count:]
    scored = [update for update in updates if update in scores and scores[update] == scores[update]]
    return sorted(sorted(scored, key=lambda update: (-scores[update], update))[:count])
