"""Updates of a run are those of a loop in plain PyTorch, for every option of ``training`` that changes one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional, utils

from econmt.checkpoint.tensor_files import read_tensors
from econmt.config.recipe import Training
from econmt.data.batching.batches import Batch
from econmt.data.batching.text_batches import TextBatch
from econmt.model import Implementations, layers
from tests.unit.training.conftest import UseRows
from tests.unit.training.tiny import Run, metrics, write_guides, write_text
from tests.unit.training.tiny_text import TextRun, write_lines

RATE = 0.5
UPDATES = 2
COMMON = (
    "training.optimizer={name: sgd, learning_rate: 0.5}",
    "training.gradient_clipping={type: none}",
    "training.precision=float32",
    f"training.max_updates={UPDATES}",
    "training.checkpoint_interval=1",
    "training.keep_last_params=9",
    "training.seed=7",
)
"""What every run has that a row of the table does not change."""

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Plain:
    """Update in plain PyTorch, as a row of the table describes it.

    Attributes:
        optimizer: Optimizer of the parameters.
        rates: Learning rate of each update.
        clip: Clips the gradients of the parameters.
        batches: Batches of an update.
        smoothing: Label smoothing of the cross-entropy.
        alignment: Weight of the alignment loss; 0: none.
        activation: Weight of the mean square of the outputs of a language model's top layer.
        temporal: Weight of the mean square of their differences in time.
        jitter: Tokens of a row for which the learning rate holds; 0: for all.
        frozen: Pattern of the names of parameters that are not trained.
        weights: Weight of the newest parameters in the saved mean after each update; 1: they are saved themselves.
        tolerance: Relative error of an update, where it has less than float32.
        spacing: Distance between two stored numbers, relative to them, by which each update may be rounded.
    """

    optimizer: Optimizer = torch.optim.SGD
    rates: tuple[float, ...] = (RATE,) * UPDATES
    clip: Callable[[list[nn.Parameter]], object] = lambda _: None
    batches: int = 1
    smoothing: float = 0.0
    alignment: float = 0.0
    activation: float = 0.0
    temporal: float = 0.0
    jitter: int = 0
    frozen: str = ""
    weights: tuple[float, ...] = (1.0,) * UPDATES
    tolerance: float = 1e-4
    spacing: float = 0.0


clip_norm = partial(utils.clip_grad_norm_, max_norm=0.1)
clip_value = partial(utils.clip_grad_value_, clip_value=0.003)
BETAS, DECAY = ", betas: [0.8, 0.9]", ", weight_decay: 0.1"
JOINT = "data.subwords={type: bpe, size: 30, joint: true}"
NORM = "training.gradient_clipping={type: norm, threshold: 0.1}"
VALUE = "training.gradient_clipping={type: value, threshold: 0.003}"


def optimizer(name: str, keys: str = "", **settings: Any) -> tuple[str, Plain]:
    """Returns a row of an optimizer; an epsilon above rounding, so that gradients of zero stay without effect."""
    kind, eps = settings.pop("kind"), settings.pop("eps", 1e-3)
    rate = settings.pop("rate", 0.02)
    recipe = f"training.optimizer={{name: {name}, learning_rate: {rate}, eps: {eps}{keys}}}"
    eps = {} if kind is torch.optim.SGD else {"eps": (eps, 1e-3) if kind is torch.optim.Adafactor else eps}
    tolerance = settings.pop("tolerance", 1e-4)
    return recipe, Plain(partial(kind, **eps, **settings), rates=(rate,) * UPDATES, tolerance=tolerance)


def schedule(keys: str, *rates: float) -> tuple[str, Plain]:
    return f"training.schedule={{{keys}}}", Plain(rates=rates)


FADING = optimizer("adamw", DECAY, kind=torch.optim.AdamW, weight_decay=0.1)
"""Updates that change parameters without gradients, too, unless they are fixed."""

TRANSLATION: dict[str, tuple[str, Plain]] = {
    "plain": ("", Plain()),
    "batch": ("training.batch={type: word, size: 20}", Plain()),
    "buckets": ("training.bucket_width=null training.max_buckets=2", Plain()),
    "untrimmed": ("training.trim_batches=never", Plain()),
    "interval and norm": (f"training.update_interval=3 {NORM}", Plain(batches=3, clip=clip_norm)),
    "value": (VALUE, Plain(clip=clip_value)),
    "smoothing": ("training.label_smoothing=0.2", Plain(smoothing=0.2)),
    "alignment": (
        "data.alignment=align training.guided_alignment_weight=0.5 training.update_interval=2",
        Plain(alignment=0.5, batches=2),
    ),
    "weights and alignment": (
        "data.weights=weights data.alignment=align training.guided_alignment_weight=2.0",
        Plain(alignment=2.0),
    ),
    "budget": ("training.memory_budget=1GiB", Plain()),
    "budget and interval": (
        f"training.memory_budget=1GiB training.update_interval=2 training.label_smoothing=0.1 {NORM}",
        Plain(batches=2, smoothing=0.1, clip=clip_norm),
    ),
    "in backward": (f"training.optimizer_in_backward=always {VALUE}", Plain(clip=clip_value)),
    "decay": optimizer("sgd", DECAY, kind=torch.optim.SGD, weight_decay=0.1),
    "momentum": optimizer(
        "sgd", f", momentum: 0.9{DECAY}", kind=torch.optim.SGD, momentum=0.9, weight_decay=0.1
    ),
    "adam": optimizer("adam", f"{BETAS}{DECAY}", kind=torch.optim.Adam, betas=(0.8, 0.9), weight_decay=0.1),
    "adamw": optimizer(
        "adamw", f"{BETAS}{DECAY}", kind=torch.optim.AdamW, betas=(0.8, 0.9), weight_decay=0.1
    ),
    "adam8bit": optimizer("adam8bit", kind=torch.optim.Adam),
    "nadam": optimizer("nadam", BETAS, kind=torch.optim.NAdam, betas=(0.8, 0.9)),
    "radam": optimizer("radam", BETAS, kind=torch.optim.RAdam, betas=(0.8, 0.9)),
    "adagrad": optimizer("adagrad", DECAY, kind=torch.optim.Adagrad, weight_decay=0.1),
    "adadelta": optimizer("adadelta", ", betas: [0.5, 0.9]", kind=torch.optim.Adadelta, rho=0.9, rate=5.0),
    "rmsprop": optimizer(
        "rmsprop", ", betas: [0.5, 0.9], momentum: 0.5", kind=torch.optim.RMSprop, alpha=0.9, momentum=0.5
    ),
    "adafactor": optimizer("adafactor", DECAY, kind=torch.optim.Adafactor, weight_decay=0.1, eps=1e-8),
    "warmup": schedule("warmup: 4", 0.125, 0.25),
    "plateau-reduce": schedule("name: plateau-reduce, warmup: 2", 0.25, 0.5),
    "inverse-sqrt": schedule("name: inverse-sqrt, warmup: 1", 0.5, 0.5**1.5),
    "noam": schedule("name: noam, warmup: 2", 0.5 * 8**-0.5 * 2**-1.5, 0.5 * 8**-0.5 * 2**-0.5),
    "cosine": schedule("name: cosine, decay_updates: 4, min_learning_rate: 0.1", 0.3 + 0.2 * 0.5**0.5, 0.3),
    "linear": schedule("name: linear, warmup: 1, decay_updates: 3", 0.5, 0.25),
    "mean": ("training.averaging.start=at-once", Plain(weights=(1.0, 0.5))),
    "moving mean": ("training.averaging={start: at-once, decay: 0.05}", Plain(weights=(1.0, 0.95))),
    "early mean": ("training.averaging={start: at-once, decay: 0.4}", Plain(weights=(1.0, 10 / 11))),
    "names": (
        f"{FADING[0]} training.fixed_param_names=['.*embedding.*','output.bias']",
        replace(FADING[1], frozen=".*embedding.*|output.bias"),
    ),
    "src_trg": (f"{JOINT} model.weight_tying=src_trg", Plain()),
    "trg_softmax": ("model.weight_tying=trg_softmax", Plain()),
    "src_trg_softmax": (f"{JOINT} model.weight_tying=src_trg_softmax {NORM}", Plain(clip=clip_norm)),
    "no input feeding": ("model.decoder={input_feeding: false, size: 8}", Plain()),
    "bfloat16": ("training.precision=bfloat16", Plain(tolerance=0.05)),
    "float16": (f"training.precision=float16 {NORM}", Plain(tolerance=0.01, clip=clip_norm)),
    "bfloat16 parameters": (
        "training.precision=bfloat16 training.param_dtype=bfloat16 training.optimizer.learning_rate=5.0",
        Plain(rates=(5.0,) * UPDATES, tolerance=0.1, spacing=2.0**-7),
    ),
}
"""Overrides of the recipe, separated by spaces at the names of sections, and the update that they mean."""

SPARSE = ("interval and norm", "budget", "momentum", "adam", "src_trg", "trg_softmax", "src_trg_softmax")
"""Rows that are tried with gradients of embeddings that are rows, too."""

LANGUAGE_MODEL: dict[str, tuple[str, Plain]] = {
    "plain": ("", Plain()),
    "windows": ("training.bptt=7 training.batch={size: 4}", Plain()),
    "interval and norm": (f"training.update_interval=2 {NORM}", Plain(batches=2, clip=clip_norm)),
    "budget": ("training.memory_budget=1GiB", Plain()),
    "penalties": (
        "training.activation_regularization=2.0 training.temporal_activation_regularization=3.0",
        Plain(activation=2.0, temporal=3.0),
    ),
    "jitter": (
        "training.bptt=10 training.bptt_jitter=true training.update_interval=2 training.label_smoothing=0.1",
        Plain(batches=2, jitter=10, smoothing=0.1),
    ),
}

NO_UPDATE = set(
    """cuda_graphs loss_scale loss_scale_window max_updates max_epochs max_seconds checkpoint_interval decode_and_evaluate
    valid_rows bleu_tokenizer early_stopping keep_last_params initialize_from update_vocab seed device threads
    log_interval""".split()  # noqa: SIM905  one a line would fill a page
)
"""Keys of ``training`` that change no update from given batches and parameters, or that other files test:
``test_float16.py``."""


def overrides(row: str) -> tuple[str, ...]:
    return tuple(re.split(r" (?=training\.|data\.|model\.)", row)) if row else ()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of both tasks, with alignments and weights of the pairs."""
    made = write_text(tmp_path_factory.mktemp("updates"), {"train": 30, "valid": 1})
    write_guides(made)
    (made / "text").mkdir()
    write_lines(made / "text", {"train": 60, "valid": 6, "test": 6})
    return made


