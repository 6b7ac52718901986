"""``econmt recipes``: list, copy, show and validate recipes."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

import typer

from econmt.config.recipe import Recipe, TextData, find_recipe, load_recipe, recipe_text, shipped_recipes
from econmt.data.files import write_atomically
from econmt.errors import InputError, printable, talk
from econmt.options.option_groups import argument, option, with_option_groups
from econmt.options.shared_options import RecipeChoice
from econmt_memory.report.tables import WIDTH

app = typer.Typer(help="List, copy, show and validate recipes.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_recipes() -> None:
    """List the shipped recipes: name, languages, text and purpose.

    \b
    Example:
      econmt recipes list
    """
    shipped = shipped_recipes()
    width = max(map(len, shipped)) + 2
    for name, file in shipped.items():
        data = load_recipe(file).data
        languages = data.text if isinstance(data, TextData) else f"{data.source}-{data.target}"
        print(f"{name:<{width}}{languages} {', '.join(data.train[:2])}{', ...' * (len(data.train) > 2)}")
        print(fill(summary(file), WIDTH, initial_indent=" " * width, subsequent_indent=" " * width))


def summary(file: Path) -> str:
    """Returns the comment in a recipe's first line."""
    with file.open(encoding="utf-8") as lines:
        return lines.readline().removeprefix("#").strip()


@app.command("copy")
@with_option_groups
def copy(
    name: str = argument(..., help="Name of a shipped recipe, or a file."),
    destination: Path | None = argument(
        None, help="File or folder to write; default: NAME.yaml in the current folder."
    ),
    force: bool = option(False, help="Replace a file that exists."),
) -> None:
    """Copy a recipe with its comments, as a start for your own.

    \b
    Example:
      econmt recipes copy multi30k mine.yaml
    """
    source = find_recipe(name)
    load_recipe(source)  # only valid recipes are copied
    target = destination or Path(source.name)
    if target.is_dir():
        target = target / source.name
    if target.exists() and not force:
        raise InputError(f"{target}: exists already; choose another name, or --force to replace it")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent}: no such folder")
    write_atomically(target, source.read_bytes())
    print(printable(target))


@app.command("show")
@with_option_groups
def show(
    recipe: RecipeChoice,
    changed_only: bool = option(False, help="Leave out keys that have their default values."),
) -> None:
    """Print a recipe with all keys, including defaults and changes.

    \b
    Example:
      econmt recipes show iwslt training.batch.size=256 --changed-only
    """
    print(recipe_text(recipe.load(), changed_only=changed_only), end="")


@app.command("validate")
@with_option_groups
def validate(recipes: list[str] = argument(..., help="Recipes: YAML files or shipped names.")) -> None:
    """Check recipes and print all errors; exit with code 2 if any.

    \b
    Example:
      econmt recipes validate mine.yaml
    """
    failed = False
    for name in recipes:
        try:
            checked: Recipe = load_recipe(name)
        except InputError as error:
            failed = True
            for line in error.lines:
                talk(f"econmt: error: {line}")
        else:
            print(f"{name}: ok ({checked.name})")
    if failed:
        raise typer.Exit(InputError.exit_code)
