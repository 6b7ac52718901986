"""``econmt generate``: writes text with a language model."""

from __future__ import annotations

from econmt.cli.computing import line_output, load_reader
from econmt.config import limits
from econmt.options.option_groups import option
from econmt.options.search_options import DrawingKeys, TopTokens
from econmt.options.shared_options import FloatComputing, ModelOption, OutputOption


def generate(
    model: ModelOption,
    *,
    prompt: str = option("", help="Beginning of the text.", show_default="an empty text"),
    length: int = option(
        100, help="Number of tokens to write, including ends of lines.", min=1, max=limits.INPUT_LENGTH
    ),
    top_k: TopTokens = 0,
    drawing: DrawingKeys,
    output: OutputOption = None,
    checkpoint: str = option(
        "best",
        "--checkpoint",
        "-c",
        help="Checkpoint: best, last, the number of an update, or a parameter file.",
    ),
    computing: FloatComputing,
) -> None:
    """Write text with a language model: each token is drawn from the distribution given all tokens before it.

    \b
    Example:
      econmt generate -m runs/wikitext2 --prompt "The city" --length 50 --top-k 50
    """
    with line_output(output, [], [model]) as write:
        for line in load_reader(model, checkpoint, computing).continued(
            prompt, length, top_k=top_k, **drawing
        ):
            write([line])