def cross_entropy(model: nn.Module, hidden: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Returns the loss of each row, (B,)."""
    output = (model.get_parameter(f"output.{name}") for name in ("weight", "bias"))
    logits = functional.linear(hidden, *output).transpose(1, 2)
    settings: Any = {"ignore_index": 0, "label_smoothing": smoothing, "reduction": "none"}
    return functional.cross_entropy(logits, targets, **settings).sum(1)


def loss_of_pairs(model: Any, batch: Batch, plain: Plain) -> Tensor:
    """Returns the summed loss of a batch of translation."""
    reference = Implementations.everywhere("reference")
    encoded = model.encode(batch.source, batch.source_lengths, reference)
    hidden, attention = model._decode(encoded, batch.target_input, reference)
    each = cross_entropy(model, hidden, batch.target_output, plain.smoothing)
    if batch.alignment is not None:
        links = batch.alignment.float()
        shares = links / links.sum(2, keepdim=True).clamp(min=1.0)
        each = each - plain.alignment * (shares * (attention + 1e-6).log()).sum((1, 2))
    if batch.weights is not None:
        # The files give pair n the weight 0.5, 1.5 or 2.5.
        each = each * (0.5 + batch.indices % 3)
    return each.sum()


def loss_of_text(model: Any, batch: TextBatch, plain: Plain, states: list[Any]) -> Tensor:
    """Returns the summed loss of a window of a text; ``states`` holds the state before and after it."""
    if not batch.carries.any():
        states.clear()
    state = states.pop() if states else None
    hidden, state = model(batch.inputs, state, Implementations.everywhere("reference"))
    states.append(tuple(tuple(part.detach() for part in parts) for parts in state))
    total = cross_entropy(model, hidden, batch.targets, plain.smoothing).sum()
    positions = batch.targets.numel()
    total = total + positions * plain.activation * hidden.square().mean()
    return total + positions * plain.temporal * (hidden[:, 1:] - hidden[:, :-1]).square().mean()


def run_by_hand(run: Run, plain: Plain) -> tuple[list[dict[str, Tensor]], list[dict[str, float]]]:
    """Returns the parameters that are saved before the first and after each update, and the metrics of each."""
    trainer = run.trainer()
    batches: Any = trainer.task.batches(run.prepared())
    model: nn.Module = trainer.task.build_model().train()
    model.load_state_dict(trainer.model.state_dict())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.fullmatch(plain.frozen, name) is None)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    algorithm = plain.optimizer(trained)
    states: list[Any] = []
    saved, rows = [{name: value.detach().clone() for name, value in model.named_parameters()}], []
    for rate, weight in zip(plain.rates, plain.weights, strict=True):
        taken = [next(batches) for _ in range(plain.batches)]
        algorithm.zero_grad()
        if isinstance(taken[0], TextBatch):
            losses = [loss_of_text(model, batch, plain, states) for batch in taken]
            targets = [batch.targets for batch in taken]
        else:
            losses = [loss_of_pairs(model, batch, plain) for batch in taken]
            targets = [batch.target_output for batch in taken]
        tokens = sum(int((each != 0).sum()) for each in targets)
        total = torch.stack(losses).sum()
        (total / tokens).backward()
        norm = torch.cat([part.grad.flatten() for part in trained if part.grad is not None]).norm()
        rows.append({"train_loss": total.item() / tokens, "gradient_norm": float(norm)})
        plain.clip(trained)
        factors = [each.shape[1] / plain.jitter if plain.jitter else 1.0 for each in targets]
        algorithm.param_groups[0]["lr"] = rate * sum(factors) / plain.batches
        algorithm.step()
        rows[-1] |= {"learning_rate": rate, "target_tokens": tokens + sum(row.get("new", 0) for row in rows)}
        rows[-1]["new"] = tokens
        now = {name: value.detach().clone() for name, value in model.named_parameters()}
        saved.append({name: torch.lerp(saved[-1][name], value, weight) for name, value in now.items()})
    return saved, rows


def check(run: Run, plain: Plain) -> None:
    expected, rows = run_by_hand(run, plain)
    run.train()
    start = expected[0]
    checkpoints = zip(expected[1:], rows, metrics(run.folder), strict=True)
    for number, (values, row, found) in enumerate(checkpoints, 1):
        parameters, _ = read_tensors(run.folder.parameters(number))
        assert parameters.keys() == values.keys()
        for name, value in values.items():
            wanted, taken = value - start[name], parameters[name] - start[name]
            bound = plain.tolerance * wanted.abs().max() + number * plain.spacing * value.abs() + 1e-6
            assert bool(((wanted - taken).abs() <= bound).all()), (number, name)
            assert bool(wanted.any()) == (re.fullmatch(plain.frozen, name) is None), name
        del row["new"]
        assert {key: found[key] for key in row} == pytest.approx(row, rel=10 * plain.tolerance), number


@pytest.mark.parametrize(
    ("name", "few"), [*((name, None) for name in TRANSLATION), *((name, 0) for name in SPARSE)]
)
def test_updates_of_translation(
    folder: Path,
    tmp_path: Path,
    use_rows: UseRows,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    few: int | None,
) -> None:
    use_rows(3)
    if few is not None:
        monkeypatch.setattr(layers, "_FEW", few)
    row, plain = TRANSLATION[name]
    text = "-".join(re.findall(r"data\.(\w+)", row))
    none = ("model.dropout=0.0", "training.decode_and_evaluate=0", f"data.prepared={folder}/prepared-{text}")
    check(Run(folder, tmp_path / "run", (*COMMON, *none, *overrides(row))), plain)


@pytest.mark.parametrize("name", LANGUAGE_MODEL)
def test_updates_of_language_models(folder: Path, tmp_path: Path, name: str) -> None:
    row, plain = LANGUAGE_MODEL[name]
    none = ("model.dropout=0.0", "model.embedding=8")
    check(TextRun(folder / "text", tmp_path / "run", (*COMMON, *none, *overrides(row))), plain)


def test_every_option_is_in_the_table() -> None:
    rows = [row for row, _ in (*TRANSLATION.values(), *LANGUAGE_MODEL.values())]
    parts = [*COMMON, *(part for row in rows for part in overrides(row))]
    keys = {re.split("[.=]", part)[1] for part in parts if part.startswith("training.")}
    assert keys | NO_UPDATE == set(Training.model_fields)
    assert NO_UPDATE & keys <= {"max_updates", "checkpoint_interval", "keep_last_params", "seed"}
