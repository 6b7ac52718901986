"""``python -m scripts.bench language-model``: words a second of training, ours against PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from econmt.cli.measuring import BenchSession, Seconds
from econmt.cli.option_groups import option, with_option_groups
from econmt.config import limits
from econmt.engine.precision import precision_of
from scripts.bench import language_model


@with_option_groups
def language_model_command(
    *,
    hidden: list[int] = option(
        list(language_model.HIDDEN), help="Units of a layer; may be repeated.", min=1, max=limits.WIDTH
    ),
    batches: list[int] = option(
        list(language_model.BATCHES), "--batch", help="Rows; may be repeated.", min=1, max=limits.BATCH
    ),
    vocabularies: list[int] = option(
        list(language_model.VOCABULARIES),
        "--vocabulary",
        help="Words; may be repeated.",
        min=5,
        max=limits.WORDS,
    ),
    bptt: int = option(35, help="Tokens of a row.", min=1, max=limits.POSITIONS),
    layers: int = option(2, help="Of the stack.", min=1, max=limits.LAYERS),
    dtype: Literal["float32", "bfloat16"] = option("float32", help="Precision of products."),
    only: list[str] | None = option(
        None, "--contender", help="Only those whose names contain this; may be repeated."
    ),
    compile_loop: bool = option(False, help="Also torch.compile of the step loop: minutes to compile."),
    seconds: Seconds = option(10.0, help="For each hidden size, batch and vocabulary."),
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
