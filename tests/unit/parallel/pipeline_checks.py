"""What holds on every rank of a pipeline: it computes what one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt.config.recipe import load_recipe
from econmt.data.batching.batch import AnyBatch
from econmt.data.batching.batches import Batch
from econmt.data.batching.text_batches import TextBatch
from econmt.engine.communicator import Communicator
from econmt.engine.precision import Precision
from econmt.engine.step import StepResult, TrainingStep
from econmt.model import Implementations, TranslationModel
from econmt.model.language_model import LanguageModel
from econmt.parallel.pipeline.model_parts import divided
from econmt.parallel.pipeline.partition import PipelinePlan
from econmt.parallel.pipeline.parts import DividedTable, LookUp
from econmt.parallel.pipeline.stages import Stages, even_rows
from econmt.parallel.pipeline.step import PipelinedStep
from econmt.tasks.language_model import LanguageModelTask
from econmt.tasks.protocol import Shape, Task
from econmt.tasks.translation import TranslationTask
from econmt.training import pipelines
from tests.unit.parallel import jobs

Check = Callable[[Communicator], None]
"""Fails on some rank if what it says does not hold."""

VOCABULARY = 37
PAD = 0
CPU = torch.device("cpu")
NO_PENALTIES = "training.activation_regularization=0", "training.temporal_activation_regularization=0"
ALL_DROPOUT = "model.dropout={embedding: 0.1, inputs: 0.2, layers: 0.3, output: 0.2, weights: 0.2}"
TIED = ("model.weight_tying=softmax", "model.embedding=5", ALL_DROPOUT)
VARIATIONAL = "model.dropout={inputs: 0.2, layers: 0.3, output: 0.2, variational: true}"


def language_model_task(*overrides: str) -> LanguageModelTask:
    small = ("model.layers=8", "model.size=6", "model.embedding=6", "training.batch.size=3")
    recipe = load_recipe("wikitext2", [*small, *NO_PENALTIES, *overrides])
    return LanguageModelTask(recipe, VOCABULARY)


def windows(task: LanguageModelTask, lengths: Sequence[int]) -> list[TextBatch]:
    """Some, of which the first begins the text, and the last has padding."""
    torch.manual_seed(3)
    found = [task.example(Shape(3, 1, length)) for length in lengths]
    found[0].carries.zero_()
    found[-1].targets[1, -1:] = 0
    found[-1].targets[2, 1:] = 0
    return found


def seeded(seed: int, function: Callable[..., Any], *arguments: Any) -> Any:
    torch.manual_seed(seed)
    return function(*arguments)


def new_model(task: Task) -> Any:
    return seeded(5, task.build_model).double().train()


def gathered(step: PipelinedStep) -> dict[str, Tensor]:
    """The gradients of all stages by name, whole."""
    found = {}
    for name, home in step.divided.homes.items():
        whole = dict(step.model.named_parameters())[name]
        own = torch.zeros_like(whole)
        gradient = step.local[name].grad if name in step.local else None
        if gradient is not None:
            rows = len(whole) * step.stages.rank // step.stages.size if home < 0 else 0
            own[rows : rows + len(gradient)] = gradient.to_dense()
        step.stages.all_reduce(own).wait()
        found[name] = own
    return found


def poison(step: PipelinedStep) -> None:
    """What other ranks train is not to be read here."""
    for name, parameter in step.model.named_parameters():
        own = step.local[name].detach().clone() if name in step.local else None
        parameter.data.fill_(torch.nan)
        if own is not None:
            step.local[name].data.copy_(own)


def agrees(
    task: Task,
    pipelined: PipelinedStep,
    batches: Sequence[AnyBatch],
    interval: int = 1,
    tolerance: float = 1e-12,
) -> None:
    """Losses, gradients, norms, updates and carried states are those of one process; ``interval`` batches an update."""
    alone = TrainingStep(task, new_model(task))
    alone.label_smoothing = pipelined.label_smoothing = 0.1
    poison(pipelined)
    state = torch.get_rng_state()
    for number in range(0, len(batches), interval):
        parts = batches[number : number + interval]
        tokens = alone.tokens(parts)
        wanted, found = (seeded(100 + number, step.gradient, parts, tokens) for step in (alone, pipelined))
        torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(found.norm.double(), wanted.norm.double(), rtol=1e-6, atol=0.0)
        gradients = gathered(pipelined)
        for name, parameter in alone.model.named_parameters():
            assert parameter.grad is not None, name
            difference = (gradients[name] - parameter.grad.to_dense()).abs()
            assert float(difference.max()) <= tolerance, f"{name}: {float(difference.max())}"
        alone.update()
        pipelined.update()
    torch.set_rng_state(state)


def pipelined_language_model(
    task: LanguageModelTask, size: int, homes: Sequence[int], chunks: int, how: str = "auto"
) -> PipelinedStep:
    model = new_model(task)
    division = divided(model, PipelinePlan([[*homes]], [chunks], ""))
    how_to = Implementations.everywhere(how)
    return PipelinedStep(task, model, Stages(size, CPU), division, implementations=how_to)


def language_model(communicator: Communicator) -> None:
    size = communicator.size
    homes = [layer * size // 8 for layer in range(8)]
    # "auto" is torch's LSTM here, which adds to the weights' gradients in each chunk; the other makes them once.
    for overrides, chunks, how in (
        ((), 3, "recompute"),
        (TIED, 4, "auto"),
        ((VARIATIONAL,), 1, "recompute"),
        (("model.weight_tying=softmax", ALL_DROPOUT, "training.optimizer={name: adam}"), 7, "recompute"),
        (("model.size=[9, 7, 6, 8, 6, 6, 9, 5]", *TIED), 3, "recompute"),
    ):
        task = language_model_task("model.dropout=0.0", *overrides)
        step = pipelined_language_model(task, size, homes, chunks, how)
        agrees(task, step, windows(task, (7, 5, 1)))


def divided_table(communicator: Communicator) -> None:
    """Look-ups are those in the whole table, and so is its gradient, bit for bit: sums of numbers of few bits."""
    stages = Stages(communicator.size, CPU)
    torch.manual_seed(8)
    everything = torch.arange(VOCABULARY).view(1, -1)
    for home, ids in ((0, everything), (1, everything % 5), (0, VOCABULARY - 1 - everything % 5)):
        whole, gradient = torch.randn(VOCABULARY, 5), torch.randint(-9, 9, (*ids.shape, 5)).float()
        rows = nn.Parameter(whole[even_rows(VOCABULARY, stages.size, stages.rank)].clone())
        rows.grad = torch.ones_like(rows)
        table, wanted = DividedTable(rows, VOCABULARY, PAD, stages), LookUp(ids, home)
        table.look_up(wanted)
        if stages.rank == home:
            found = wanted()
            assert torch.equal(found, whole[ids])
            found.backward(gradient)
        table.add_gradient(wanted)
        own = whole.requires_grad_()
        nn.functional.embedding(ids, own, PAD).backward(gradient)
        expected = own.grad[even_rows(VOCABULARY, stages.size, stages.rank)]
        assert torch.equal(rows.grad, expected + 1.0)


def tied_tables(communicator: Communicator) -> None:
    """Gradients of tables that are tied to the output layer, added up over two batches, in one of them of few words."""
    size = communicator.size
    task = language_model_task("model.layers=3", "model.weight_tying=softmax", ALL_DROPOUT)
    batches = windows(task, (7, 5, 4, 4))
    batches[1].inputs.remainder_(3).neg_().add_(VOCABULARY - 1)
    batches[0].inputs[1, 2:] = batches[2].inputs[1, 2:] = PAD
    step = pipelined_language_model(task, size, [layer * size // 3 for layer in range(3)], 2)
    agrees(task, step, batches, 2, tolerance=1e-15)
    for fed, tying in ((True, "trg_softmax"), (False, "src_trg_softmax")):
        feeding = f"model.decoder.input_feeding={str(fed).lower()}"
        pairs = translation_task(feeding, f"model.weight_tying={tying}", "model.dropout=0.2")
        model = new_model(pairs)
        division = divided(model, translation_homes(model, size, fed, 2))
        agrees(pairs, PipelinedStep(pairs, model, Stages(size, CPU), division), pairs_of_sentences(pairs), 2)


PLAIN = ("model.decoder.input_feeding=false",)
SHAPED = ("model.decoder.residual=true", "model.encoder.residual=true", "model.dropout=0.3")


def translation_task(*overrides: str) -> TranslationTask:
    layers = ("model.encoder={layers: 4, size: 8}", "model.decoder={layers: 4, size: 6}")
    small = ("model.embedding=6", *layers, "model.attention.size=5")
    return TranslationTask(load_recipe("quickstart", [*small, *overrides]), VOCABULARY, VOCABULARY)


def pairs_of_sentences(task: TranslationTask) -> list[Batch]:
    """Two batches, with padded rows on both sides."""
    torch.manual_seed(4)
    found = [task.example(Shape(3, source, target)) for source, target in ((7, 5), (3, 6))]
    for batch in found:
        source = batch.source.shape[1]
        batch.source_lengths.copy_(torch.tensor([source, 1, source - 1]))
        batch.source[1, 1:] = 0
        batch.source[2, -1:] = 0
        batch.target_output[0, -2:] = 0
        batch.target_input[0, -2:] = 0
    return found


def translation_homes(model: TranslationModel, size: int, fed: bool, chunks: int) -> PipelinePlan:
    """Layers divided evenly, the two directions of a layer on two ranks."""
    upper, layers = len(model.encoder.upper_layers), len(model.decoder.layers)
    pairs = [0, 1] * len(model.encoder.forward_layers)
    decoder = [size - 1] * layers if fed else [layer * size // layers for layer in range(layers)]
    encoder = [layer * size // upper for layer in range(upper)]
    return PipelinePlan([pairs, encoder, decoder], [chunks, chunks + 1], "")


def translation(communicator: Communicator, cases: Sequence[tuple[tuple[str, ...], int]], fed: bool) -> None:
    size = communicator.size
    for number, (overrides, chunks) in enumerate(cases):
        task = translation_task(*overrides)
        model = new_model(task)
        division = divided(model, translation_homes(model, size, fed, chunks))
        how = Implementations.everywhere("auto" if number == 1 else "recompute")
        step = PipelinedStep(task, model, Stages(size, CPU), division, implementations=how)
        agrees(task, step, pairs_of_sentences(task))


def decoder_without_input_feeding(communicator: Communicator) -> None:
    cases = (
        (PLAIN, 2),
        ((*PLAIN, *SHAPED, "model.encoder.bidirectional=bottom", "model.weight_tying=src_trg"), 3),
        ((*PLAIN, "model.encoder={bidirectional: none, reverse_input: true}", "model.dropout=0.2"), 4),
        ((*PLAIN, *SHAPED, "model.encoder.bidirectional=all", "model.weight_tying=src_trg_softmax"), 7),
    )
    translation(communicator, cases, fed=False)


def decoder_with_input_feeding(communicator: Communicator) -> None:
    cases = (
        (("model.encoder.bidirectional=bottom", "model.dropout=0.2"), 2),
        ((*SHAPED, "model.encoder.bidirectional=none", "model.decoder.state_init=avg"), 3),
    )
    translation(communicator, cases, fed=True)


def bfloat16(communicator: Communicator) -> None:
    """What travels has the type of the products: losses and norms are those of one process but for rounding."""
    for ours, wanted in steps_in(communicator, Precision(torch.bfloat16)):
        torch.testing.assert_close((ours.loss, ours.norm), (wanted.loss, wanted.norm), rtol=0.03, atol=0.0)


def float16(communicator: Communicator) -> None:
    """Losses and norms are those of one process whatever the scale, and stages agree on what overflows."""
    for scale in (2**4, 2**10):
        for ours, wanted in steps_in(communicator, Precision(torch.float16), f"training.loss_scale={scale}"):
            assert float(ours.loss_scale) == scale
            torch.testing.assert_close(
                (ours.loss, ours.norm), (wanted.loss, wanted.norm), rtol=0.03, atol=0.0
            )
    for ours, _ in steps_in(communicator, Precision(torch.float16), f"training.loss_scale={2**30}"):
        assert not ours.norm.isfinite()


def steps_in(
    communicator: Communicator, precision: Precision, *changes: str
) -> Iterator[tuple[StepResult, StepResult]]:
    """The results of a pipelined step of each task, and those of one process."""
    text = language_model_task("model.dropout=0.2", *changes)
    pairs = translation_task(*PLAIN, *SHAPED, *changes)
    for task, batch in ((text, windows(text, (6,))[0]), (pairs, pairs_of_sentences(pairs)[0])):
        model, twin = (seeded(5, task.build_model).train() for _ in range(2))
        plan = PipelinePlan([[layer * communicator.size // 8 for layer in range(8)]], [3], "")
        if not isinstance(model, LanguageModel):
            plan = translation_homes(model, communicator.size, False, 2)
        division = divided(model, plan)
        pipelined = PipelinedStep(task, model, Stages(communicator.size, CPU), division, precision)
        steps, tokens = (pipelined, TrainingStep(task, twin, precision)), torch.tensor(batch.target_tokens)
        yield tuple(seeded(6, step.gradient, [batch], tokens) for step in steps)  # type: ignore[misc]


def run_evenly(communicator: Communicator, path: Path, text: Path, overrides: Sequence[str] = ()) -> str:
    """A job: trains a recipe as :func:`tests.unit.parallel.jobs.run`, its layers divided evenly, whatever they take."""

    def even(model: nn.Module, stages: int, *_: object) -> PipelinePlan:
        def over(layers: nn.ModuleList) -> list[int]:
            return [layer * stages // len(layers) for layer in range(len(layers))]

        if isinstance(model, LanguageModel):
            return PipelinePlan([over(model.layers)], [3], "pipeline: even")
        pairs = [0, 1] * len(model.encoder.forward_layers)
        upper, lower = over(model.encoder.upper_layers), over(model.decoder.layers)
        return PipelinePlan([pairs, upper, lower], [2, 3], "pipeline: even")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipelines, "plan_pipeline", even)
        return jobs.run(communicator, path, text, overrides)
