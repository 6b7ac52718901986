from __future__ import annotations

import ast
import errno
import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import econmt.engine.devices  # noqa: F401  which every command that computes imports
from econmt import __version__, elsewhere
from econmt.cli import main as command
from econmt.errors import InputError, TrainingError
from tests.conftest import PATIENCE, ROOT, econmt_environment, fails_with, run_python
from tests.unit.cli.conftest import Call

OUT_OF_MEMORY = (
    "out of memory: lower training.batch.size, --batch-size or decoding.batch_size, give training.memory_budget, or "
    "take a smaller model"
)


@pytest.fixture
def run_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command line with a verb ``info`` that does what the test says."""

    def run(action: Any, *arguments: str) -> tuple[int, str, str]:
        module = ModuleType("econmt.cli.info")
        module.info = lambda: action()  # type: ignore[attr-defined]
        module.__spec__ = importlib.util.spec_from_loader("econmt.cli.info", None)
        monkeypatch.setitem(sys.modules, "econmt.cli.info", module)
        with pytest.raises(SystemExit) as left:
            command.main(["info", *arguments])
        output = capsys.readouterr()
        return int(left.value.code or 0), output.out, output.err

    return run


def test_a_failed_import_leaves_the_garbage_collector_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> ModuleType:
        assert not gc.isenabled()
        raise ImportError(name)

    monkeypatch.setattr(command.importlib, "import_module", fail)
    with pytest.raises(ImportError, match=r"econmt\.cli\.info"):
        command._application(["info"])
    assert gc.isenabled()


BUG = "this is a bug in econmt: "
AGAIN = " (run the command again with --debug for the traceback)"
NO_SPACE = "No space left on device; free some space and run the same command again"
TOO_LARGE = "File too large; allow larger files (ulimit -f) and run the same command again"


def test_an_error_is_one_line_or_a_traceback(run_verb: Any, call: Call) -> None:
    for error, code, line in (
        (InputError("text.en:3: not valid UTF-8"), 2, "text.en:3: not valid UTF-8"),
        (TrainingError("the loss is not finite"), 1, "the loss is not finite"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), 1, f"runs/x: {NO_SPACE}"),
        (OSError(errno.EFBIG, "File too large", "runs/x"), 1, f"runs/x: {TOO_LARGE}"),
        (PermissionError(13, "Permission denied", "x"), 1, "x: Permission denied; check the permissions"),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 1, "x: No such file"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), 2, "x: Is a directory"),
        (OSError(errno.EIO, "Input/output error", "x"), 1, "x: Input/output error"),
        (MemoryError(), 1, OUT_OF_MEMORY),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), 1, OUT_OF_MEMORY),
        (RuntimeError("could not create a primitive"), 1, OUT_OF_MEMORY),
        (RuntimeError("std::bad_alloc"), 1, OUT_OF_MEMORY),
        (
            RuntimeError("could not create a primitive descriptor"),
            70,
            f"{BUG}RuntimeError: could not create a primitive descriptor{AGAIN}",
        ),
        (ValueError("shapes (1, 2)\nand (3,)"), 70, f"{BUG}ValueError: shapes (1, 2) and (3,){AGAIN}"),
        (AssertionError(), 70, f"{BUG}AssertionError{AGAIN}"),
        (ImportError("no name 'x' in 'y'"), 70, f"{BUG}ImportError: no name 'x' in 'y'{AGAIN}"),
        (InputError("one", "two"), 2, "one\neconmt: error: two"),
    ):
        assert run_verb(fails_with(error)) == (code, "", f"econmt: error: {line}\n")
    for line in ("--debug recipes show nosuch", "recipes show nosuch --debug"):
        ended = call(line)
        assert ended.code == 2
        assert "Traceback (most recent call last)" in ended.err
        assert ended.err.splitlines()[-1].startswith("econmt: error: nosuch: no such recipe")
    code, _, said = run_verb(fails_with(AssertionError("no such symbol")), "--debug")
    assert code == 70
    assert "Traceback (most recent call last)" in said
    assert said.splitlines()[-1] == f"econmt: error: {BUG}AssertionError: no such symbol"
    assert call("recipes show -- --debug").err.startswith("econmt: error: --debug: no such recipe")


def test_interrupted_is_quiet_however_often(run_verb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: list[object] = []
    monkeypatch.setattr(command.signal, "signal", lambda _, handler: handlers.append(handler))
    assert run_verb(fails_with(KeyboardInterrupt())) == (130, "", "")
    assert handlers == [command._interrupt, signal.SIG_IGN]


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_verb(call: Call, arguments: list[str]) -> None:
    ended = call(*arguments)
    text = ended.out + ended.err
    for verb, summary in command.COMMANDS.items():
        assert f"  {verb} " in text
        assert summary[:40] in text


def test_every_verb_is_a_module_and_every_module_a_verb() -> None:
    modules = {file.stem for file in Path(command.__file__).parent.glob("[a-z]*.py")}
    assert modules - {"main"} >= set(command.COMMANDS) - set(elsewhere.COMMANDS)
    assert all(importlib.util.find_spec(name) for name in elsewhere.COMMANDS.values())
    for name in modules - {"main"} - set(command.COMMANDS):
        tree = ast.parse((Path(command.__file__).parent / f"{name}.py").read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name not in names, f"econmt/cli/{name}.py has a verb that main.py does not list"


HELP_AND_RECIPES = """
import contextlib
from econmt.cli.main import main
for words in (["--help"], ["recipes", "list"]):
    with contextlib.suppress(SystemExit):
        main(words)
