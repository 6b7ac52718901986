"""The estimate agrees with what is measured, for every kind of model."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import pytest
import torch

from econmt.config import recipe
from econmt.config.recipe import Recipe, load_recipe
from econmt.engine.measurement import measure_step
from econmt.engine.outside_memory import workspace_bytes
from econmt.engine.precision import NAMED
from econmt.engine.step import TrainingStep
from econmt.estimate.training_step import estimate_step
from econmt.model import Implementations, translation
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_memory.measure.ledger import Ledger
from econmt_ops.core.precision import recurrent_tf32
from econmt_ops.dispatch.rule import rules_only

VOCABULARY = 97
SMALL = ("model.embedding=16", "model.encoder.size=32", "model.decoder.size=32", "model.attention.size=48")
RECOMPUTE = tuple(f"ops.{key}=recompute" for key in recipe.OPS)
UNFED = ("model.decoder.input_feeding=false", "model.decoder.cell=ssru")
SUMMED = ("model.source_factors_num_embed=[16]", "model.source_factors_combine=sum")
HALF = "training.precision=bfloat16"
GATED = (
    "model.decoder={cell: lnlstm, context_gating: true, layers: 2}",
    "model.layer_normalization=true",
    "model.attention.coverage={type: gru, num_hidden: 4}",
)
REFERENCE = tuple(f"ops.{key}=reference" for key in recipe.OPS)


def small(name: str, *overrides: str) -> Recipe:
    """A shipped recipe with a small model."""
    return load_recipe(name, [*SMALL, *overrides])


def task_of(recipe: Recipe | str, *overrides: str) -> TranslationTask:
    """The task of a recipe, or of a shipped one with a small model; each of its source factors has a few values."""
    recipe = small(recipe, *overrides) if isinstance(recipe, str) else recipe
    factors = (9,) * len(recipe.pairs.source_factors)
    return TranslationTask(recipe, VOCABULARY, VOCABULARY, factor_sizes=factors)


def measure(
    recipe: Recipe, shape: tuple[int, int, int], ragged: bool = False, words: int | None = None
) -> Ledger:
    """The ledger of a real step on full rows, or on rows of all lengths, of so many different words on each side."""
    torch.manual_seed(1)
    task = task_of(recipe)
    batch = task.example(Shape(*shape))
    rows, source, target = shape
    if words is not None:
        batch.source.copy_(torch.arange(rows * source).view(rows, source) % words + 4)
        batch.target_input.copy_(torch.arange(rows * target).view(rows, target) % words + 4)
    if ragged:
        batch.source_lengths.copy_(torch.arange(rows) % source + 1)
        padding = torch.arange(target) > (torch.arange(rows) % target)[:, None]
        batch.target_input[padding] = batch.target_output[padding] = 0
    precision = NAMED[recipe.training.precision.replace("auto", "float32")]
    step = TrainingStep(task, task.build_model().train(), precision)
    accumulating = recipe.training.update_interval > 1
    with rules_only():  # as a run
        return measure_step(step, batch, accumulating=accumulating, timed=False)


class Case(NamedTuple):
    """A recipe, what differs from it, and a shape (B, S, T)."""

    name: str
    overrides: tuple[str, ...]
    shape: tuple[int, int, int]


CASES = [
    Case("iwslt", (), (48, 7, 4)),
    Case("iwslt", (HALF,), (24, 3, 5)),
    Case("iwslt", (*RECOMPUTE, "ops.stash=outputs"), (64, 9, 4)),
    Case("iwslt", (*RECOMPUTE, "training.precision=float16"), (24, 3, 5)),
    Case("iwslt", ("training.precision=float16", "training.optimizer.name=adagrad"), (24, 3, 5)),
    Case("iwslt", (*RECOMPUTE, HALF, "training.update_interval=2"), (33, 6, 3)),
    Case("groundhog", ("training.optimizer={name: sgd, learning_rate: 0.1, momentum: 0.9}",), (40, 1, 4)),
    Case("iwslt", ("model.encoder.rank=6", "model.decoder.rank=8"), (48, 7, 4)),
    Case("iwslt", (*RECOMPUTE, "model.encoder.rank=6", "model.decoder.rank=8"), (64, 9, 4)),
    Case("iwslt", ("model.embedding=24", "model.dropout={embedding: 0.1}"), (48, 6, 5)),
    Case("best", (*RECOMPUTE, "ops.stash=gates", HALF), (32, 4, 3)),
    Case("best", (HALF, "model.decoder.input_feeding=false", "model.layer_normalization=false"), (32, 5, 3)),
    Case("multi30k", ("ops.decoder=compiled", "ops.encoder=reference", "ops.stash=gates"), (64, 12, 3)),
    Case("multi30k", ("model.attention.type=dot", "training.label_smoothing=0.1"), (50, 4, 4)),
    Case("multi30k", ("model.decoder.cell=gru", "model.attention.coverage.type=tanh"), (50, 6, 4)),
    Case("multi30k", (*GATED, *RECOMPUTE, HALF), (80, 16, 14)),
    Case("tatoeba", ("model.decoder.input_feeding=false", "model.attention.type=bilinear"), (64, 8, 4)),
    Case("tatoeba", (HALF, "ops.output=recompute"), (48, 4, 5)),
    Case("quickstart", ("model.attention.type=scaled_dot", HALF), (64, 6, 4)),
    Case("quickstart", ("model.decoder.input_feeding=false", *RECOMPUTE), (64, 12, 10)),
    Case("quickstart", ("model.encoder.cell=sru", *UNFED, *RECOMPUTE, "ops.stash=outputs"), (64, 12, 10)),
    Case("student", ("training.optimizer.name=adam8bit",), (48, 9, 7)),
    Case(
        "quickstart",
        ("data.source_factors=[pos, case]", "model.source_factors_num_embed=[24, 8]"),
        (64, 9, 4),
    ),
    Case("iwslt", (*RECOMPUTE, "data.source_factors=[pos]", *SUMMED), (48, 7, 4)),
    Case("quickstart", ("model.attention.layer_norm=true", "training.update_interval=4"), (1, 1, 1)),
]


@pytest.fixture
def no_word_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are multiplied wherever they stand, by the model as for the estimate."""
    monkeypatch.setattr(translation, "DISTINCT", 0.0)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("no_word_twice")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}{CASES.index(case)}")
