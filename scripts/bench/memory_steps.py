"""Training steps of the memory benchmark: variants of recomputation, and the batches of a recipe.

The variants of ``torch.utils.checkpoint`` wrap parts of a decoder in plain PyTorch, as one would write it by hand.
"""

from __future__ import annotations

import ctypes
import gc
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from econmt.config.recipe import Recipe, WordSubwords, find_recipe, load_recipe
from econmt.data.batching.batches import Batch, pad_batch, rows_of_batch, training_batches
from econmt.data.batching.store import prepare
from econmt.data.text.corpus import search_path
from econmt.engine.devices import trims_batches
from econmt.engine.precision import Precision
from econmt.engine.step import StepResult, TrainingStep
from econmt.errors import InputError
from econmt.memory.measure.layer_times import peak_flops
from econmt.memory.measure.ledger import Ledger, measure_step
from econmt.model import EncoderOutput, Implementations, TranslationModel
from econmt.model.decoder import InputFeedingDecoder, Memory, Recurrent
from econmt.model.layers import draw_seed, weights_of
from econmt.tasks.translation import TranslationTask
from econmt.training.interrupts import Interrupts
from econmt_ops.additive_attention.reference import LAYER_NORM_EPSILON
from econmt_ops.backends.compiled import has_compiler
from econmt_ops.cells.lstm import forward as lstm_cell
from econmt_ops.core.dropout import apply_dropout, layer_keep_masks

TEXT_BATCHES = 3
"""Batches of real lengths in one turn."""
CHUNK_BYTES = 32 << 20
"""Bytes of the logits that the checkpointed output layer computes at a time."""
PRODUCTS = (
    *(f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "mv", "addmv")),
    *(f"aten::{name}" for name in ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")),
)
FEWEST_TURNS, MOST_TURNS = 3, 25
QUICK = [f"model.{name}=8" for name in ("embedding", "encoder.size", "decoder.size", "attention.size")]
QUICK.append("training.batch.size=3")
_FUSED = ("model.layer_normalization=false", "ops.decoder=auto")
FUSED = {
    "groundhog": (*_FUSED, "model.attention.use_prev_word=false", "model.attention.coverage.type=none"),
    "best": _FUSED,
}
"""Changes to recipes whose decoder has no fused operation, so that all implementations can run it."""
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
    """Returns the rows of a table of steps, the reference first, without those of torch.utils.checkpoint."""
    rows = [
        Variant("reference", REFERENCE),
        Variant("+ output", REFERENCE._replace(output="recompute")),
        Variant("+ decoder", REFERENCE._replace(decoder="recompute", attention="recompute", stash="gates")),
    ]
    for stash in ("gates", "cells", "attention", "outputs"):
        everything = Implementations.everywhere("recompute", stash)
        rows.append(Variant(f"all, {stash}", everything))
    if has_compiler():
        mixed = Implementations("reference", "compiled", "compiled", "compiled", "gates")
        rows.append(Variant("attention and output, compiled", mixed))
        for stash in ("gates", "outputs"):
            everything = Implementations.everywhere("compiled", stash)
            rows.append(Variant(f"all, {stash}, compiled", everything))
    best = ("reference", "all, outputs", "attention and output, compiled", "all, gates, compiled")
    return rows + [row._replace(precision=torch.bfloat16) for row in rows if row.name in best]


def checkpoint_variants() -> list[Variant]:
    """Returns the rows of torch.utils.checkpoint."""
    scopes = ("attention", "step", "everything")
    return [Variant(f"checkpoint: {scope}", REFERENCE, scope=scope) for scope in scopes]


class CheckpointedDecoder(InputFeedingDecoder):
    """The decoder in plain PyTorch, with torch.utils.checkpoint round each step's attention or each whole step.

    Nothing inside draws random numbers, since dropout masks are made before the loop, so no random states are saved.
    """

    scope = ""

    def forward(
        self, inputs: Tensor, memory: Memory, state: Recurrent, _implementations: Implementations
    ) -> tuple[Tensor, Tensor, Recurrent]:
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
        masks = layer_keep_masks(
            len(self.layers),
            batch,
            steps,
            self.config.size,
            probability,
            seed,
            self.dropout.variational,
            inputs.device,
        )

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
                read = h + read if self.config.residual else h
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
        return torch.stack(outputs, 1), torch.stack(alphas, 1), Recurrent(layers, fed)

    def _attend(self, h: Tensor, keys: Tensor, values: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        """Computes context (B, E) and weights (B, S) of one step's h (B, H)."""
        attention = self.attention
        assert attention.query is not None
        assert attention.score is not None
        hidden = functional.linear(h, attention.query).unsqueeze(1) + keys
        if attention.layer_norm is not None:
            gain, shift = attention.layer_norm
            hidden = functional.layer_norm(hidden, gain.shape, gain, shift, LAYER_NORM_EPSILON)
        scores = torch.matmul(hidden.tanh_(), attention.score).masked_fill(padding, -torch.inf)
        weights = torch.softmax(scores, 1)
        return torch.bmm(weights.unsqueeze(1), values).squeeze(1), weights


class CheckpointedModel(TranslationModel):
    """The parameters of another model, run with torch.utils.checkpoint; see :class:`Variant` for the scopes."""

    def __init__(self, original: TranslationModel, scope: str) -> None:
        config = original.config
        sizes = original.source_size, original.target_size
        super().__init__(config, *sizes, original.pad, REFERENCE)
        self.scope = scope
        decoder = CheckpointedDecoder(
            config.decoder, config.attention, config.embedding, config.encoder.size, config.dropouts
        )
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
    ) -> Tensor:
        """See ``TranslationModel.loss``."""
        if self.scope != "everything":
            return super().loss(
                source, source_lengths, target_input, target_output, label_smoothing, implementations
            )
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
    """A recipe with its vocabulary sizes and batches, and a description of their lengths."""

    name: str
    recipe: Recipe
    sizes: tuple[int, int]
    batches: list[Batch]
    lengths: str
    note: str