"""
MEASURED_STEP = """
import torch
from econmt_memory.measure.tracker import Tracker
weight = torch.ones(4, 4, requires_grad=True)
with Tracker(torch.device("cpu")).recording() as tracker:
    tracker.begin("forward")
    (weight @ weight).sum().backward()
assert tracker.flops.total() > 0
"""


@pytest.mark.parametrize(
    ("code", "avoided"),
    [
        (HELP_AND_RECIPES, "torch matplotlib"),
        (
            "import econmt.cli.train, econmt.cli.translate, econmt.cli.score",
            "triton torch._dynamo torch._inductor matplotlib tensorboard",
        ),
        pytest.param(MEASURED_STEP, "sympy torch._dynamo triton", marks=pytest.mark.slow),
    ],
)
def test_what_is_not_needed_is_not_loaded(code: str, avoided: str) -> None:
    """Each takes time or tens of MB."""
    code += f"\nimport sys\nprint('loaded', {set(avoided.split())} & set(sys.modules))"
    done = run_python("-c", code, check=False)
    assert done.stdout.splitlines()[-1:] == ["loaded set()"], done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    # The reader's end is closed before econmt starts, so the write fails for certain.
    code = "import sys; sys.stdin.readline(); from econmt.cli.main import main; main(['recipes', 'list'])"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code], env=econmt_environment(), cwd=ROOT, **pipes)
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("go\n", timeout=PATIENCE)
    assert errors == ""
    assert process.returncode == 1


def test_text_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    text = "name: größer\noutput: o\ndata: {source: a, target: b, train: [c], valid: d}\ntraining: {}\n"
    (tmp_path / "r.yaml").write_text(text, encoding="utf-8")
    locale = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    done = run_python("-m", "econmt", "recipes", "show", tmp_path / "r.yaml", env=locale)
    assert done.stdout.startswith("name: größer\n")


@pytest.mark.parametrize(("given", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_that_wait_do_not_spin(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    with pytest.raises(SystemExit):
        command.main(["--version"])
    capsys.readouterr()
    assert os.environ["OMP_WAIT_POLICY"] == expected


def test_econmt_alone_limits_the_kernels_that_are_cached() -> None:
    code = "import os; os.environ.pop('LRU_CACHE_CAPACITY', None)"
    for package in ("econmt_ops", "econmt"):
        code += f"; import {package}; print(os.environ.get('LRU_CACHE_CAPACITY'))"
    assert run_python("-c", code).stdout.split() == ["None", "16"]


GROWTH = """
import ctypes, os
for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.pop(name, None)
import econmt, econmt_ops, torch

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def losses(dtype, rows):
    weight = torch.randn(600, 64, requires_grad=True)
    for number in rows:
        hidden, targets = torch.randn(number, 64, dtype=dtype, requires_grad=True), torch.randint(0, 600, (number,))
        econmt_ops.linear_cross_entropy(hidden, weight, targets, implementation="recompute").backward()
        econmt_ops.linear(hidden, weight, layout="packed").sum().backward()

torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    losses(dtype, range(300, 340))
    before = resident()
    losses(dtype, range(340, 440))
    print(resident() - before)
"""


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc and trims the C library's heap")
def test_products_of_many_shapes_leave_nothing_behind() -> None:
    # PyTorch keeps 0.3 MB of each shape, 1,024 of them, unless it is told not to: 60 MB here, for each type.
    for grown in map(int, run_python("-c", GROWTH).stdout.split()):
        assert grown < 10e6


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limit")
def test_too_little_address_space_is_one_clear_line() -> None:
    size = 1_000_000
    command_line = f"ulimit -v {size}; exec {sys.executable} -m econmt info nowhere"
    done = subprocess.run(
        ["sh", "-c", command_line], env=econmt_environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"econmt: error: this process may take {size:,} kB (ulimit -v)")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        ImportError("numpy's C-extensions failed.\n\nOriginal error was: x.so: cannot map zero-fill pages"),
        OSError("libtorch_global_deps.so: cannot create shared object descriptor: Cannot allocate memory"),
    ],
)
def test_a_library_for_which_there_is_no_memory_is_one_clear_line(
    run_verb: Any, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = "while a library is loaded: allow more memory, or end other programs"
    assert run_verb(fails_with(error))[::2] == (1, f"econmt: error: out of memory {advice}\n")
    monkeypatch.setattr(command, "_address_space", lambda: 1_500_000 * 1024)
    limit = "(this process may take 1,500,000 kB: ulimit -v)"
    assert run_verb(fails_with(error))[::2] == (1, f"econmt: error: out of memory {limit} {advice}\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="it has no list of users to be missing from")
def test_a_user_without_home_and_account_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import pwd, sys\ndef unknown(number):\n    raise KeyError(number)\npwd.getpwuid = unknown\n"
        "from econmt.cli.main import main\nmain(sys.argv[1:])"
    )
    for name in ("HOME", "XDG_CACHE_HOME", "ECONMT_CACHE", "MPLCONFIGDIR", "USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    arguments = ["train", "quickstart", "--dry-run", f"output={tmp_path / 'run'}"]
    done = run_python("-c", code, *arguments, env={"TMPDIR": str(tmp_path)}, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / f"econmt-{os.geteuid()}"
    told = [line for line in done.stderr.splitlines() if line.startswith("econmt: warning: ")]
    assert told == [
        f"econmt: warning: there is no home folder, so caches are kept in {folder}; set HOME or ECONMT_CACHE to keep "
        "them elsewhere"
    ]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_ctrl_c_while_a_module_is_imported_is_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imports(words: Sequence[str]) -> None:
        try:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as pressed:
                raise SystemError("initialization of _c_extension raised an error") from pressed
        except SystemError:
            raise ImportError("cannot import name Figure") from None  # as a module in C says it

    monkeypatch.setattr(command, "_application", imports)
    for words in ([], ["--debug"]):
        with pytest.raises(SystemExit) as end:
            command.main(["train", *words])
        assert end.value.code == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_python_ends_changes_nothing() -> None:
    code = (
        "import atexit, os, signal\n"
        "from econmt.cli.main import main\n"
        "atexit.register(lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(3)])\n"
        "main(['--version'])"
    )
    done = run_python("-c", code, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"econmt {__version__}\n", "")


def test_ctrl_c_in_executed_text_is_no_death_by_signal(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "import econmt.cli.main as command\n"
        "from econmt.__main__ import main\n"
        "def run(*_):\n"
        "    exec('os.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(1000): pass')\n"
        "command._application = run\n"
        f"import atexit; atexit.register(open, {str(tmp_path / 'made')!r}, 'w')\n"
        "sys.argv = ['econmt', 'train']\n"
        "main()"
    )
    (tmp_path / "presses.py").write_text(code)
    start = "import runpy; runpy.run_module('presses', run_name='__main__', alter_sys=True)"
    done = run_python("-c", start, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    assert (tmp_path / "made").exists()
