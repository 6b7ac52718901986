"""``econmt compress``: replaces the LSTM matrices of a trained model by low-rank factors."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer
from rich.table import Column, Table
from torch import Tensor

from econmt.checkpoint.quantized import restored
from econmt.cli.computing import use_threads
from econmt.config import limits
from econmt.config.model import rank_limit
from econmt.config.recipe import Model, recipe_text
from econmt.config.stacks import CELLS
from econmt.data.files import notice
from econmt.data.progress_bars import status_line
from econmt.errors import InputError, printable
from econmt.export.model_folder import DerivedModel
from econmt.model.compression import PARTS, Compressed, compress_tensors, lstm_matrices, rank_for, with_ranks
from econmt.options.option_groups import option
from econmt.options.shared_options import (
    AllCoresOption,
    CheckpointOption,
    ModelOption,
    NewModelOption,
    refuse_idle,
)
from econmt_memory.report.layout import print_table, table_console
from econmt_memory.report.tables import format_bytes


def compress(
    context: typer.Context,
    model: ModelOption,
    output: NewModelOption,
    rank: int | None = option(
        None, help="Rank of the factors in encoder and decoder.", min=1, max=limits.WIDTH
    ),
    encoder_rank: int | None = option(
        None, help="Rank of the factors in the encoder.", min=1, max=limits.WIDTH
    ),
    decoder_rank: int | None = option(
        None, help="Rank of the factors in the decoder.", min=1, max=limits.WIDTH
    ),
    energy: float | None = option(
        None,
        help="Share of each matrix's squared values to keep: chooses the smallest ranks where no rank is given; "
        "parts that would not become smaller stay as they are.",
    ),
    checkpoint: CheckpointOption = "best",
    threads: AllCoresOption = None,
) -> None:
    """Replace the LSTM matrices of a trained model by two low-rank factors each, in a new model folder.

    The factors are a truncated singular value decomposition. Parts of the model without a rank stay as they are. To
    recover the lost quality, train the result further, as in the second example.

    \b
    Example:
      econmt compress -m runs/multi30k --rank 64 -o runs/r64
      econmt train runs/r64/recipe.yaml training.initialize_from=runs/r64 \\
        output=runs/r64-tuned
    """
    derived = DerivedModel(model, output, "econmt compress")
    recipe, config = derived.recipe, derived.recipe.translation_model
    requested = {"encoder": encoder_rank or rank, "decoder": decoder_rank or rank}
    options = {"encoder": "--encoder-rank" if encoder_rank else "--rank"}
    options["decoder"] = "--decoder-rank" if decoder_rank else "--rank"
    if energy is not None and not 0.0 < energy <= 1.0:
        raise InputError(f"--energy {energy}: give a share above 0 and at most 1")
    if encoder_rank and decoder_rank:
        refuse_idle(context, "is given by --encoder-rank and --decoder-rank; leave it out", "rank")
    if all(requested.values()):
        refuse_idle(context, "chooses ranks that are not given, but all are; leave it out", "energy")
    if energy is None and not any(requested.values()):
        raise InputError("econmt compress: give --rank, --encoder-rank, --decoder-rank or --energy")
    use_threads(threads)
    path, stored, metadata = derived.read(checkpoint)
    tensors = restored(stored, path)
    metadata.pop("quantized", None)
    with status_line() as say:
        say("choosing ranks" if energy is not None else "checking ranks")
        ranks = _ranks(config, tensors, requested, options, energy, model)
        say(f"factorising {' and '.join(ranks)}")
        made, report = compress_tensors(tensors, ranks)
    smaller = with_ranks(config, ranks)
    description = json.loads(metadata["model"]) | smaller.model_dump(mode="json")
    metadata |= {
        "model": json.dumps(description, sort_keys=True),
        "compressed": " ".join(f"{part}={number}" for part, number in ranks.items()),
    }
    derived.write(made, metadata, recipe_text(recipe.model_copy(update={"model": smaller})))
    _print(report, tensors, made)
    notice(f"compressed {path}; recover the lost quality by training with training.initialize_from={output}")
    print(printable(output))


def _ranks(
    model: Model,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, int | None],
    options: Mapping[str, str],
    energy: float | None,
    folder: Path,
) -> dict[str, int]:
    """Returns the ranks of the parts to factorise; raises InputError if no part would become smaller."""
    ranks = {}
    for part in PARTS:
        before: int | None = getattr(model, part).rank
        rank, limit, cell = wanted[part], rank_limit(model, part), getattr(model, part).cell
        if rank is None and energy is None:
            continue
        if not CELLS[cell].ranks:
            notice(f"the {part} stays as it is: cells of type {cell} cannot be factorised")
            continue
        if before is not None:
            raise InputError(
                f"{folder}: the {part} already has rank {before}; compress the model that it was made from"
            )
        if rank is not None:
            if rank > limit.rank:
                raise InputError(
                    f"{options[part]} {rank} must be at most {limit.rank} for the {part}: {limit.reason}"
                )
        else:
            assert energy is not None
            rank = rank_for((tensors[name] for name in lstm_matrices(tensors, part)), energy)
            if rank > limit.rank:
                notice(
                    f"the {part} stays as it is: --energy {energy} needs rank {rank}, and ranks above {limit.rank} "
                    f"save nothing ({limit.reason})"
                )
                continue
        ranks[part] = rank
    if not ranks:
        if energy is None:
            raise InputError(f"{folder}: nothing would become smaller; no part with a rank can be factorised")
        raise InputError(f"--energy {energy}: nothing would become smaller; give a smaller share, or --rank")
    return ranks


def _print(report: Sequence[Compressed], before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    """Prints a table of the matrices and of the whole model."""
    figures = ("shape", "rank", "kept", "parameters before", "after", "bytes after")
    headings = (Column(heading, justify="right") for heading in figures)
    table = Table("matrix", *headings, title="LSTM matrices, share of squared values kept")
    sizes = {name: tensor.element_size() for name, tensor in before.items()}
    for entry in report:
        table.add_row(
            entry.name,
            f"{entry.rows} x {entry.columns}",
            str(entry.rank),
            f"{entry.kept:.2%}",
            f"{entry.before:,}",
            f"{entry.after:,}",
            format_bytes(entry.after * sizes[entry.name]),
        )
    counts = [sum(tensor.numel() for tensor in tensors.values()) for tensors in (before, after)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in after.values())
    table.add_section()
    table.add_row("the whole model", "", "", "", f"{counts[0]:,}", f"{counts[1]:,}", format_bytes(size))
    print_table(table_console(), table)
