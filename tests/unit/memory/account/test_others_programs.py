"""Predictions of programs by others leave all that they can reach as it was; each where its library is installed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from econmt import memory

Program = tuple[Callable[[], object], nn.Module, torch.optim.Optimizer]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
}


def trained(model: nn.Module, loss: Callable[[], Tensor], *after: Callable[[], object]) -> Program:
    """A step with clipping and a schedule, which keeps its losses."""
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    losses: list[float] = []
    running = 0.0

    def step() -> None:
        nonlocal running
        optimizer.zero_grad()
        found = loss()
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(found.item())
        running = 0.9 * running + 0.1 * found.detach()  # type: ignore[assignment]
        for each in after:
            each()

    return step, model, optimizer


def of_transformers(kind: str, config: str, lora: bool = False, **settings: Any) -> Program:
    library = import_module("transformers")
    model = getattr(library, kind)(getattr(library, config)(**settings)).train()
    ids = torch.randint(0, 99, (2, 16))
    if lora:
        peft = import_module("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    elif kind.startswith("GPT"):
        model.gradient_checkpointing_enable()
    return trained(model, lambda: model(input_ids=ids, labels=ids).loss)


def trainer(folder: str) -> Program:
    library = import_module("transformers")
    model = library.BertForMaskedLM(library.BertConfig(**SMALL))
    runner = library.Trainer(model, library.TrainingArguments(folder, report_to=[], use_cpu=True))
    optimizer = runner.create_optimizer()
    ids = torch.randint(0, 99, (2, 16))

    def step() -> None:
        runner.training_step(model, {"input_ids": ids, "labels": ids})
        optimizer.step()
        model.zero_grad()

    return step, model, optimizer


def accelerated() -> Program:
    accelerator = import_module("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters()))
    inputs = torch.randn(4, 8)

    def step() -> None:
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).square().mean())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step, model, optimizer.optimizer


def of_timm() -> Program:
    timm, loss = import_module("timm"), import_module("timm.loss").SoftTargetCrossEntropy()
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=4)
    averaged = import_module("timm.utils").ModelEmaV3(model)
    mixup = import_module("timm.data").Mixup(num_classes=4)  # draws from NumPy's random state
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 3])

    def mixed() -> Tensor:
        inputs, targets = mixup(images.clone(), labels)
        result: Tensor = loss(model(inputs), targets)
        return result

    return trained(model, mixed, lambda: averaged.update(model))


def of_torchvision(name: str, **settings: Any) -> Program:
    model = import_module("torchvision.models").get_model(name, num_classes=4, weights=None, **settings)
    images, labels = torch.randn(2, 3, 64, 64), torch.tensor([0, 3])

    def loss() -> Tensor:
        outputs = model(images)
        return nn.functional.cross_entropy(
            outputs["out"].mean((2, 3)) if isinstance(outputs, dict) else outputs, labels
        )

    return trained(model, loss)


def of_diffusers() -> Program:
    diffusers, utils = import_module("diffusers"), import_module("diffusers.training_utils")
    widths = {"block_out_channels": (32, 32), "layers_per_block": 1, "norm_num_groups": 8}
    blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = diffusers.UNet2DModel(sample_size=16, **widths, **blocks)
    noises, averaged = diffusers.DDPMScheduler(), utils.EMAModel(model.parameters())
    images = torch.randn(2, 3, 16, 16)

    def loss() -> Tensor:
        noise, times = torch.randn_like(images), torch.randint(0, 1000, (2,))
        return nn.functional.mse_loss(model(noises.add_noise(images, noise, times), times).sample, noise)

    return trained(model, loss, lambda: averaged.step(model.parameters()))


PROGRAMS: dict[str, Callable[..., Program]] = {
    "transformers BERT": lambda _: of_transformers("BertForMaskedLM", "BertConfig", **SMALL),
    "transformers GPT-2": lambda _: of_transformers(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=99, n_embd=32, n_layer=2, n_head=2
    ),
    "transformers T5": lambda _: of_transformers(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
    ),
    "peft LoRA": lambda _: of_transformers("LlamaForCausalLM", "LlamaConfig", True, **SMALL),
    "transformers Trainer": trainer,
    "accelerate": lambda _: accelerated(),
    "timm ViT": lambda _: of_timm(),
    "torchvision ResNet": lambda _: of_torchvision("resnet18"),
    "torchvision EfficientNet": lambda _: of_torchvision("efficientnet_b0"),
    "torchvision segmentation": lambda _: of_torchvision("lraspp_mobilenet_v3_large", weights_backbone=None),
    "diffusers U-Net": lambda _: of_diffusers(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_prediction_changes_nothing(name: str, tmp_path: Any) -> None:
    pytest.importorskip(name.split()[0])
    step, model, optimizer = PROGRAMS[name](str(tmp_path))
    assert memory.predict(step, model, optimizer, device="cpu").peak_bytes > 0
    step()
