"""``econmt profile``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from econmt.cli import profile as verb
from econmt.config.recipe import load_recipe, shipped_recipes
from econmt.engine.outside_memory import ASSUMED
from econmt.engine.precision import NAMED
from econmt.estimate import profiling
from econmt.estimate.techniques import Technique
from econmt.model import Implementations
from econmt_memory.measure.ledger import Ledger
from econmt_memory.report.tables import format_bytes
from tests.unit.cli.conftest import Call
from tests.unit.training.tiny import write_recipe

BUCKET = ("--bucket", "6x5", "--batch", 8)


def assert_nothing_but_progress(told: str) -> None:
    """On a busy machine what takes long is said now and then, and nothing else."""
    assert all(
        re.match(
            "econmt: (predicting|measuring|timing|kernels|tracing|bucket|working|.*: stash .*, peak )", line
        )
        for line in told.splitlines()
    ), told


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe whose text is nowhere."""
    return write_recipe(tmp_path / "reverse.yaml", tmp_path / "nowhere", tmp_path / "run")


def test_prints_the_ledger_of_a_bucket(call: Call, recipe: Path) -> None:
    ended = call("profile", recipe, *BUCKET)
    assert ended.code == 0, ended.err
    assert_nothing_but_progress(ended.err)
    assert max(map(len, ended.lines)) <= 80
    assert " ".join(" ".join(ended.lines[:2]).split()) == (
        "reverse: 8 x 6 x 5 (sentence pairs x source x target positions), vocabulary 50 and 50, cpu, float32"
    )
    assert "Bytes and times: measured." in ended.lines
    for words in ("40 target tokens", "feature maps", "forward ms", "largest tensors", "target tokens/s"):
        assert words in ended.out
    assert "data.max_length" not in ended.out
    short = "data.max_length=5"
    assert json.loads(call("profile", recipe, short, "--estimate", "--json").out)["command"] == (
        f"econmt profile {recipe} {short} --estimate --json"
    )


def test_json_holds_everything(call: Call, recipe: Path) -> None:
    ended = call("profile", recipe, "ops.decoder=recompute", *BUCKET, "--json")
    assert ended.code == 0, ended.err
    assert_nothing_but_progress(ended.err)
    found = json.loads(ended.out)
    assert found["shape"] == {"rows": 8, "source": 6, "target": 5}
    assert found["command"] == f"econmt profile {recipe} ops.decoder=recompute --bucket 6x5 --batch 8 --json"
    (only,) = found["profiles"]
    assert (only["technique"], only["bytes"], only["precision"]) == (
        "as in the recipe",
        "measured",
        "float32",
    )
    assert only["ops"]["decoder"] == "recompute"
    assert sum(entry["bytes"] for entry in only["ledger"]["entries"]) == only["ledger"]["peak_bytes"]
    assert only["times"]["target_tokens_per_second"] > 0
    assert found["machine"]["torch"] == torch.__version__


