"""``econmt extract``: lists the parameters of a model, or writes them to a file."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from econmt.checkpoint.checkpoints import parameter_file
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.tensor_files import read_tensors
from econmt.data.files import whole_file
from econmt.errors import InputError, printable
from econmt.options.option_groups import argument, option
from econmt.options.shared_options import CheckpointOption, ModelOption


def extract(
    model: ModelOption,
    names: list[str] | None = argument(
        None, help="Regular expressions that match whole parameter names; without any, all parameters."
    ),
    output: Path | None = option(None, "--output", "-o", help="File to write, .npz or .safetensors."),
    checkpoint: CheckpointOption = "best",
) -> None:
    """Write parameters of a model to a file for numpy or for any program that reads safetensors.

    Without --output, list their names, shapes and types. In .npz files bfloat16, which numpy lacks, becomes float32.

    \b
    Example:
      econmt extract -m runs/multi30k 'encoder\\..*' -o encoder.npz
    """
    path = parameter_file(ModelFolder(model), checkpoint)
    tensors, _ = read_tensors(path)
    chosen: dict[str, torch.Tensor] = {}
    for pattern in names or [".*"]:
        try:
            matching = {name: value for name, value in tensors.items() if re.fullmatch(pattern, name)}
        except re.error as error:
            raise InputError(f"name '{pattern}': no regular expression ({error})") from None
        if not matching:
            raise InputError(
                f"{path}: no parameter matches '{pattern}'; there are {', '.join(sorted(tensors))}"
            )
        chosen |= matching
    if output is None:
        for name in sorted(chosen):
            shape = " x ".join(map(str, chosen[name].shape))
            print(f"{printable(name)}\t{shape}\t{str(chosen[name].dtype).removeprefix('torch.')}")
        return
    if output.suffix == ".npz":
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {
            name: (part.float() if part.dtype == torch.bfloat16 else part).numpy()
            for name, part in chosen.items()
        }
        np.savez(buffer, **arrays)
        content = buffer.getvalue()
    elif output.suffix == ".safetensors":
        content = save({name: part.contiguous() for name, part in chosen.items()})
    else:
        raise InputError(f"--output {output}: unknown suffix; give .npz or .safetensors")
    with whole_file(output) as file:
        file.write(content)
    print(printable(output))