def recipe_of(name: str, quick: bool) -> tuple[Recipe, tuple[int, int]]:
    """Loads a recipe; returns it with the sizes of its source and target vocabularies."""
    recipe = load_recipe(name, [*FUSED.get(name, ()), *(QUICK if quick else ())])
    words = recipe.data.subwords
    sizes = (words.source, words.target) if isinstance(words, WordSubwords) else (words.size, words.size)
    return recipe, (60, 60) if quick else sizes


def positions_of(lengths: str) -> tuple[int, int]:
    """Returns the source and target positions of "100x80"; raises InputError for any other text."""
    source, cross, target = lengths.partition("x")
    if not (cross and source.isdecimal() and target.isdecimal() and int(source) > 1 and int(target) > 1):
        raise InputError(f"--lengths {lengths}: give source x target positions, as 100x80, or text")
    return int(source), int(target)


def make_case(name: str, lengths: str, quick: bool, device: torch.device) -> Case:
    """Makes the batches of a recipe: of its text (or random ones of like lengths), or one of full rows."""
    recipe, sizes = recipe_of(name, quick)
    draw = np.random.default_rng(1)
    if lengths != "text":
        shape = positions_of(lengths)
        rows = rows_of_batch(recipe.training.batch, shape[1])
        ends: Sequence[Any] = [np.full(rows, positions - 1) for positions in shape]
        batch = _random_batch(draw, sizes, ends, shape)
        return Case(
            name, recipe, sizes, [batch], f"{rows} x {lengths.replace('x', ' x ')}", "every row is full"
        )
    try:
        if quick:
            raise InputError("--quick reads no text")
        with tempfile.TemporaryDirectory() as folder:
            search = search_path(find_recipe(name).parent, None)
            text = prepare(recipe, Path(folder) / "prepared", search, show_progress=False)
            stream = training_batches(recipe, text)
            batches = [next(stream) for _ in range(TEXT_BATCHES)]
        if trims_batches(recipe.training.trim_batches, device):
            batches = [batch.trimmed() for batch in batches]
        sizes = text.vocabularies.source.size, text.vocabularies.target.size
        note = f"the first {TEXT_BATCHES} batches of an epoch of the recipe's text"
    except InputError as error:
        batches = []
        for _ in range(TEXT_BATCHES):
            target = 10 + int(draw.integers(0, 11))
            rows = rows_of_batch(recipe.training.batch, target)
            ends = draw.integers(9, 20, rows), np.full(rows, target - 1)
            batches.append(_random_batch(draw, sizes, ends, (int(ends[0].max()) + 1, target)))
        note = f"RANDOM batches of 10 to 20 positions, since there is no text: {str(error).splitlines()[0]}"
    shapes = ", ".join(
        f"{len(batch.source)} x {batch.source.shape[1]} x {batch.target_output.shape[1]}" for batch in batches
    )
    return Case(name, recipe, sizes, batches, shapes, note)


def _random_batch(
    draw: np.random.Generator, sizes: tuple[int, int], ends: Sequence[Any], shape: tuple[int, int]
) -> Batch:
    ids = [draw.integers(4, size, (len(end), end.max())) for size, end in zip(sizes, ends, strict=True)]
    return pad_batch(np.arange(len(ends[0])), ids[0], ends[0], ids[1], ends[1], shape)


