"""The documentation says what is true: commands parse, links lead somewhere, generated pages are up to date."""

from __future__ import annotations

import importlib
import importlib.util
import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

import econmt
from econmt.cli import main as command
from econmt.config.recipe import load_recipe, shipped_recipes
from tests.conftest import ROOT, run_python
from tests.documents.blocks import BLOCK, blocks, console_blocks
from tests.documents.blocks import commands as commands_in

FOLDERS = ("", "docs/**/", "memory/**/", "ops/**/", "runtime/")
PAGES = sorted(str(page.relative_to(ROOT)) for folder in FOLDERS for page in ROOT.glob(f"{folder}*.md"))
GENERATED = {"recipes.md", "commands.md"}
LONGEST_README = 130
LONGEST_PAGE = 140
"""Lines of a page that is written by hand."""
OPERATORS = {"|", "&&", "||", ";", ">", "<", ">>", "2>"}


def commands(page: str) -> Iterator[list[str]]:
    """The words of each econmt command in the shell blocks of a page."""
    for block in console_blocks(page):
        for line in commands_in(block):
            yield from commands_of(line)


def commands_of(line: str) -> Iterator[list[str]]:
    """The words of each econmt command in one line of shell, without what is redirected."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    current: list[str] = []
    for word in [*words, ";"]:
        if word not in OPERATORS:
            if current or not re.fullmatch(r"[A-Z_]+=.*", word):
                current.append(word)
            continue
        if current and Path(current[0]).name == "econmt":
            yield current[1:]
        current = []


def check(words: list[str]) -> None:
    """Parses a command as far as its arguments; raises what typer raises."""
    group = typer.main.get_command(command._application(words))
    name, *rest = words
    if name.startswith("-"):
        return
    verb = group.commands[name]  # type: ignore[attr-defined]
    if hasattr(verb, "commands"):
        name, *rest = rest
        verb = verb.commands[name]
    verb.make_context(name, list(rest))
    recipe = rest[0] if rest and not rest[0].startswith("-") else ""
    if words[0] in ("train", "prepare") or words[:2] == ["recipes", "show"]:
        overrides = [word for word in rest[1:] if "=" in word and not word.startswith("-")]
        known = shipped_recipes()
        name = Path(recipe).stem
        if (ROOT / recipe).is_file():
            load_recipe(ROOT / recipe, overrides)
            return
        assert name in known or recipe == "mine.yaml", f"{recipe} is no shipped recipe"
        load_recipe(name if name in known else "multi30k", overrides)


@pytest.mark.parametrize(
    "line", sorted({shlex.join(words) for page in PAGES for words in commands(page)}), ids="econmt {}".format
)
def test_commands_parse(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check(shlex.split(line))


def test_commands_are_found_and_can_fail() -> None:
    line = "ECONMT_DATA=/x .venv/bin/econmt train multi30k a.b=1 > out # econmt nosuch"
    assert list(commands_of(line)) == [["train", "multi30k", "a.b=1"]]
    found = list(commands_of("echo hi | econmt translate -m x && econmt info x"))
    assert found == [["translate", "-m", "x"], ["info", "x"]]
    for wrong in (["trian"], *(["train", "multi30k", key] for key in ("--nosuch", "training.batchsize=3"))):
        with pytest.raises(Exception, match=r"nosuch|trian|batchsize"):
            check(wrong)
    assert sum(len(list(commands(page))) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        assert file.is_file(), f"{page} links to {target}, which is no file"
        if anchor:
            assert anchor in anchors(file), f"{page} links to {target}"


def anchors(file: Path) -> set[str]:
    """The link targets that Markdown readers give to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}


@pytest.mark.parametrize("name", ["make_recipe_reference", "make_command_reference"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    pages_of = runpy.run_path(str(ROOT / "scripts" / f"{name}.py"))["pages"]
    for page, text in pages_of().items():
        assert page.read_text(encoding="utf-8") == text, "run make reference"


def test_pages_are_short_explain_dependencies_and_name_what_exists() -> None:
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    dependencies = project.partition("dependencies = [")[2].partition("]")[0]
    for name in re.findall(r'"([\w-]+)[>=<]', dependencies):
        assert f"| {name} |" in page, f"docs/installing.md does not say why econmt needs {name}"
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= LONGEST_README
    for page in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/results/*.md")]):
        if page.name not in GENERATED:
            lines = len(page.read_text(encoding="utf-8").splitlines())
            assert lines <= LONGEST_PAGE, f"{page.name} has {lines} lines"
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    trees = "\n".join(re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL))
    for folder, missing in (("docs/", {"index", "lab-notes"}), ("memory/", set()), ("ops/", set())):
        in_trees = re.findall(rf"(?:^|<|{folder})([\w-]+)>?$", trees, re.MULTILINE)
        assert {page.stem for page in ROOT.glob(f"{folder}*.md")} - {*in_trees} == missing
    folders = "econmt|econmt_distill|econmt_serve|memory|runtime|ops|scripts|tests|recipes|docs"
    named = re.compile(rf"`((?:{folders})/[\w./-]+\.(?:py|sh|md|yaml))")
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md")]:
        if page.name == "coming-from.md":  # files of other toolkits
            continue
        for file in named.findall(page.read_text(encoding="utf-8")):
            if not re.search("NAME|VERB", file):
                assert (ROOT / file).is_file(), f"{page.name} names {file}"
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^\.\. auto(\w+):: ([\w.]+)((?:\n +:.*)*)", text, re.MULTILINE)
    assert len(names) > 8
    for kind, name, options in names:
        module, _, last = name.rpartition(".")
        owner = importlib.import_module(name if kind == "module" else module)
        found = owner if kind == "module" else getattr(owner, last)
        for listed in re.findall(r":members: (.+)", options):
            for member in listed.split(", "):
                assert hasattr(found, member), f"{name} has no {member}"


def test_the_recipe_of_the_readme_is_complete_and_its_text_stays_parallel(tmp_path: Path) -> None:
    (text,) = [block.text for block in blocks("README.md") if block.language == "yaml"]
    (tmp_path / "mine.yaml").write_text(text, encoding="utf-8")
    assert load_recipe(tmp_path / "mine.yaml").output == "runs/mine"
    (split,) = re.findall("^paste .+", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    for side in ("en", "de"):
        (tmp_path / f"all.{side}").write_text(f"one {side}\ntwo\t{side}\n")
    subprocess.run(["bash", "-c", split], cwd=tmp_path, check=True)
    assert (tmp_path / "mytext.valid.de").read_text() == "one de\n"


@pytest.mark.slow
def test_the_site_is_built_without_warnings(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package)
    command = "sphinx --fail-on-warning --keep-going --quiet -b html -c docs . "
    done = run_python("-m", *command.split(), tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "docs" / "index.html").is_file()
    assert (tmp_path / "searchindex.js").is_file()


def test_constraints_cover_what_is_imported_and_the_version() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    wanted = re.findall(r'^  "([\w-]+)([>=<][^"]*)?"', project, re.MULTILINE)
    assert len(wanted) > 12
    for name, bounds in wanted:
        if re.match(r"[a-zA-Z]", name) and bounds:
            assert f"\n{name.lower()}==" in constraints, name
            assert "<" not in bounds or name == "ruff", f"{name} has an upper bound"
    assert "\ntorch==2.13.0\n" in constraints
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "## [Unreleased]" in text or f"## [{econmt.__version__}]" in text
