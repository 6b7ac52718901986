"""``econmt generate``: text that a language model writes."""

from __future__ import annotations

from typing import Annotated

import typer

from econmt.cli import options
from econmt.cli.options import ProductPrecision
from econmt.cli.text_models import load_reader
from econmt.cli.translate import TemperatureOption, TopKOption
from econmt.config import limits
from econmt.data.text.subwords import EOS
from econmt.decoding.streams import LineOutput


def generate(
    model: options.ModelOption,
    prompt: Annotated[str, typer.Option(help="How the text begins.", show_default="an empty text")] = "",
    length: Annotated[
        int, typer.Option(min=1, max=limits.INPUT_LENGTH, help="Tokens to write, ends of lines counted.")
    ] = 100,
    temperature: TemperatureOption = 1.0,
    top_k: TopKOption = 0,
    seed: Annotated[int, typer.Option(min=0, max=limits.SEED, help="Of the draws.")] = 1,
    output: options.OutputOption = None,
    checkpoint: Annotated[
        str,
        typer.Option("--checkpoint", "-c", help="best, last, the number of an update, or a parameter file."),
    ] = "best",
    device: options.DeviceOption = "auto",
    threads: options.ThreadsOption = None,
    precision: options.PrecisionOption = ProductPrecision.auto,
) -> None:
    """Write text with a language model: each token is drawn from its distribution given all before it.

    \b
    Example:
      econmt generate -m runs/wikitext2 --prompt "The city" --length 50 --top-k 50
    """
    options.check_writable(output)
    options.check_not_of_model(output, [model])
    lines_out = LineOutput(output)
    reader = load_reader(model, checkpoint, device, precision, threads)
    line = reader.vocabulary.encode(prompt)
    reader.read(line)
    with lines_out as write:
        for token in reader.write(length, temperature=temperature, top_k=top_k, seed=seed):
            if token == EOS:
                write([reader.vocabulary.decode(line)])
                line = []
            else:
                line.append(token)
        if line:
            write([reader.vocabulary.decode(line)])
