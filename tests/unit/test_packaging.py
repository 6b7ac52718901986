"""What an installed econmt holds: its packages, C library and recipes; and what files for a container name."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import typer
import yaml

import econmt_ops
import econmt_runtime
from econmt import __version__
from econmt.cli.main import _application
from econmt.export.runtime import export_runtime
from econmt_ops.backends.c import platforms
from tests.conftest import ROOT, run_python
from tests.unit.training.tiny import Run, write_text

COMPILER = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
PACKAGES = "econmt/_packages/"
"""Folder of the packages that are distributions of their own, too."""
LIBRARY = f"{PACKAGES}econmt_ops/backends/c/_kernels.{platforms.HERE}.so"

IGNORED = shutil.ignore_patterns("__pycache__", "*.so", "build", "*.egg-info")
"""What building and installing leave in a checkout."""


def copy_sources(folder: Path) -> Path:
    """Copies what is packaged, so that the checkout stays clean, but nothing that was built in it; returns the folder."""
    for name in ("econmt", "econmt_distill", "econmt_serve", "memory", "ops", "recipes", "runtime"):
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def build(folder: Path, what: str, compiler: str | None = None) -> tuple[Path, str]:
    """Builds a "wheel" or an "sdist" of the sources in ``folder``; returns it and what the build printed."""
    script = f"import sys; from setuptools.build_meta import build_{what}; build_{what}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder / what)],
        cwd=folder,
        env={**os.environ, **({} if compiler is None else {"CC": compiler})},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    (built,) = (folder / what).iterdir()
    return built, done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel."""
    return build(copy_sources(tmp_path_factory.mktemp("sources")), "wheel")[0]


def held(wheel: Path) -> set[str]:
    """The files of a wheel, without those that describe it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def described(wheel: Path, file: str = "METADATA") -> str:
    """A file of those that describe a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))
        return archive.read(name).decode()


