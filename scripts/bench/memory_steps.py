"""Training steps of the memory benchmark: variants of recomputation, and the batch of a recipe.

The variants of ``torch.utils.checkpoint`` wrap parts of a decoder in plain PyTorch, as one would write it by hand.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from econmt.bench.rows import Row
from econmt.bench.training import vocabulary_sizes
from econmt.config.recipe import load_recipe
from econmt.data.batching.batches import Batch, rows_of_batch
from econmt.engine.devices import give_back_memory
from econmt.engine.measurement import measure_step
from econmt.engine.precision import Precision
from econmt.engine.step import StepResult, TrainingStep
from econmt.errors import InputError
from econmt.model import EncoderOutput, Implementations, TranslationModel
from econmt.model.decoder import InputFeedingDecoder, Memory
from econmt.model.guided_alignment import TrainingGuides
from econmt.model.layers import draw_seed, weights_of
from econmt.tasks.protocol import Shape
from econmt.tasks.translation import TranslationTask
from econmt_ops import AttentionalLSTMState
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.cells.lstm import forward as lstm_cell
from econmt_ops.products.dropout import apply_dropout
from econmt_ops.products.stack import StackOptions
from scripts.bench.compare.measure import resident_bytes

CHUNK_BYTES = 32 << 20
"""Bytes of the logits that the checkpointed output layer computes at a time."""
QUICK = [f"model.{name}=8" for name in ("embedding", "encoder.size", "decoder.size", "attention.size")]
QUICK.append("training.batch.size=3")
REFERENCE = Implementations.everywhere("reference")
_checkpoint = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


class Variant(NamedTuple):
    """Implementations and precision of a training step.

    Attributes:
        name: Name in tables.
        implementations: Implementations of the ops.
        precision: Type of products and feature maps.
        scope: Part inside torch.utils.checkpoint: "attention", "step", "everything", or "" for none.
    """

    name: str
    implementations: Implementations
    precision: torch.dtype = torch.float32
    scope: str = ""


def step_variants() -> list[Variant]:
    """Returns the variants that use econmt_ops, and the reference first."""
    rows = [
        Variant("reference", REFERENCE),
        Variant("+ output", REFERENCE._replace(output="recompute")),
        Variant("+ decoder", REFERENCE._replace(decoder="recompute", attention="recompute", stash="gates")),
    ]
    for stash in ("gates", "cells", "attention", "outputs"):
        everything = Implementations.everywhere("recompute", stash)
        rows.append(Variant(f"all, {stash}", everything))
    if has_compiler():
        for stash in ("gates", "outputs"):
            everything = Implementations.everywhere("compiled", stash)
            rows.append(Variant(f"all, {stash}, compiled", everything))
    best = ("reference", "all, outputs", "all, gates, compiled")
    return rows + [row._replace(precision=torch.bfloat16) for row in rows if row.name in best]


def checkpoint_variants() -> list[Variant]:
    """Returns the variants that use torch.utils.checkpoint."""
    scopes = ("attention", "step", "everything")
    return [Variant(f"checkpoint: {scope}", REFERENCE, scope=scope) for scope in scopes]


class CheckpointedDecoder(InputFeedingDecoder):
    """Decoder in plain PyTorch, with torch.utils.checkpoint around the attention of each step or around each step.

    Its layers have neither normalization nor residual connections, as in the recipes ``iwslt`` and ``multi30k``.
    Nothing inside draws random numbers, since dropout masks are made before the loop, so no random states are saved.
    """

    scope = ""

    def forward(
        self, inputs: Tensor, memory: Memory, state: AttentionalLSTMState, _implementations: Implementations
    ) -> tuple[Tensor, Tensor, AttentionalLSTMState]:
        """See ``Decoder.forward``."""
        bottom, *upper = weights_of(self.layers)
        size, batch, steps = inputs.shape[2], inputs.shape[0], inputs.shape[1]
        padding = torch.arange(memory.keys.shape[1], device=inputs.device) >= memory.lengths[:, None]
        keys, values = memory.keys, memory.values
        products = functional.linear(inputs, bottom.input[:, :size], bottom.bias)
        recurrent = torch.cat([bottom.input[:, size:], bottom.hidden], 1).t()
        stacked = [(torch.cat([layer.input, layer.hidden], 1).t(), layer.bias) for layer in upper]
        probability = self.dropout.probability if self.training else 0.0
        seed = draw_seed() if probability > 0.0 else None
        options = StackOptions(dropout=probability, seed=seed, variational=self.dropout.variational)
        masks = options.keep_masks(len(self.layers), (batch, steps, self.config.size), inputs.device)

        def attend(h: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return self._attend(h, keys, values, padding)

        def run(
            product: Tensor, fed: Tensor, keys: Tensor, values: Tensor, step: int, *state: Tensor
        ) -> tuple[Tensor, ...]:
            h, c = lstm_cell(torch.addmm(product, torch.cat([fed, state[0]], 1), recurrent), state[1])
            after, read = [h, c], h
            for number, (weight, bias) in enumerate(stacked, start=1):
                mask = masks[number]
                if mask is not None:
                    read = apply_dropout(read, mask[:, min(step, mask.shape[1] - 1)], probability)
                gates = torch.addmm(bias, torch.cat([read, state[2 * number]], 1), weight)
                h, c = lstm_cell(gates, state[2 * number + 1])
                after += [h, c]
                read = h
            looked = _checkpoint(attend, read, keys, values) if self.scope == "attention" else None
            context, alpha = attend(read, keys, values) if looked is None else looked
            output = torch.tanh(self.combine(torch.cat([read, context], 1)))
            return (output, alpha, *after)

        fed, states = state.output, [part for layer in state.layers for part in layer]
        outputs, alphas = [], []
        for step, product in enumerate(products.unbind(1)):
            if self.scope == "attention":
                result = run(product, fed, keys, values, step, *states)
            else:
                result = _checkpoint(run, product, fed, keys, values, step, *states)
            fed, alpha, *states = result
            outputs.append(fed)
            alphas.append(alpha)
        layers = tuple(zip(states[::2], states[1::2], strict=True))
        return torch.stack(outputs, 1), torch.stack(alphas, 1), AttentionalLSTMState(layers, fed)

    def _attend(self, h: Tensor, keys: Tensor, values: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Computes context (B, E) and weights (B, S) of one step's h (B, H)."""
        attention = self.attention
        assert attention.query is not None
        assert attention.score is not None
        hidden = functional.linear(h, attention.query).unsqueeze(1) + keys
        scores = torch.matmul(hidden.tanh_(), attention.score).masked_fill(padding, -torch.inf)
        weights = torch.softmax(scores, 1)
        return torch.bmm(weights.unsqueeze(1), values).squeeze(1), weights


