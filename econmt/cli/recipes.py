"""``econmt recipes``: list, copy, show and validate recipes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from econmt.cli.options import OverridesArgument, RecipeArgument
from econmt.data.files import whole_file, writing
from econmt.errors import InputError, printable
from econmt.recipe import Recipe, find_recipe, load_recipe, recipe_text, shipped_recipes

app = typer.Typer(help="List, copy, show and validate recipes.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_recipes() -> None:
    """List the recipes that come with econmt: name, what it trains, languages and training text.

    \b
    Example:
      econmt recipes list
    """
    rows = [("name", "what", "data")]
    for name, file in shipped_recipes().items():
        data = load_recipe(file).data
        rows.append((name, summary(file), f"{data.source}-{data.target} {' '.join(data.train)}"))
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, what, text in rows:
        print(f"{name:<{widths[0]}}  {what:<{widths[1]}}  {text}")


def summary(file: Path) -> str:
    """What a recipe says of itself in its first line, a comment."""
    with file.open(encoding="utf-8") as lines:
        return lines.readline().removeprefix("#").strip()


@app.command("copy")
def copy(
    name: Annotated[str, typer.Argument(help="Shipped recipe, or a file.")],
    destination: Annotated[
        Path | None,
        typer.Argument(help="File or folder to write; NAME.yaml here if left out."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Copy a recipe, comments and all, to start your own from.

    \b
    Example:
      econmt recipes copy multi30k mine.yaml
    """
    source = find_recipe(name)
    load_recipe(source)  # what is no recipe is not copied for one
    target = destination or Path(source.name)
    if target.is_dir():
        target = target / source.name
    if target.exists() and not force:
        raise InputError(f"{target}: exists already; choose another name, or --force to replace it")
    if not target.parent.is_dir():
        raise InputError(f"{target.parent}: no such folder")
    content = source.read_bytes()
    with writing(target), whole_file(target) as file:
        file.write(content)
    print(printable(target))


@app.command("show")
def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    changed_only: Annotated[
        bool, typer.Option("--changed-only", help="Leave out what equals the defaults.")
    ] = False,
) -> None:
    """Print a recipe with every key, defaults and overrides resolved.

    \b
    Example:
      econmt recipes show iwslt training.batch.size=256 --changed-only
    """
    print(recipe_text(load_recipe(recipe, overrides or ()), changed_only=changed_only), end="")


@app.command("validate")
def validate(
    recipes: Annotated[list[str], typer.Argument(help="Recipes: files, or shipped names.")],
) -> None:
    """Check recipes; everything wrong with them is printed, and the exit code is then 2.

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
                print(f"econmt: error: {line}", file=sys.stderr)
        else:
            print(f"{name}: ok ({checked.name})")
    if failed:
        raise typer.Exit(InputError.exit_code)
