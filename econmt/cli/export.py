"""``econmt export``: copies a model without its training state, or for use without PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from econmt.checkpoint.folder import ModelFolder
from econmt.cli.model_card import card_of, check_licence
from econmt.config import limits
from econmt.data.progress_bars import status_line
from econmt.errors import printable
from econmt.export.model_folder import export_model
from econmt.export.runtime import export_runtime
from econmt.options.option_groups import argument, option


def export(
    folder: Path = argument(..., help="Model folder."),
    destination: Path = argument(
        ..., help="Folder to create; a file if its name ends in .pyz (--runtime) or .html (--web)."
    ),
    hub: bool = option(False, help="Also write a model card for the Hugging Face Hub."),
    licence: str | None = option(
        None,
        "--license",
        help="With --hub: licence of the model by the Hub's name, such as apache-2.0 or other.",
    ),
    runtime: bool = option(
        False,
        help="Write a folder that translates without PyTorch: python FOLDER. A name that ends in .pyz makes one "
        "compressed file: python FILE.",
    ),
    web: bool = option(
        False, help="Write a folder whose page translates in the browser. A name in .html makes one file."
    ),
    platforms: str | None = option(
        None,
        help="With --runtime: systems to compile the C library for, separated by commas, of linux-x86_64, "
        "linux-aarch64, darwin-arm64, darwin-x86_64 and windows-amd64; needs ziglang.",
        show_default="this machine's",
    ),
    precision: Literal["float32", "int8"] | None = option(
        None,
        help="With --runtime or --web: precision of the matrices.",
        show_default="int8 if the model's are, else float32",
    ),
    lexicon: Path | None = option(
        None, help="With --runtime or --web: file of econmt lexicon that restricts the output vocabulary."
    ),
    lexicon_topk: int | None = option(
        None,
        help="With --lexicon: number of translations to keep of each word.",
        min=1,
        max=limits.SHORTLIST,
        show_default="all",
    ),
) -> None:
    """Write the best parameters, the recipe and the vocabulary, which translating needs, to a new folder.

    \b
    Example:
      econmt export runs/multi30k multi30k-en-de
      econmt export runs/multi30k multi30k-en-de --hub --license cc-by-nc-4.0
      econmt export --runtime runs/multi30k multi30k-runtime
      python multi30k-runtime < test.en
      econmt export --runtime runs/multi30k multi30k.pyz
      python multi30k.pyz < test.en
      econmt export --web multi30k-int8 multi30k-web --lexicon multi30k.lexicon
      econmt export --web multi30k-int8 multi30k.html
    """
    with status_line() as say:
        say(f"checking {folder} and copying it")
        if runtime or web:
            systems = (platforms or "").replace(",", " ").split()
            made = export_runtime(
                folder, destination, precision, lexicon, lexicon_topk, web=web, systems=systems
            )
        else:
            card = card_of(ModelFolder(folder), check_licence(licence)) if hub and licence else None
            made = export_model(folder, destination, card=card)
    print(printable(made))
