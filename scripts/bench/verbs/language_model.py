"""``python -m scripts.bench language-model``: words a second of training, ours against PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import typer

from econmt.cli.measuring import BenchSession, Seconds
from econmt.cli.option_groups import with_option_groups
from econmt.config import limits
from econmt.engine.precision import precision_of
from scripts.bench import language_model


@with_option_groups
def language_model_command(
    *,
    hidden: Annotated[
        list[int], typer.Option(min=1, max=limits.WIDTH, help="Units of a layer; may be repeated.")
    ] = list(language_model.HIDDEN),  # noqa: B006  typer copies it
    batches: Annotated[
        list[int], typer.Option("--batch", min=1, max=limits.BATCH, help="Rows; may be repeated.")
    ] = list(language_model.BATCHES),  # noqa: B006
    vocabularies: Annotated[
        list[int],
        typer.Option("--vocabulary", min=5, max=limits.WORDS, help="Words; may be repeated."),
    ] = list(language_model.VOCABULARIES),  # noqa: B006
    bptt: Annotated[int, typer.Option(min=1, max=limits.POSITIONS, help="Tokens of a row.")] = 35,
    layers: Annotated[int, typer.Option(min=1, max=limits.LAYERS, help="Of the stack.")] = 2,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Precision of products.")] = "float32",
    only: Annotated[
        list[str] | None,
        typer.Option("--contender", help="Only those whose names contain this; may be repeated."),
    ] = None,
    compile_loop: Annotated[
        bool,
        typer.Option("--compile-loop", help="Also torch.compile of the step loop: minutes to compile."),
    ] = False,
    seconds: Annotated[Seconds, typer.Option(help="For each hidden size, batch and vocabulary.")] = 10.0,
    session: BenchSession,
) -> None:
    """Time training of a language model end to end: a step loop, torch.nn.LSTM, torch.compile, ours, what auto picks.

    Embedding, LSTM layers, output layer, backward pass, bounded gradient, SGD; random ids, no dropout. On a GPU each
    update is a CUDA graph where it can be captured. Shapes that the file of --csv has already are left out, and drawn
    from there.

    \b
    Example:
      python -m scripts.bench language-model --hidden 200 --batch 32
      python -m scripts.bench language-model --device cuda --csv lm.csv
    """
    precision = precision_of(dtype, session.device)
    before = session.rows_before(
        {"bench": "language-model", "precision": dtype, "bptt": bptt, "layers": layers}
    )
    done = {(int(row["vocabulary"]), int(row["hidden"]), int(row["batch"])) for row in before}
    problems = [
        problem
        for problem in language_model.grid(hidden, batches, vocabularies, bptt, layers)
        if problem[:3] not in done
    ]
    with session.measuring() as say:
        found = language_model.rows(
            problems, session.device, precision, seconds, say, only=only or (), compile_loop=compile_loop
        )
        rows = session.kept(found)
    title = f"training words/s: {layers} x LSTM, bptt {bptt}, {dtype}"
    columns = ("vocabulary", "hidden", "batch", "contender", "words/s", "x nn.LSTM")
    session.print(rows, columns, title)
    for row in rows:
        for what in ("failure", "not in a graph"):
            if what in row:
                print(
                    f"{row['contender']}, hidden {row['hidden']}, batch {row['batch']}: {what}: {row[what]}"
                )
    picks = {str(row["ops"]) for row in rows if row["contender"] == language_model.AUTO}
    for pick in sorted(picks):
        print(f"auto picks {pick}")
    everything: list[Mapping[str, str | int | float]] = [*before, *rows]
    if session.plot is not None and everything:
        language_model.draw(everything, session.plot)