def test_agrees_with_the_measured_peak(case: Case) -> None:
    recipe = small(case.name, *case.overrides)
    measured = measure(recipe, case.shape)
    estimated = estimate_step(task_of(recipe), case.shape)
    assert estimated.peak == pytest.approx(measured.peak, rel=0.02)
    assert estimated.stashed == pytest.approx(measured.stashed, rel=0.02)
    assert estimated.peak == estimated.entries.total()
    assert estimated.flops == measured.flops
    assert estimated.tokens == measured.tokens == case.shape[0] * case.shape[2]
    for category in ("weights", "optimizer state"):
        assert estimated.category(category) == measured.category(category)
    # The agreement is no matter of weights alone.
    if case.shape != (1, 1, 1):
        assert estimated.category("feature maps") + estimated.category("workspace") > 0.3 * estimated.peak


@pytest.mark.parametrize("overrides", [(), RECOMPUTE], ids=["reference", "recompute"])
def test_is_an_upper_bound_for_rows_of_all_lengths(overrides: tuple[str, ...]) -> None:
    recipe = small("multi30k", *overrides)
    shape, state = (24, 6, 5), torch.get_rng_state()
    estimate_step(task_of(recipe), shape)
    assert torch.equal(torch.get_rng_state(), state)
    measured = measure(recipe, shape, ragged=True)
    estimated = estimate_step(task_of(recipe), shape)
    assert measured.peak <= estimated.peak <= 1.25 * measured.peak


@pytest.mark.sampled(2)
@pytest.mark.parametrize("overrides", [(), (*RECOMPUTE, "ops.stash=outputs")], ids=["gates", "outputs"])
@pytest.mark.parametrize("shape", [(16, 12, 12), (48, 7, 6)], ids=["few", "many"])
def test_words_that_repeat(shape: tuple[int, int, int], overrides: tuple[str, ...]) -> None:
    """It agrees where a batch has all words of the vocabulary, though more could be multiplied once."""
    recipe = small("multi30k", "model.dropout=0", *overrides)
    most = translation.most_distinct(shape[0] * shape[1])
    measured = measure(recipe, shape, words=VOCABULARY - 4)
    estimated = estimate_step(task_of(recipe), shape)
    assert most >= VOCABULARY - 4
    assert measured.peak <= estimated.peak <= 1.02 * measured.peak
    assert measured.stashed <= estimated.stashed
    assert estimated.flops == measured.flops


