"""``econmt profile``: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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
from tests.conftest import PATIENCE, fails_with
from tests.unit.cli.conftest import Call, Ended
from tests.unit.cli.test_refusals import refused
from tests.unit.training.tiny import write_recipe

BUCKET = ("--bucket", "6x5", "--batch", 8)
TECHNIQUES = ["reference", "+ decoder", "+ encoder", "+ output", "all"]
TECHNIQUES += [f"{name}, bfloat16" for name in ("reference", "all")]


def profiled(call: Call, *words: object) -> Ended:
    """Profiles with success, and without talk but that of progress, which is told now and then on a busy machine."""
    ended = call("profile", *words).succeeded()
    progress = "econmt: (predicting|measuring|timing|kernels|tracing|bucket|working|.*: stash .*, peak )"
    assert all(re.match(progress, line) for line in ended.err.splitlines()), ended.err
    return ended


def read(ended: Ended) -> Any:
    """What was printed as JSON."""
    return json.loads(ended.out)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe whose text is nowhere; measuring it may take long."""
    monkeypatch.setattr("econmt.estimate.profiling.TIME_LIMIT", PATIENCE)
    return write_recipe(tmp_path / "reverse.yaml", tmp_path / "nowhere", tmp_path / "run")


def test_prints_the_ledger_of_a_bucket(call: Call, recipe: Path) -> None:
    ended = profiled(call, recipe, *BUCKET)
    assert max(map(len, ended.lines)) <= 80
    title = " ".join(" ".join(ended.lines[:2]).split())
    assert title.startswith("reverse: 8 sentence pairs, 6 source x 5 target positions, ")
    assert title.endswith("vocabulary 50 and 50, cpu, float32")
    assert "Bytes and times: measured." in ended.lines
    for words in ("40 target tokens", "feature maps", "forward ms", "largest tensors", "target tokens/s"):
        assert words in ended.out
    assert "data.max_length" not in ended.out
    words = f"profile {recipe} data.max_length=5 --estimate --json"
    assert read(call(*words.split()))["command"] == f"econmt {words}"


def test_json_holds_everything(call: Call, recipe: Path) -> None:
    found = read(profiled(call, recipe, "ops.decoder=recompute", *BUCKET, "--json"))
    assert found["shape"] == {"rows": 8, "source": 6, "target": 5}
    assert found["command"] == f"econmt profile {recipe} ops.decoder=recompute --bucket 6x5 --batch 8 --json"
    (only,) = found["profiles"]
    told = [only[name] for name in ("technique", "bytes", "precision")]
    assert told == ["as in the recipe", "measured", "float32"]
    assert only["ops"]["decoder"] == "recompute"
    assert sum(entry["bytes"] for entry in only["ledger"]["entries"]) == only["ledger"]["peak_bytes"]
    assert only["times"]["target_tokens_per_second"] > 0
    assert found["machine"]["torch"] == torch.__version__