class CheckpointedModel(TranslationModel):
    """Model that computes with another model's parameters, and with torch.utils.checkpoint; see :class:`Variant`."""

    def __init__(self, original: TranslationModel, scope: str) -> None:
        config = original.config
        sizes = original.source_size, original.target_size
        super().__init__(config, *sizes, REFERENCE)
        self.scope = scope
        decoder = CheckpointedDecoder(config)
        decoder.scope = scope
        self.decoder = decoder
        others = dict(original.named_modules())
        for name, module in self.named_modules():
            module._parameters = others[name]._parameters
        self.train(original.training)

    def encode(
        self, source: Tensor, lengths: Tensor, implementations: Implementations | None = None
    ) -> EncoderOutput:
        """See ``TranslationModel.encode``; dropout seeds are drawn again, so the random state is saved."""
        if self.scope != "everything":
            return super().encode(source, lengths, implementations)
        encoded: EncoderOutput = _checkpoint(
            super().encode, source, lengths, implementations, preserve_rng_state=True
        )
        return encoded

    def loss(
        self,
        source: Tensor,
        source_lengths: Tensor,
        target_input: Tensor,
        target_output: Tensor,
        label_smoothing: float = 0.0,
        implementations: Implementations | None = None,
        guides: TrainingGuides | None = None,
    ) -> Tensor:
        """See ``TranslationModel.loss``; with everything checkpointed it is the cross-entropy alone."""
        if self.scope != "everything":
            plain = source, source_lengths, target_input, target_output
            return super().loss(*plain, label_smoothing, implementations, guides)
        assert guides is None or (guides.alignment is None and guides.weights is None)
        hidden = self(source, source_lengths, target_input, implementations).flatten(0, 1)

        def part(hidden: Tensor, targets: Tensor) -> Tensor:
            logits = functional.linear(hidden, self.output.weight, self.output.bias)
            return functional.cross_entropy(
                logits, targets, ignore_index=self.pad, reduction="sum", label_smoothing=label_smoothing
            )

        rows = max(1, CHUNK_BYTES // (4 * self.target_size))
        total: Tensor = hidden.new_zeros(())
        for chunk, targets in zip(
            torch.split(hidden, rows), torch.split(target_output.flatten(), rows), strict=True
        ):
            total = total + _checkpoint(part, chunk, targets)
        return total


class Case(NamedTuple):
    """A recipe's task with a batch on a device; ``lengths`` describes its shape."""

    name: str
    task: TranslationTask
    batch: Batch
    lengths: str


def make_case(name: str, lengths: str, overrides: Sequence[str], device: torch.device) -> Case:
    """Makes one batch of full rows of "100x80" source and target positions; InputError is raised for another text."""
    recipe = load_recipe(name, overrides)
    source, cross, target = lengths.partition("x")
    if not (cross and source.isdecimal() and target.isdecimal() and int(source) > 1 and int(target) > 1):
        raise InputError(f"--lengths {lengths}: give source x target positions, as 100x80")
    shape = Shape(rows_of_batch(recipe.training.batch, int(target)), int(source), int(target))
    task = TranslationTask(recipe, *vocabulary_sizes(recipe))
    return Case(name, task, task.example(shape).to(device), str(shape))


class Steps:
    """Training steps on the batch of a case, in any variant, with the same parameters throughout."""

    def __init__(self, case: Case) -> None:
        self.device = case.batch.source.device
        torch.manual_seed(case.task.recipe.training.seed)
        model = case.task.build_model().train().to(self.device)
        plain = TrainingStep(case.task, model)
        plain.optimizer.set_learning_rate(0.0)
        plain.prepare()
        self._steps = {"": plain}
        if case.task.recipe.model.decoder.input_feeding:
            for variant in checkpoint_variants():
                checkpointed = CheckpointedModel(model, variant.scope)
                self._steps[variant.scope] = TrainingStep(case.task, checkpointed, optimizer=plain.optimizer)
        self.batch = case.batch

    def step(self, variant: Variant) -> TrainingStep:
        """Returns the training step, set to a variant."""
        step = self._steps[variant.scope]
        step.implementations, step.precision = variant.implementations, Precision(variant.precision)
        return step

    def run(self, variant: Variant) -> StepResult:
        """Runs a step."""
        step = self.step(variant)
        return step.run([self.batch], step.tokens([self.batch]))

    def values(self, variant: Variant) -> tuple[float, float]:
        """Returns loss a token and gradient norm of a step."""
        torch.manual_seed(1)
        result = self.run(variant)
        return float(result.loss) / self.batch.target_tokens, float(result.norm)

    def memory_of(self, variant: Variant) -> Row:
        """Returns the bytes of a step: what the forward pass keeps, the peak, and more on a CPU.

        On a CPU these are sums of tensors, and the process's resident set follows.
        """
        if self.device.type == "cpu":
            ledger = measure_step(self.step(variant), self.batch, timed=False)
            return {
                "stash bytes": ledger.stashed,
                "peak bytes": ledger.peak,
                "process bytes": resident_peak(partial(self.run, variant)),
            }
        self.forget()
        torch.cuda.reset_peak_memory_stats(self.device)
        allocated: dict[str, int] = {}
        step = self.step(variant)
        step.run(
            [self.batch],
            step.tokens([self.batch]),
            on_phase=lambda phase, _: allocated.update({phase: torch.cuda.memory_allocated(self.device)}),
        )
        torch.cuda.synchronize(self.device)
        return {
            "stash bytes": allocated["backward"] - allocated["forward"],
            "peak bytes": torch.cuda.max_memory_allocated(self.device),
        }

    def forget(self) -> None:
        """Frees the tensors that a step has left, and the GPU's cache."""
        self._steps[""].clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def resident_peak(run: Callable[[], object]) -> int | str:
    """Returns the largest resident set of the process during a computation in bytes; empty where it is unknown."""
    process = Path("/proc/self")
    gc.collect()
    give_back_memory(torch.device("cpu"))
    try:
        (process / "clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    except OSError:
        return ""
    run()
    return resident_bytes((process / "status").read_text(encoding="ascii"))[1]