@pytest.mark.slow
def test_compares_and_draws(call: Call, recipe: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    ended = call("profile", recipe, *BUCKET, "--compare", "--measure", "--html", page, "--trace", trace)
    assert ended.code == 0, ended.err
    assert_nothing_but_progress(ended.err)
    techniques = ["reference", "+ decoder", "+ encoder", "+ output", "all"]
    techniques += ["reference, bfloat16", "all, bfloat16"]
    rows = [line for line in ended.lines if line.startswith((*techniques, "│"))]
    names = [re.split(" {2,}|│", line.strip("│ "))[0].strip() for line in rows]
    assert names == techniques * 2
    assert max(map(len, ended.lines[:-2])) <= 80
    for line in rows[1:5]:
        assert " less " in line or " more " in line or "the same" in line
    assert ended.lines[-2:] == [f"page: {page}", f"trace: {trace}"]
    text = page.read_text(encoding="utf-8")
    assert text.count('class="panel"') == 7
    assert "--compare" in text
    assert json.loads(trace.read_text())["traceEvents"]


def test_estimates_without_a_gpu(call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a step was run")

    monkeypatch.setattr(profiling, "Step", refuse)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = call("profile", recipe, *BUCKET, "--device", "cuda", "--estimate", "--json")
    assert ended.code == 0, ended.err
    assert_nothing_but_progress(ended.err)
    found = json.loads(ended.out)
    (only,) = found["profiles"]
    assert (found["device"], only["bytes"], only["precision"]) == ("cuda", "estimated", "bfloat16")
    assert only["times"] is None
    assert only["ledger"]["reserved_bytes"] % (2 << 20) == 0
    assert only["ledger"]["outside_bytes"] == ASSUMED._asdict()
    ended = call("profile", recipe, *BUCKET, "--estimate", "training.device=cuda:1")
    assert "CUDA's allocator" in ended.out
    assert "no step was run" in ended.out


def test_without_text_the_longest_pairs_are_profiled(call: Call, recipe: Path) -> None:
    words = ("data.max_length=9", "training.batch.size=3", "--estimate", "--json")
    found = json.loads(call("profile", recipe, *words).out)
    assert found["shape"] == {"rows": 3, "source": 9, "target": 9}
    assert found["vocabulary"] == {"source": 50, "target": 50}
    assert "data.max_length, 9, on both sides" in found["notes"][0]
    assert "may take up to 12" in found["notes"][0]
    words = ("data.max_length=9", "training.batch={type: word, size: 40}", "--estimate", "--json")
    assert json.loads(call("profile", recipe, *words).out)["shape"]["rows"] == 4


@pytest.mark.slow
def test_prepared_text_gives_the_worst_bucket(call: Call, text: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "mine.yaml", text, tmp_path / "run")
    store = ("data.max_length=9", f"data.prepared={tmp_path / 'store'}")
    given = ("profile", recipe, *store, "--estimate", "--json")
    assert "not prepared" in json.loads(call(*given).out)["notes"][1]
    ended = call(*given, "--data-dir", text)
    found = json.loads(ended.out)
    assert found["shape"] == {"rows": 4, "source": 8, "target": 8}  # six letters and the end, in fours
    assert found["vocabulary"] == {"source": 12, "target": 12}
    assert "largest batch of the text" in found["notes"][0]
    rows = call("profile", recipe, *store, "--fit", "300kB").lines
    assert [line.split("│")[1:3] for line in rows if line.startswith("│")] == [
        [f"{source:>7} ", f"{target:>7} "] for source, target in ((4, 4), (8, 8))
    ]
    # It is prepared now, and found without being told; but not by a recipe that cuts text in another way.
    assert json.loads(call(*given).out)["vocabulary"] == {"source": 12, "target": 12}
    other = json.loads(call(*given, "data.max_length=5").out)
    assert other["vocabulary"] == {"source": 50, "target": 50}


def test_largest_batches_of_all_buckets(call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fake(workload: object, technique: object, bucket: tuple[int, int], *rest: object) -> object:
        asked.append(bucket)
        return verb.Fit(*bucket, 7, 1000)

    monkeypatch.setattr("econmt.estimate.fit.fit", fake)
    ended = call("profile", recipe, "data.max_length=9", "--fit", "1GiB", "--compare")
    assert ended.code == 0
    assert asked == [(9, 9), (8, 8), (4, 4)] * 4
    ended = call("profile", recipe, "data.max_length=9", "--fit", "1GiB", "--compare", "--json")
    techniques = json.loads(ended.out)["fit"]["techniques"]
    assert tuple(techniques) == verb.FITTED
    assert all([row["source"] for row in rows] == [4, 8, 9] for rows in techniques.values())
    asked.clear()
    assert not any("outside of PyTorch" in line for line in ended.lines)
    ended = call("profile", recipe, "data.max_length=9", "--fit", "1GiB", "--device", "cuda")
    assert "679 MiB of the 1 GiB are assumed to be outside of PyTorch" in ended.out
    asked.clear()
    call("profile", recipe, "data.max_length=100", "--fit", "1GiB")
    assert len(asked) == 12
    assert asked[0] == (100, 100)
    assert asked[-1] == (4, 4)


def test_one_of_several_ranks_has_its_rows_and_its_share(call: Call, recipe: Path) -> None:
    alone, shared = (
        json.loads(call("profile", recipe, *BUCKET, "--estimate", "--json", *more).out)
        for more in ((), ("--processes", 4, "parallel.shard_optimizer=true"))
    )
    assert shared["shape"]["rows"] == 2
    assert "Of one of 4 ranks, which has 2 of the 8 rows." in shared["notes"]
    state = {}
    for name, found in (("alone", alone), ("shared", shared)):
        entries = found["profiles"][0]["ledger"]["entries"]
        state[name] = sum(each["bytes"] for each in entries if each["category"] == "optimizer state")
    assert 0.25 * state["alone"] < state["shared"] < 0.5 * state["alone"]
    assert {each["rank"] for each in shared["ranks"]} >= {"rank 3 of 4"}


@pytest.mark.slow
def test_the_largest_batch_is_that_of_all_ranks(call: Call, recipe: Path) -> None:
    rows = [
        json.loads(call("profile", recipe, *BUCKET[:2], "--fit", "1MB", "--json", *more).out)["fit"]
        for more in ((), ("--processes", 4))
    ]
    one, four = (found["techniques"]["as in the recipe"][0]["rows"] for found in rows)
    assert 3 * one < four <= 4 * one


def test_every_stage_of_a_pipeline_is_told(call: Call, recipe: Path) -> None:
    deep = ("model.encoder.layers=2", "model.decoder.layers=2", "model.decoder.input_feeding=false")
    ended = call("profile", recipe, *BUCKET, *deep, "parallel.pipeline=2")
    assert ended.code == 0, ended.err
    assert max(map(len, ended.lines)) <= 80
    assert "what each rank holds at its peak" in ended.out
    assert re.search(r"target tokens, rank [01] of 2\)", ended.out)
    assert [line.split()[0] for line in ended.lines if re.match(r" +[01] ", line)] == ["0", "1"]
    assert call("profile", recipe, *BUCKET, *deep, "parallel.pipeline=2", "--processes", 3).err == (
        "econmt: error: parallel.pipeline 2: 3 processes cannot be divided into pipelines of 2; use --processes 2, or "
        "a multiple of it, or parallel.pipeline=1\n"
    )
    assert (
        "leave out --measure and --trace"
        in call("profile", recipe, *deep, "parallel.pipeline=2", "--measure").err
    )


def test_nothing_to_trace_where_no_step_fits(
    call: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "budget_bytes", lambda *_: 1000)
    ended = call("profile", recipe, *BUCKET)
    assert ended.code == 0
    assert "Bytes: estimated with fake tensors; no step fits the free memory." in ended.lines
    ended = call("profile", recipe, *BUCKET, "--trace", tmp_path / "t.json")
    assert ended.code == 2
    assert "there is no step to trace" in ended.err


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_measured_is_printed_when_the_user_interrupts(
    call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """Rows appear on standard error as they are measured; an interrupt before the first ends without a table."""
    real = profiling.Step.measure
    measured: list[Ledger] = []

    def measure(step: profiling.Step) -> Ledger:
        if len(measured) == most:
            raise KeyboardInterrupt
        measured.append(real(step))
        return measured[-1]

    monkeypatch.setattr(profiling.Step, "measure", measure)
    most = 2
    ended = call("profile", recipe, *BUCKET, "--compare", "--measure", *(["--json"] if as_json else []))
    assert ended.code == 130
    told = [line for line in ended.err.splitlines() if ": stash " in line]
    assert [line.split(": ")[1] for line in told] == ["reference", "+ decoder"]
    assert f"peak {format_bytes(measured[0].peak)}, " in told[0]
    note = "Interrupted; these are the figures until then."
    if as_json:
        found = json.loads(ended.out)
        peaks = [each["ledger"]["peak_bytes"] for each in found["profiles"]]
        assert peaks == [ledger.peak for ledger in measured]
        assert note in found["notes"]
    else:
        assert note in ended.lines
        assert len([line for line in ended.lines if line.startswith("+ decoder ")]) == 2
        assert not [line for line in ended.lines if line.startswith("+ encoder")]
    most = 0
    measured.clear()
    ended = call("profile", recipe, *BUCKET, "--compare", "--measure")
    assert (ended.code, ended.out) == (130, "")


def test_compiled_techniques_on_request(call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def techniques(stash: str, device: str, warming: bool) -> list[Technique]:
        asked.append(warming)
        return [Technique("reference", Implementations.definitions(), NAMED["float32"])]

    monkeypatch.setattr(verb, "techniques", techniques)
    for given in ((), ("ops.output=compiled",), ("ops.output=compiled", "--estimate")):
        assert call("profile", recipe, *BUCKET, "--compare", *given).code == 0
    assert asked == [False, True, False]


def test_one_batch_has_one_peak(call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = call("profile", recipe, *BUCKET, "--measure")
    peaks = re.findall(r"peak,? (?:of )?([0-9.]+ [kM]B)", whole.out)
    assert len(set(peaks)) == 1, peaks
    monkeypatch.setattr(profiling, "affordable_rows", lambda time, rows, limit: rows // 4)
    part = call("profile", recipe, *BUCKET)
    assert "Times: measured with 2 of 8 rows" in " ".join(part.out.split())


@pytest.mark.parametrize("as_json", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_techniques_that_were_measured_are_printed_when_another_fails(
    call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    real = profiling.Step.measure

    def measure(step: profiling.Step) -> Ledger:
        bfloat16 = step.training.precision.dtype == torch.bfloat16
        if bfloat16 and step.training.implementations != Implementations.definitions():
            raise AssertionError("no value for symbol s23")
        return real(step)

    monkeypatch.setattr(profiling.Step, "measure", measure)
    ended = call("profile", recipe, *BUCKET, "--compare", "--measure", *(["--json"] if as_json else []))
    assert ended.code == 70
    assert ended.err.splitlines()[-1].startswith(
        "econmt: error: this is a bug in econmt: AssertionError: no value for symbol s23"
    )
    note = "Not measured: all, bfloat16 (AssertionError: no value for symbol s23)."
    if as_json:
        found = json.loads(ended.out)
        names = [each["technique"] for each in found["profiles"]]
        assert names == ["reference", "+ decoder", "+ encoder", "+ output", "all", "reference, bfloat16"]
        assert note in found["notes"]
    else:
        assert note in ended.lines
        assert [line for line in ended.lines if line.startswith("reference ")]
        assert not [line for line in ended.lines if line.startswith("all, bfloat16")]


_OF_A_TEST = {
    "translation": ["model.encoder.size=64", "model.decoder.size=64", "model.attention.size=64"],
    "language_model": ["model.size=64"],
}
"""Sizes of every model, so that a step takes little time and memory, and ops are still worth measuring."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("encoder", ["as it is", "reference"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "gnmt" else [])
        for name in sorted(shipped_recipes(), key="best".__eq__)  # the slowest one last
    ],
)
def test_a_shipped_recipe_is_estimated_well(call: Call, tmp_path: Path, name: str, encoder: str) -> None:
    shipped = load_recipe(name)
    sizes = ["model.embedding=64", *_OF_A_TEST[shipped.task]]
    sizes += [f"ops.encoder={encoder}"] * (encoder == "reference")  # oneDNN's LSTM in float32
    check_estimate(call, name, [f"output={tmp_path / 'run'}", *sizes], 64)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["multi30k", "quickstart", "student", "tatoeba"])
def test_a_shipped_recipe_in_its_own_sizes(call: Call, tmp_path: Path, name: str, precision: str) -> None:
    overrides = [f"output={tmp_path / 'run'}", f"training.precision={precision}"]
    check_estimate(call, name, overrides, load_recipe(name).training.batch.size)


def check_estimate(call: Call, name: str, overrides: list[str], batch: int) -> None:
    """Compares the estimate of a shipped recipe's step to its measurement: choices, precision and peak."""
    shipped = load_recipe(name)
    shape = ["--bucket", "24x24"] if shipped.task == "translation" else ["training.bptt=24"]
    command = ("profile", name, *overrides, *shape, "--batch", batch, "--device", "cpu", "--json")
    found = []
    for how in ("--estimate", "--measure"):
        ended = call(*command, how)
        assert ended.code == 0, ended.err
        found.append(json.loads(ended.out))
    estimated, measured = found
    chosen = [[note for note in each["notes"] if note.startswith("Ops that auto means")] for each in found]
    assert [text.partition("(")[0] for text in chosen[0]] == [text.partition("(")[0] for text in chosen[1]]
    assert len(chosen[0]) == int("auto" in Implementations.of(shipped.ops))
    (one,), (other,) = estimated["profiles"], measured["profiles"]
    assert (one["bytes"], other["bytes"]) == ("estimated", "measured")
    assert (one["ops"], one["precision"]) == (other["ops"], other["precision"])
    most, peak = (each["ledger"]["peak_bytes"] for each in (one, other))
    assert 0.98 * peak <= most <= 1.1 * peak