def test_implementations_replace_those_of_the_recipe() -> None:
    shape = (16, 8, 2)
    plain = estimate_step(task_of("quickstart", *REFERENCE), shape)
    asked = small("quickstart", *RECOMPUTE)
    assert estimate_step(task_of(asked), shape).stashed < 0.5 * plain.stashed
    back = estimate_step(task_of(asked), shape, implementations=Implementations.everywhere("reference"))
    assert (back.peak, back.stash) == (plain.peak, plain.stash)


def test_on_cuda_sizes_are_whole_blocks_and_segments() -> None:
    task = task_of(small("quickstart", "training.precision=float32"))
    cpu, cuda = (estimate_step(task, (48, 7, 2), device) for device in ("cpu", "cuda"))
    assert all(size % 512 == 0 for size in cuda.entries.values())
    assert cuda.peak == cuda.entries.total()
    assert cuda.entries["workspace", "other"] >= workspace_bytes(torch.float32)
    assert cuda.category("weights") in range(cpu.category("weights"), cpu.category("weights") + 512 * 40)
    assert cuda.peak <= cuda.allocated <= cuda.reserved
    assert cuda.reserved % (2 << 20) == 0
    assert (cpu.device, cpu.allocated, cpu.reserved, cuda.device) == ("cpu", None, None, "cuda")


def test_on_cuda_dropout_keeps_no_mask_and_a_decoder_nothing_that_only_its_steps_read() -> None:
    recipe = load_recipe("groundhog", ["training.precision=bfloat16"])
    ledger = estimate_step(TranslationTask(recipe, 900, 700), (80, 20, 20), "cuda")
    assert ledger.peak == pytest.approx(377_356_288, rel=0.002)
    # Measured on an H200 with PyTorch 2.11: 64,000,000 bytes for 1,600 x 5,000 values, and a peak of 619,215,360.


def test_on_cuda_the_sum_of_a_bias_gradient_has_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    recipe = load_recipe("iwslt", [*REFERENCE, "training.precision=float32", "training.cuda_graphs=off"])
    ledger = estimate_step(TranslationTask(recipe, 5000, 5000), (64, 30, 25), "cuda")
    gradients_of_logits, buffer = 1_600 * 5_000 * 4, 64_000_000
    assert ledger.entries["workspace", "output"] >= gradients_of_logits + buffer
    assert ledger.allocated == pytest.approx(619_215_360, rel=0.015)


@pytest.mark.parametrize(("device", "auto"), [("cuda", "bfloat16"), ("cpu", "float32")])
def test_auto_is_bfloat16_on_a_gpu(device: str, auto: str) -> None:
    task = task_of("quickstart", *REFERENCE, "training.precision=auto")
    stashed = {
        given: estimate_step(task, (16, 4, 4), device, precision=NAMED[given] if given else None).stashed
        for given in (None, "bfloat16", "float16", "float32")
    }
    assert stashed["float16"] == stashed["bfloat16"]
    assert stashed[None] == stashed[auto]
    assert stashed["bfloat16"] < stashed["float32"]


@pytest.mark.parametrize("interval", [1, 2])
def test_a_step_of_several_batches_adds_to_gradients_unless_told_otherwise(interval: int) -> None:
    task = task_of("quickstart", f"training.update_interval={interval}")
    peaks = [
        estimate_step(task, Shape(2, 3, 3), "cpu", accumulating=accumulating).peak
        for accumulating in (None, interval > 1, interval == 1)
    ]
    assert peaks[0] == peaks[1] != peaks[2]


@pytest.mark.parametrize("allowed", [False, True])
def test_an_estimate_for_a_gpu_has_its_precision(allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact float32 products run step by step, whatever cuDNN may do in other code of the process."""
    asked: list[bool] = []
    known = recurrent_tf32()

    def noted() -> bool:
        asked.append(recurrent_tf32())
        return asked[-1]

    monkeypatch.setattr(importlib.import_module("econmt_ops.lstm.triton"), "recurrent_tf32", noted)
    with torch.backends.cudnn.flags(allow_tf32=allowed):
        estimate_step(task_of("quickstart", "training.precision=float32"), (3, 5, 4), "cuda")
    assert not any(asked)
    assert recurrent_tf32() == known


def test_an_estimate_with_tf32_keeps_what_a_run_with_tf32_keeps() -> None:
    """The decoder's h are kept in float16 there."""
    exact, rounded = (
        estimate_step(task_of("quickstart", f"training.precision={precision}"), (16, 4, 12), "cuda").stashed
        for precision in ("float32", "tf32")
    )
    assert rounded < exact
