"""The files for a container name what there is; a daemon that builds them is not needed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import typer
import yaml

from econmt.cli.main import _application
from tests.conftest import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
INSTRUCTIONS = [tuple(line.split(" ", 1)) for line in TEXT.splitlines() if line and not line.startswith("#")]
KNOWN = {"FROM", "RUN", "ENV", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}


def values(name: str) -> list[str]:
    return [value for each, value in INSTRUCTIONS if each == name]


def ignored() -> set[str]:
    return set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())


def test_every_instruction_is_one_and_copies_what_there_is() -> None:
    assert {name for name, _ in INSTRUCTIONS} <= KNOWN
    stages = [match[1] for value in values("FROM") if (match := re.search(r" AS (\w+)$", value))]
    assert stages == ["build"]
    for value in values("COPY"):
        source = re.match(r"--from=(\w+) (\S+)", value)
        if source:
            assert source[1] in stages
            assert f"python -m venv {source[2]}" in TEXT
        else:
            assert (ROOT / value.split()[0]).exists()
    assert values("USER") == ["econmt"]
    assert TEXT.index("USER econmt") < TEXT.index("ENTRYPOINT")


def test_what_is_installed_is_copied() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = re.search(r'pip install "/src\[(.*?)\]"', TEXT)
    assert wanted is not None
    assert set(wanted[1].split(",")) <= set(extras["optional-dependencies"])
    needed = {
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "econmt",
        "econmt_distill",
        "econmt_serve",
        "memory",
        "ops",
        "runtime",
        "recipes",
    }
    assert all((ROOT / name).exists() for name in needed)
    assert not needed & ignored()


def test_the_command_has_the_options_of_econmt_serve() -> None:
    (entry,) = (json.loads(value) for value in values("ENTRYPOINT"))
    assert entry[:2] == ["econmt", "serve"]
    command = typer.main.get_command(_application(["serve"])).commands["serve"]  # type: ignore[attr-defined]
    context = command.make_context("serve", [*entry[2:], "--api-keys", "/keys.txt"])
    assert context.params["host"] == "0.0.0.0"
    assert [Path(model) for model in context.params["models"]] == [Path("/model")]
    assert values("EXPOSE") == [str(context.params["port"])]
    (check,) = values("HEALTHCHECK")
    compile(json.loads(check[check.index("[") :])[2], "HEALTHCHECK", "exec")
    assert "127.0.0.1:5000/health" in check


def test_compose_publishes_on_this_machine_and_mounts_the_model() -> None:
    (service,) = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"].values()
    assert (ROOT / service["build"] / "Dockerfile").is_file()
    assert service["ports"] == ["127.0.0.1:5000:5000"]
    assert service["volumes"] == ["${MODEL:-./runs/quickstart}:/model:ro"]
    assert service["read_only"] is True
    cache = re.search(r"ECONMT_CACHE=(\S+)", TEXT)
    assert cache is not None
    assert any(each.startswith(cache[1]) for each in service["tmpfs"])