class Steps:
    """Training steps on the batches of a case, in any variant, with the same parameters throughout."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(case.recipe.training.seed)
        self.device = device
        task = TranslationTask(case.recipe, *case.sizes)
        model = task.build_model().train().to(device)
        plain = TrainingStep(task, model)
        plain.optimizer.set_learning_rate(0.0)
        plain.prepare()
        self._steps = {"": plain}
        for variant in checkpoint_variants():
            if case.recipe.model.decoder.input_feeding:
                checkpointed = CheckpointedModel(model, variant.scope)
                self._steps[variant.scope] = TrainingStep(task, checkpointed, optimizer=plain.optimizer)
        self.batches = [batch.to(device) for batch in case.batches]
        self.largest = max(
            self.batches,
            key=lambda batch: len(batch.source) * batch.source[0].numel() * batch.target_output[0].numel(),
        )
        self.tokens = sum(batch.target_tokens for batch in self.batches)

    def step(self, variant: Variant) -> TrainingStep:
        """Returns the training step, set to a variant."""
        step = self._steps[variant.scope]
        step.implementations, step.precision = variant.implementations, Precision(variant.precision)
        return step

    def run(self, variant: Variant, batch: Batch) -> StepResult:
        """Runs one whole step."""
        step = self.step(variant)
        return step.run([batch], step.tokens([batch]))

    def turn(self, variant: Variant) -> float:
        """Returns the seconds of one step on every batch."""
        begin = now(self.device)
        for batch in self.batches:
            self.run(variant, batch)
        return now(self.device) - begin

    def products(self, variant: Variant) -> float:
        """Returns the milliseconds of a turn in matrix products and in oneDNN's LSTM, which consists of them."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            self.turn(variant)
        events = profiler.key_averages()
        return float(sum(event.self_cpu_time_total for event in events if event.key in PRODUCTS)) / 1000.0

    def values(self, variant: Variant) -> tuple[float, float]:
        """Returns loss a token and gradient norm of a step on the largest batch."""
        torch.manual_seed(1)
        result = self.run(variant, self.largest)
        return float(result.loss) / self.largest.target_tokens, float(result.norm)

    def ledger(self, variant: Variant, batch: Batch) -> Ledger:
        """Returns the ledger of a step."""
        return measure_step(self.step(variant), batch, timed=False)

    def allocated(self, variant: Variant) -> tuple[int, int]:
        """Returns bytes allocated on the GPU: those that the forward pass keeps, and the peak of the step."""
        self.forget()
        torch.cuda.reset_peak_memory_stats(self.device)
        left: dict[str, int] = {}
        step = self.step(variant)
        step.run(
            [self.largest],
            step.tokens([self.largest]),
            watch=lambda phase, _: left.update({phase: torch.cuda.memory_allocated(self.device)}),
        )
        now(self.device)
        return left["backward"] - left["forward"], torch.cuda.max_memory_allocated(self.device)

    def forget(self) -> None:
        """Frees the tensors that a step has left."""
        self._steps[""].clear()
        free(self.device)


def now(device: torch.device) -> float:
    """Returns the clock in seconds after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@cache
def ceiling(device: torch.device, precision: torch.dtype) -> float:
    """Returns the most operations a second that any of ten large matrix products reaches."""
    return max(peak_flops.__wrapped__(device, precision) for _ in range(10))


def free(device: torch.device) -> None:
    """Collects garbage and empties the GPU's cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def resident_peak(run: Callable[[], object]) -> int | None:
    """Returns the largest resident set of the process during a computation in bytes; None where it is unknown."""
    process = Path("/proc/self")
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        (process / "clear_refs").write_text("5", encoding="ascii")  # resets VmHWM
    except (OSError, AttributeError):
        return None
    run()
    status = (process / "status").read_text(encoding="ascii")
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


class Clock:
    """Time limits of a benchmark.

    Args:
        limit: Seconds for everything.
        turns: Seconds for the turns of one table.
        interrupts: Source of Ctrl-C, which ends the time.
    """

    def __init__(self, limit: float, turns: float, interrupts: Interrupts | None = None) -> None:
        self._end = time.monotonic() + limit
        self.turns = turns
        self._interrupts = Interrupts() if interrupts is None else interrupts

    @property
    def interrupted(self) -> bool:
        """True after Ctrl-C."""
        return self._interrupts.pending

    @property
    def over(self) -> bool:
        """True if no further measurement may begin."""
        return self.interrupted or time.monotonic() > self._end


def take_turns(
    runs: Mapping[str, Callable[[], float]], clock: Clock, fewest: int = FEWEST_TURNS
) -> dict[str, list[float]]:
    """Returns the seconds of every run in every turn."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    begin = time.monotonic()
    for turn in range(MOST_TURNS):
        if turn >= fewest and (clock.over or time.monotonic() - begin > clock.turns):
            break
        if turn and clock.interrupted:
            break
        for name, run in runs.items():
            seconds[name].append(run())
    return seconds


def spread(seconds: Sequence[float], first: Sequence[float]) -> dict[str, Any]:
    """Returns median and quartiles in milliseconds, and the median over turns of the speed relative to ``first``."""
    low, middle, high = (1000.0 * float(np.quantile(seconds, share)) for share in (0.25, 0.5, 0.75))
    faster_by = statistics.median(other / own for other, own in zip(first, seconds, strict=True))
    return {"milliseconds": middle, "quartiles": [low, high], "turns": len(seconds), "speed": faster_by}