def python_in(wheel: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in ``folder`` with the wheel's packages and not those of this checkout."""
    installed = folder / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    return run_python(*arguments, env={"PYTHONPATH": str(installed)}, cwd=folder, check=False)


@pytest.mark.slow
def test_holds_every_module_and_recipe_and_nothing_else(wheel: Path) -> None:
    names = held(wheel)
    modules = {file.relative_to(ROOT).as_posix() for file in ROOT.glob("econmt*/**/*.py")} | {
        PACKAGES + file.relative_to(folder).as_posix()
        for folder in (ROOT / "memory", ROOT / "ops", ROOT / "runtime")
        for file in folder.glob("econmt*/**/*.py")
    }
    assert {name for name in names if name.endswith(".py")} == modules
    recipes = {f"econmt/_recipes/{file.name}" for file in (ROOT / "recipes").glob("*.yaml")}
    assert len(recipes) >= 6
    assert recipes <= names
    typed = {f"{PACKAGES}econmt_{name}/py.typed" for name in ("memory", "ops", "runtime")}
    assert {"econmt.pth", "econmt/py.typed", *typed} <= names
    pages = {
        f"{PACKAGES}econmt_memory/report/page.html",
        *(f"econmt_serve/page/{each}.html" for each in ("index", "docs")),
        f"{PACKAGES}econmt_runtime/web/index.html",
    }
    assert {name for name in names if name.endswith(".html")} == pages
    page = {file.relative_to(ROOT).as_posix() for file in (ROOT / "econmt_serve/page").iterdir()}
    web = (ROOT / "runtime/econmt_runtime/web").iterdir()
    assert page | {f"{PACKAGES}econmt_runtime/web/{file.name}" for file in web} <= names
    assert {name for name in names if name.endswith(".so")} == (
        {LIBRARY} if shutil.which(COMPILER) else set()
    )
    kernels = (
        file.relative_to(ROOT / "ops").as_posix() for file in (ROOT / "ops" / "econmt_ops").rglob("*.cu*")
    )
    assert {name for name in names if ".cu" in name} == {PACKAGES + name for name in kernels}
    suffixes = ".py .pth .yaml .md .typed .html .css .js .svg .wasm .so .c .h .cu .cuh"
    assert {Path(name).suffix for name in names} <= {*suffixes.split()}
    sources = (ROOT / "ops/econmt_ops/backends/c").glob("*.[ch]")
    assert {f"{PACKAGES}econmt_ops/backends/c/{file.name}" for file in sources} <= names


def packaged(wheel: Path, package: str) -> set[str]:
    """The files of a package in the wheel of all, by their names in a wheel of its own."""
    return {name.removeprefix(PACKAGES) for name in held(wheel) if name.startswith(f"{PACKAGES}{package}/")}


@pytest.mark.thorough
def test_the_operations_are_a_distribution_of_their_own(wheel: Path, tmp_path: Path) -> None:
    ops, _ = build(copy_sources(tmp_path / "sources") / "ops", "wheel")
    assert held(ops) == packaged(wheel, "econmt_ops")
    assert not held(ops) & held(wheel)  # so that uninstalling one leaves the other whole
    metadata = described(ops)
    assert "\nName: econmt-ops\n" in metadata
    assert f"\nVersion: {econmt_ops.__version__}\n" in metadata
    needs = re.findall(r"^Requires-Dist: (.*)", metadata, re.MULTILINE)
    assert [each for each in needs if "extra ==" not in each] == ["torch>=2.7"]
    done = python_in(ops, tmp_path, "-c", WHICH)
    built = shutil.which(COMPILER) is not None
    assert done.stdout == f"{tmp_path}/site/econmt_ops/backends/c/__init__.py {built}\n"


ACCOUNT = """
import sys, torch
import econmt_memory as memory
model = torch.nn.Linear(8, 4)
with memory.track(model) as account:
    model(torch.ones(64, 8)).sum().backward()
account.show()
account.save("page.html")
print(memory.predict(lambda: model(torch.ones(64, 8)), model).by_category()["weights"])
print([name for name in sys.modules if name.partition(".")[0] in ("econmt", "econmt_ops")])
"""


@pytest.mark.slow
def test_the_memory_account_is_a_distribution_of_its_own(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "memory", tmp_path / "memory", ignore=IGNORED)
    wheel, _ = build(tmp_path / "memory", "wheel")
    folder = ROOT / "memory" / "econmt_memory"
    expected = {*folder.rglob("*.py"), folder / "py.typed", folder / "report" / "page.html"}
    assert held(wheel) == {file.relative_to(folder.parent).as_posix() for file in expected}
    metadata = described(wheel)
    assert "\nName: econmt-memory\n" in metadata
    assert f"\nVersion: {__version__}\n" in metadata
    needs = re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata, re.MULTILINE)
    assert needs == ["torch", "numpy", "rich"]
    done = python_in(wheel, tmp_path, "-c", ACCOUNT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "where the bytes of a training step went" in done.stdout
    assert done.stdout.splitlines()[-2:] == ["1024", "[]"]
    assert "<svg" in (tmp_path / "page.html").read_text(encoding="utf-8")


ALONE = """
import sys
sys.modules.update(dict.fromkeys(("econmt", "econmt_ops")))  # importing one raises ImportError
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_the_memory_account_is_tested_where_econmt_is_not() -> None:
    names = "test_account.py", "test_account_files.py", "test_programs.py", "test_watching.py"
    files = [f"../tests/unit/memory/account/{name}" for name in names]
    done = run_python("-c", ALONE, *files, cwd=ROOT / "memory", check=False)
    assert (done.returncode, " passed" in done.stdout) == (0, True), done.stdout


@pytest.fixture(scope="module")
def runtime_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the runtime alone."""
    return build(copy_sources(tmp_path_factory.mktemp("runtime")) / "runtime", "wheel")[0]


TRANSLATE = """
import sys
for name in ("econmt", "econmt_ops", "torch"):
    sys.modules[name] = None  # importing it raises ImportError
import econmt_runtime.library
print(econmt_runtime.library.library_file())
print([each.text for each in econmt_runtime.load(sys.argv[1]).translate(sys.argv[2:])])
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason="needs a C compiler")
def test_the_runtime_translates_alone(runtime_wheel: Path, tmp_path: Path) -> None:
    write_text(tmp_path, {"train": 60, "valid": 6, "test": 12})
    run = Run(tmp_path, tmp_path / "run")
    run.train()
    export_runtime(run.folder.path, tmp_path / "exported")
    done = python_in(runtime_wheel, tmp_path, "-c", TRANSLATE, "exported", "a b", "c")
    expected = [each.text for each in econmt_runtime.load(tmp_path / "exported").translate(["a b", "c"])]
    library = f"{tmp_path}/site/econmt_runtime/_kernels.{platforms.HERE}.so"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{library}\n{expected}\n", "")


@pytest.mark.slow
def test_the_runtime_is_a_distribution_of_its_own(wheel: Path, runtime_wheel: Path) -> None:
    library = {f"econmt_runtime/_kernels.{platforms.HERE}.so"} if shutil.which(COMPILER) else set()
    assert held(runtime_wheel) == packaged(wheel, "econmt_runtime") | library
    assert not held(runtime_wheel) & held(wheel)
    metadata = described(runtime_wheel)
    told = re.findall("^(?:Name|Version|Requires-Dist): (.*)", metadata, re.MULTILINE)
    assert told == ["econmt-runtime", econmt_runtime.__version__, "numpy>=1.26", "sentencepiece>=0.2.0"]


def test_a_source_distribution_of_the_runtime_says_that_it_has_no_library(tmp_path: Path) -> None:
    sdist, _ = build(copy_sources(tmp_path / "sources") / "runtime", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    built, _ = build(tmp_path / sdist.name.removesuffix(".tar.gz"), "wheel")
    assert built.name.endswith("-py3-none-any.whl")
    assert "econmt_runtime/translator.py" in held(built)
    code = "import sys; sys.modules['econmt_ops'] = None; import econmt_runtime.library as it; it.start()"
    done = python_in(built, tmp_path, "-c", code)
    assert (
        f"the C library _kernels.{platforms.HERE}.so is missing; export the model again with" in done.stderr
    )


def test_all_distributions_have_the_same_licence() -> None:
    assert len({(ROOT / name / "LICENSE").read_bytes() for name in ("", "memory", "ops", "runtime")}) == 1


WHICH = "import econmt_ops.backends.c as c; print(c.__file__, c.is_built())"
WHICH_OF_ECONMT = f"import econmt; {WHICH}"
"""As :data:`WHICH`, where a folder of PYTHONPATH is no place of .pth files."""


@pytest.mark.slow
def test_the_c_library_of_the_wheel_is_found(wheel: Path, tmp_path: Path) -> None:
    done = python_in(wheel, tmp_path, "-c", WHICH_OF_ECONMT)
    built = shutil.which(COMPILER) is not None
    expected = f"{tmp_path}/site/{PACKAGES}econmt_ops/backends/c/__init__.py {built}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_whole_but_for_the_library(wheel: Path, tmp_path: Path) -> None:
    other, said = build(copy_sources(tmp_path / "sources"), "wheel", compiler="no-such-compiler")
    assert held(other) == held(wheel) - {LIBRARY}
    assert said.count("econmt is installed without its C library") == 1
    done = python_in(other, tmp_path, "-c", WHICH_OF_ECONMT)
    expected = f"{tmp_path}/site/{PACKAGES}econmt_ops/backends/c/__init__.py False\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_a_source_distribution_holds_what_the_library_is_built_from(tmp_path: Path) -> None:
    with tarfile.open(build(copy_sources(tmp_path), "sdist")[0]) as archive:
        members = archive.getnames()
    assert any(name.endswith("/ops/setup.py") for name in members)
    names = {Path(name).name for name in members if "/econmt_ops/backends/c/" in name}
    folder = ROOT / "ops" / "econmt_ops" / "backends" / "c"
    expected = {file.name for file in folder.iterdir() if file.suffix in (".py", ".c", ".h")}
    assert {"kernels.c", "kernels.h", "variant.h"} <= expected
    assert names == expected


@pytest.mark.slow
def test_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    done = python_in(wheel, tmp_path, "-m", "econmt", "recipes", "copy", "iwslt")
    assert (done.returncode, done.stdout, done.stderr) == (0, "iwslt.yaml\n", "")
    assert (tmp_path / "iwslt.yaml").read_bytes() == (ROOT / "recipes" / "iwslt.yaml").read_bytes()


@pytest.mark.slow
def test_docstrings_name_no_file_that_the_wheel_lacks(wheel: Path) -> None:
    named = re.compile(r"(?:docs|scripts|tests)/[\w./-]*\w|README\.md")
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
        for name in sorted(files):
            if not name.endswith(".py"):
                continue
            for found in named.findall(archive.read(name).decode("utf-8")):
                beside = f"{name.rpartition('/')[0]}/{found}"
                assert beside in files, f"{name} names {found}"


@pytest.mark.slow
def test_metadata(wheel: Path) -> None:
    metadata, scripts = described(wheel), described(wheel, "entry_points.txt")
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nRequires-Dist: torch>=2.7\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "econmt = econmt.__main__:main" in scripts


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
INSTRUCTIONS = [tuple(line.split(" ", 1)) for line in TEXT.splitlines() if line and not line.startswith("#")]
KNOWN = {"FROM", "RUN", "ENV", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT"}


def values(name: str) -> list[str]:
    return [value for each, value in INSTRUCTIONS if each == name]


def test_every_instruction_is_one_and_copies_what_there_is_and_what_is_installed_is_copied() -> None:
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
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = re.search(r'pip install "/src\[(.*?)\]"', TEXT)
    assert wanted is not None
    assert set(wanted[1].split(",")) <= set(extras["optional-dependencies"])
    needed = {
        *("pyproject.toml", "setup.py", "README.md", "LICENSE", "econmt", "econmt_distill"),
        *("econmt_serve", "memory", "ops", "runtime", "recipes"),
    }
    assert all((ROOT / name).exists() for name in needed)
    assert not needed & set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())


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