@pytest.mark.slow
def test_compares_and_draws(call: Call, recipe: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    ended = profiled(call, recipe, *BUCKET, "--compare", "--measure", "--html", page, "--trace", trace)
    rows = [line for line in ended.lines if line.startswith((*TECHNIQUES, "│"))]
    names = [re.split(" {2,}|│", line.strip("│ "))[0].strip() for line in rows]
    assert names == TECHNIQUES * 2
    assert max(map(len, ended.lines[:-2])) <= 80
    for line in rows[1:5]:
        assert " less " in line or " more " in line or "the same" in line
    assert ended.lines[-2:] == [f"page: {page}", f"trace: {trace}"]
    text = page.read_text(encoding="utf-8")
    assert text.count('class="panel"') == 7
    assert "--compare" in text
    assert json.loads(trace.read_text())["traceEvents"]


def test_estimates_without_a_gpu(call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "Step", fails_with(AssertionError("a step was run")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = read(profiled(call, recipe, *BUCKET, "--device", "cuda", "--estimate", "--json"))
    (only,) = found["profiles"]
    assert (found["device"], only["bytes"], only["precision"]) == ("cuda", "estimated", "bfloat16")
    assert only["times"] is None
    assert only["ledger"]["reserved_bytes"] % (2 << 20) == 0
    assert only["ledger"]["outside_bytes"] == ASSUMED._asdict()
    ended = call("profile", recipe, *BUCKET, "--estimate", "training.device=cuda:1")
    assert max(map(len, ended.lines)) <= 80
    assert "CUDA's allocator" in ended.out
    assert "no step was run" in ended.out


def test_without_text_the_longest_pairs_are_profiled(call: Call, recipe: Path) -> None:
    given = ("profile --estimate --json", recipe, "data.max_length=9")
    found = read(call(*given, "training.batch.size=3"))
    assert found["shape"] == {"rows": 3, "source": 9, "target": 9}
    assert found["vocabulary"] == {"source": 50, "target": 50}
    assert "data.max_length, 9, on both sides" in found["notes"][0]
    assert "may take up to 12" in found["notes"][0]
    assert read(call(*given, "training.batch={type: word, size: 40}"))["shape"]["rows"] == 4


@pytest.mark.slow
def test_prepared_text_gives_the_worst_bucket(call: Call, text: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "mine.yaml", text, tmp_path / "run")
    store = ("data.max_length=9", f"data.prepared={tmp_path / 'store'}")
    given = ("profile", recipe, *store, "--estimate", "--json")
    assert "not prepared" in read(call(*given))["notes"][1]
    found = read(call(*given, "--data-dir", text))
    assert found["shape"] == {"rows": 4, "source": 8, "target": 8}  # six letters and the end, in fours
    assert found["vocabulary"] == {"source": 12, "target": 12}
    assert "largest batch of the text" in found["notes"][0]
    rows = call("profile", recipe, *store, "--fit", "300kB").lines
    assert [line.split("│")[1:3] for line in rows if line[0] == "│"] == [[f"{n:>7} "] * 2 for n in (4, 8)]
    # It is prepared now, and found without being told; but not by a recipe that cuts text in another way.
    assert read(call(*given))["vocabulary"] == {"source": 12, "target": 12}
    assert read(call(*given, "data.max_length=5"))["vocabulary"] == {"source": 50, "target": 50}


def test_largest_batches_of_all_buckets(call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, budgets = [], set()

    def fake(task: object, technique: object, buckets: Any, budget: int, *rest: object) -> object:
        asked.extend(buckets)
        budgets.add(budget)
        return (verb.Fit(*bucket, 7, 1000) for bucket in buckets)

    monkeypatch.setattr("econmt.cli.profile.fit_all", fake)
    given = ("profile --fit 1GiB", recipe, "data.max_length=9")
    ended = call(*given, "--compare").succeeded()
    assert max(map(len, ended.lines)) <= 80
    assert asked == [(9, 9), (8, 8), (4, 4)] * 4
    techniques = read(call(*given, "--compare", "--json"))["fit"]["techniques"]
    assert tuple(techniques) == verb.FITTED
    assert all([row["source"] for row in rows] == [4, 8, 9] for rows in techniques.values())
    assert not any("outside of PyTorch" in line for line in ended.lines)
    outside = "679 MiB of the 1 GiB are assumed to be outside of PyTorch"
    assert outside in call(*given, "--device", "cuda").out
    assert budgets == {1 << 30, (1 << 30) - verb.ASSUMED.total}
    asked.clear()
    call(*given, "data.max_length=100")
    assert (len(asked), asked[0], asked[-1]) == (12, (100, 100), (4, 4))


def test_one_of_several_ranks_has_its_rows_and_its_share(call: Call, recipe: Path) -> None:
    alone, shared = (
        read(call("profile", recipe, *BUCKET, "--estimate", "--json", *more))
        for more in ((), ("--processes", 4, "parallel.shard_optimizer=true"))
    )
    assert shared["shape"]["rows"] == 2
    assert "Of one of 4 ranks, which has 2 of the 8 rows." in shared["notes"]
    whole, share = (
        sum(each["bytes"] for each in ledger["entries"] if each["category"] == "optimizer state")
        for ledger in (found["profiles"][0]["ledger"] for found in (alone, shared))
    )
    assert 0.25 * whole < share < 0.5 * whole
    assert {each["rank"] for each in shared["ranks"]} >= {"rank 3 of 4"}


@pytest.mark.slow
def test_the_largest_batch_is_that_of_all_ranks(call: Call, recipe: Path) -> None:
    rows = [
        read(call("profile", recipe, *BUCKET[:2], "--fit", "1MB", "--json", *more))["fit"]
        for more in ((), ("--processes", 4))
    ]
    one, four = (found["techniques"]["as in the recipe"][0]["rows"] for found in rows)
    assert 3 * one < four <= 4 * one


def test_every_stage_of_a_pipeline_is_told(call: Call, recipe: Path) -> None:
    stacks = ("model.encoder.layers=2", "model.decoder.layers=2", "model.decoder.input_feeding=false")
    deep = (*stacks, "parallel.pipeline=2")
    ended = call("profile", recipe, *BUCKET, *deep).succeeded()
    assert max(map(len, ended.lines)) <= 80
    assert "what each rank holds at its peak" in ended.out
    assert re.search(r"target tokens, rank [01] of 2\)", ended.out)
    assert [line.split()[0] for line in ended.lines if re.match(r" +[01] ", line)] == ["0", "1"]
    assert call("profile --processes 3", recipe, *BUCKET, *deep).err == (
        "econmt: error: parallel.pipeline 2: 3 processes cannot be divided into pipelines of 2; use --processes 2, or "
        "a multiple of it, or parallel.pipeline=1\n"
    )
    assert "leave out --measure and --trace" in call("profile --measure", recipe, *deep).err


def test_nothing_to_trace_where_no_step_fits(
    call: Call, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "budget_bytes", lambda *_: 1000)
    ended = call("profile", recipe, *BUCKET).succeeded()
    assert "Bytes: estimated with fake tensors; no step fits the free memory." in ended.lines
    refused(call("profile", recipe, *BUCKET, "--trace", tmp_path / "t.json"), "there is no step to trace")


@pytest.mark.parametrize(
    ("fault", "as_json"),
    [
        (KeyboardInterrupt(), False),
        (KeyboardInterrupt(), True),
        pytest.param(AssertionError("no value for symbol s23"), False, marks=pytest.mark.thorough),
        (AssertionError("no value for symbol s23"), True),
    ],
)
def test_what_was_measured_is_printed_when_the_user_interrupts_or_a_technique_fails(
    call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException, as_json: bool
) -> None:
    """Rows appear on standard error as they are measured; an interrupt before the first ends without a table."""
    real = profiling.Step.measure
    measured: list[Ledger] = []

    def measure(step: profiling.Step) -> Ledger:
        if len(measured) == most:
            raise fault
        measured.append(real(step))
        return measured[-1]

    monkeypatch.setattr(profiling.Step, "measure", measure)
    stopped = isinstance(fault, KeyboardInterrupt)
    most = 2 if stopped else 6
    ended = call("profile", recipe, *BUCKET, "--compare", "--measure", *(["--json"] if as_json else []))
    told = [line for line in ended.err.splitlines() if ": stash " in line]
    assert [line.split(": ")[1] for line in told] == TECHNIQUES[:most]
    assert f"peak {format_bytes(measured[0].peak)}, " in told[0]
    note = "Interrupted; these are the figures until then."
    if not stopped:
        note = f"Not measured: {TECHNIQUES[most]} (AssertionError: {fault})."
        bug = f"econmt: error: this is a bug in econmt: AssertionError: {fault}"
        assert ended.err.splitlines()[-1].startswith(bug)
    assert ended.code == (130 if stopped else 70)
    if as_json:
        found = read(ended)
        peaks = [(each["technique"], each["ledger"]["peak_bytes"]) for each in found["profiles"]]
        assert peaks == [(name, ledger.peak) for name, ledger in zip(TECHNIQUES, measured, strict=False)]
        assert note in found["notes"]
    else:
        assert note in ended.lines
        assert len([line for line in ended.lines if line.startswith(f"{TECHNIQUES[most - 1]} ")]) == 2
        assert not [line for line in ended.lines if line.startswith(TECHNIQUES[most])]
    most = 0
    measured.clear()
    if stopped:
        ended = call("profile", recipe, *BUCKET, "--compare", "--measure")
        assert (ended.code, ended.out) == (130, "")


def test_compiled_techniques_on_request(call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def techniques(stash: str, device: str, warming: bool) -> list[Technique]:
        asked.append(warming)
        return [Technique("reference", Implementations.definitions(), NAMED["float32"])]

    monkeypatch.setattr(verb, "techniques", techniques)
    for given in ("", "ops.output=compiled", "ops.output=compiled --estimate"):
        assert call("profile --compare", recipe, *BUCKET, *given.split()).code == 0
    assert asked == [False, True, False]


def test_one_batch_has_one_peak(call: Call, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = call("profile", recipe, *BUCKET, "--measure")
    peaks = re.findall(r"peak,? (?:of )?([0-9.]+ [kM]B)", whole.out)
    assert len(set(peaks)) == 1, peaks
    monkeypatch.setattr(profiling, "affordable_rows", lambda time, rows, limit: rows // 4)
    part = call("profile", recipe, *BUCKET)
    assert "Times: measured with 2 of 8 rows" in " ".join(part.out.split())


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
        pytest.param(name, marks=[pytest.mark.slow] if name in ("docs-ten", "gnmt", "ptb") else [])
        for name in sorted(shipped_recipes(), key="best".__eq__)  # the slowest one last
    ],
)
def test_a_shipped_recipe_is_estimated_well(call: Call, tmp_path: Path, name: str, encoder: str) -> None:
    sizes = ["model.embedding=64", *_OF_A_TEST[load_recipe(name).task]]
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
    found = [read(call(*command, how).succeeded()) for how in ("--estimate", "--measure")]
    estimated, measured = found
    chosen = [[note for note in each["notes"] if note.startswith("Ops that auto means")] for each in found]
    assert [text.partition("(")[0] for text in chosen[0]] == [text.partition("(")[0] for text in chosen[1]]
    assert len(chosen[0]) == int("auto" in Implementations.of(shipped.ops))
    (one,), (other,) = estimated["profiles"], measured["profiles"]
    assert (one["bytes"], other["bytes"]) == ("estimated", "measured")
    assert (one["ops"], one["precision"]) == (other["ops"], other["precision"])
    most, peak = (each["ledger"]["peak_bytes"] for each in (one, other))
    assert 0.98 * peak <= most <= 1.1 * peak


def test_what_changed_between_two_profiles_or_accounts(call: Call, tmp_path: Path) -> None:
    def written(name: str, entries: list[tuple[str, str, int]]) -> Path:
        rows = [{"category": category, "layer": layer, "bytes": size} for category, layer, size in entries]
        (tmp_path / name).write_text(json.dumps({"ledger": {"entries": rows}}))
        return tmp_path / name

    one = written("a.json", [("weights", "head", 4_000), ("workspace", "other", 500)])
    two = written("b.json", [("weights", "head", 9_000), ("feature maps", "body", 700)])
    ended = call("profile", "--diff", one, two).succeeded()
    cells = [" ".join(re.sub("[│┃]", " ", line).split()) for line in ended.lines]
    assert "head weights 4,000 9,000 5,000" in cells
    assert "outside of modules workspace 500 -500" in cells
    assert "all 4,500 9,700 5,200" in cells
    assert "No such file" in call("profile", "--diff", one, tmp_path / "c.json").err
