"""Exports models to folders or single files for ``econmt_runtime``, which translates without PyTorch.

``model.json`` describes the model, its search, and the checksums of all files. ``arrays.safetensors`` holds the weights
in the layout of the search's products, named after the parts of :class:`econmt_runtime.model.RuntimeModel`. The
vocabulary, the runtime's modules and the C library are included, so that ``python FOLDER`` translates. A single file is
a zip file of such a folder. For the web a page takes the place of the modules.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from econmt.checkpoint.checkpoints import load_model
from econmt.checkpoint.tensor_files import CHECKSUM, FORMAT, STEPS, read_metadata, write_tensors, write_text
from econmt.config.conditions import RUNTIME, settings_text
from econmt.config.recipe import Recipe
from econmt.config.yaml_reader import leaves
from econmt.data.files import whole_file, writing
from econmt.data.text.subwords import fingerprint, vocabulary_files
from econmt.errors import InputError
from econmt.export.lexicon import read_lexicon
from econmt.export.model_folder import check_new, new_folder
from econmt.model.inference.layout import dense
from econmt.model.inference.weights import COVERAGES, Affine, DecoderParts, split_weights
from econmt.model.layers import weights_of
from econmt.model.translation import TranslationModel
from econmt_ops.backends import c as native
from econmt_ops.backends.c import platforms
from econmt_ops.core.int8 import in_groups, rounded

RUNTIME_FORMAT = "econmt-runtime-4"
FILE_SUFFIX, PAGE_SUFFIX = ".pyz", ".html"
"""Ends of the names of destinations that become one file, for Python and for the web."""
SHORT_IDS = 1 << 15
"""Largest target vocabulary whose ids the lexicon has in 16 bits."""
_LARGEST_FILE = 1 << 30
"""Largest number of bytes that one file holds, equal to econmt_runtime.files.LARGEST."""
_INTERPRETER = b"#!/usr/bin/env python3\n"
_LAUNCHER = "launcher.py"
_NO_MODULES = "MODULES: dict[str, str] = {}"


def export_runtime(
    folder: Path,
    destination: Path,
    precision: str | None = None,
    lexicon: Path | None = None,
    top: int | None = None,
    *,
    web: bool = False,
    systems: Sequence[str] = (),
) -> Path:
    """Writes a folder that translates without PyTorch, or one file.

    Args:
        folder: Model folder.
        destination: Folder to create; a file that does the same if its name ends in ``.pyz``, for the web ``.html``.
        precision: float32 or int8; None: int8 if the model's matrices are 8-bit, else float32.
        lexicon: File written by ``econmt lexicon``, or None.
        top: Number of words to keep of each lexicon entry; None: all.
        web: True for a page that translates in the browser, False for Python.
        systems: Names of `platforms.PLATFORMS` whose libraries zig compiles, in place of this machine's library.

    Returns:
        The destination.

    Raises:
        InputError: The runtime does not support the model, or a file cannot be read or written.
    """
    folder, destination = Path(folder), Path(destination)
    loaded = load_model(folder)
    check_supported(loaded.recipe, folder)
    files = vocabulary_files(folder)
    if web and files[0].suffix != ".model":
        raise InputError(f"{folder}: its vocabulary is a list of words; --web needs SentencePiece subwords")
    one_file = destination.suffix == (PAGE_SUFFIX if web else FILE_SUFFIX)
    if one_file and destination.exists():
        raise InputError(f"{destination}: exists already; use a new name")
    check_new(destination)
    if unknown := [name for name in systems if name not in platforms.PLATFORMS]:
        raise InputError(f"--platforms {unknown[0]}: none of {', '.join(platforms.PLATFORMS)}")
    library = None if web or systems else _library()
    parts = DecoderParts.of(loaded.model)
    tensors = _tensors(loaded.model, parts)
    inputs = {name: tensor.shape[1] for name, tensor in tensors.items() if name.endswith(".weight")}
    if (precision or loaded.stored or "float32") == "int8":
        tensors = _to_int8(tensors)
    if lexicon is not None:
        table = read_lexicon(lexicon, fingerprint(folder), loaded.vocabularies)
        kind = torch.int16 if loaded.vocabularies.target.size <= SHORT_IDS else torch.int32
        tensors["lexicon"] = table[:, :top].to(kind)
    config = _config(loaded.model, loaded.recipe, [path.name for path in files], parts.sizes)
    config["joint"] = loaded.vocabularies.source is loaded.vocabularies.target
    if web:
        config |= {"inputs": inputs, "languages": [loaded.recipe.pairs.source, loaded.recipe.pairs.target]}
        config |= {"targets": list(tags)} if (tags := loaded.vocabularies.target_tags) else {}
    with (_new_file if one_file else new_folder)(folder, destination) as temporary:
        arrays = temporary / "arrays.safetensors"
        write_tensors(arrays, tensors, {"format": FORMAT})
        if web:
            shutil.copytree(_runtime() / "web", temporary, dirs_exist_ok=True)
        else:
            _copy_runtime(temporary, library, systems)
        config["arrays"] = read_metadata(arrays)[CHECKSUM]
        rest = (path for path in temporary.rglob("*") if path.is_file() and (web or path != arrays))
        config["files"] = _checksums(temporary, rest)
        write_text(temporary / "model.json", json.dumps(_signed(config), indent=1) + "\n")
    return destination


def _copy_runtime(folder: Path, library: Path | None, systems: Sequence[str]) -> None:
    """Adds the modules and C libraries, and a launcher with the modules' checksums, which Python runs."""
    package = folder / "econmt_runtime"
    package.mkdir()
    for module in sorted(_runtime().glob("*.py")):
        if module.name != _LAUNCHER:
            shutil.copyfile(module, package / module.name)
    launcher = (_runtime() / _LAUNCHER).read_text(encoding="utf-8")
    assert _NO_MODULES in launcher
    modules = f"MODULES: dict[str, str] = {json.dumps(_checksums(package, package.iterdir()), indent=4)}"
    write_text(folder / "__main__.py", launcher.replace(_NO_MODULES, modules))
    # The library has no part of Python, so that the folder serves every version: its name has none either.
    if library is not None:
        shutil.copyfile(library, package / f"_kernels.{platforms.HERE}.so")
    try:
        for name in systems:
            platforms.compile_library(package, name)
    except OSError as error:
        raise InputError(f"--platforms needs zig: pip install ziglang==0.17.1 ({error})") from error


@contextmanager
def _new_file(source: Path, output: Path) -> Iterator[Path]:
    """Creates a file ``output``, which must be new, of a folder that the block fills; see :func:`new_folder`."""
    with writing(output), tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "runtime"
        with new_folder(source, folder) as temporary:
            yield temporary
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        size = sum(path.stat().st_size for path in files)
        if size > _LARGEST_FILE:
            raise InputError(
                f"{output}: {size:,} bytes, more than the {_LARGEST_FILE:,} of one file; export to a folder, "
                f"whose name does not end in {output.suffix}"
            )
        output.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(output) as stream:
            (_write_page if output.suffix == PAGE_SUFFIX else _write_archive)(stream, folder, files)


def _write_archive(stream: IO[bytes], folder: Path, files: Sequence[Path]) -> None:
    """Writes a zip file of a folder, which Python runs."""
    stream.write(_INTERPRETER)
    with zipfile.ZipFile(stream, "w") as archive:
        for path in files:
            # Always of 1980, so that the same model gives the same bytes.
            member = zipfile.ZipInfo(path.relative_to(folder).as_posix())
            member.external_attr = 0o644 << 16
            archive.writestr(member, path.read_bytes(), zipfile.ZIP_DEFLATED, 9)
    mode = Path(stream.name).stat().st_mode
    Path(stream.name).chmod(mode | (mode & 0o444) >> 2)  # whoever may read it may run it


def _write_page(stream: IO[bytes], folder: Path, files: Sequence[Path]) -> None:
    """Writes the page of a folder with all other files in it."""
    page = (folder / "index.html").read_text(encoding="utf-8")
    held = [
        f'<script type="text/plain" data-file="{path.name}">{base64.b64encode(path.read_bytes()).decode()}</script>'
        for path in files
    ]
    held.append(f'<script type="module">{(folder / "page.js").read_text(encoding="utf-8")}</script>')
    page = page.replace("connect-src 'self'; ", "").replace("'self'", "'unsafe-inline' blob:")
    stream.write(page.replace('<script type="module" src="page.js"></script>', "\n".join(held)).encode())


def _checksums(folder: Path, paths: Iterable[Path]) -> dict[str, str]:
    names = {path.relative_to(folder).as_posix(): path for path in sorted(paths)}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in names.items()}


def _signed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the checksum that econmt_runtime.checks verifies."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return {**config, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def _runtime() -> Path:
    """Returns the folder of the runtime's modules."""
    return Path(str(importlib.resources.files("econmt_runtime")))


def _library() -> Path:
    path = native.library_path()
    if path is None or not native.is_built():
        raise InputError(
            "econmt was installed without its C library, which the runtime needs; install gcc or set CC, then install "
            "econmt again"
        )
    return path


def check_supported(recipe: Recipe, folder: Path) -> None:
    """Checks that the runtime supports the model and the search of a recipe.

    Args:
        recipe: Recipe of a translation model. folder: Its model folder, which errors name.

    Raises:
        InputError: The runtime does not support a part of it.
    """
    values = dict(leaves(recipe))
    for condition in RUNTIME:
        if not condition.holds(values):
            raise InputError(
                f"{folder}: the runtime does not support {settings_text(condition, values)}; it needs {condition.text}"
            )


@torch.no_grad()
def _tensors(model: TranslationModel, parts: DecoderParts) -> dict[str, Tensor]:
    """Returns the weights under the runtime's names, in float32."""
    encoder, decoder, key = model.encoder, model.decoder, model.decoder.attention.key
    tensors: dict[str, Tensor | None] = {**parts.vectors, "source.weight": model.source_embedding.weight}
    if model.target_embedding.weight is not model.source_embedding.weight:
        tensors["target.weight"] = model.target_embedding.weight
    products: dict[str, Affine | None] = {**parts.products, **parts.sources}
    ahead = weights_of(encoder.forward_layers) + weights_of(encoder.upper_layers)
    layers = {f"{number}.0": weights for number, weights in enumerate(ahead)}
    layers |= {f"{number}.1": weights for number, weights in enumerate(weights_of(encoder.backward_layers))}
    for name, weights in layers.items():
        split = split_weights(encoder.cell.cell, weights)
        products[f"encoder.{name}.read"] = dense(split.input), split.read_bias
        if split.hidden is not None:
            products[f"encoder.{name}.recur"] = dense(split.hidden), split.recurrent_bias
        if split.extra:
            tensors[f"encoder.{name}.vectors"] = torch.cat(split.extra)
    if key is not None:
        products["keys"] = key.weight, key.bias
    if decoder.start is not None:
        products["start"] = decoder.start.weight, decoder.start.bias
        tensors |= {"start.gain": decoder.start_gain, "start.shift": decoder.start_shift}
    del products["output"]  # it may be the matrix of the target's embeddings
    if model.output.weight is not model.target_embedding.weight:
        tensors["output.weight"] = model.output.weight
    tensors["output.bias"] = model.output.bias
    for name, product in products.items():
        if product is not None:
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = product
    return {name: part.detach().float().contiguous() for name, part in tensors.items() if part is not None}


def _to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Converts weight matrices to 8 bits with a scale for each row; other tensors are unchanged.

    Matrices looked up by word keep their row layout; others are arranged in the groups that the C library reads.
    """
    quantized: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight")
        if part == name:
            quantized[name] = tensor
            continue
        quantized[name], quantized[part + STEPS] = rounded(tensor)
        if part not in ("source", "target", "output"):
            quantized[name], quantized[f"{part}.sums"] = in_groups(quantized[name])
    return quantized


def _config(
    model: TranslationModel, recipe: Recipe, files: Sequence[str], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the content of ``model.json``, without checksums; ``sizes``: those of the decoder."""
    encoder, decoder = model.encoder, model.decoder.config
    return {
        "format": RUNTIME_FORMAT,
        "name": recipe.name,
        "vocabulary_files": list(files),
        "one_table": model.target_embedding.weight is model.source_embedding.weight,
        "tied_output": model.output.weight is model.target_embedding.weight,
        "encoder": {
            "cell": encoder.config.cell,
            "directions": [2] * len(encoder.forward_layers) + [1] * len(encoder.upper_layers),
            "residual": encoder.config.residual,
            "reverse_input": encoder.config.reverse_input,
        },
        "decoder": {
            **{name: sizes[name] for name in ("layers", "size", "fed", "residual", "asked", "width")},
            "cell": decoder.cell,
            "coverage": COVERAGES[sizes["coverage"]],
            "average": decoder.state_init == "avg",
            "scale": model.decoder.attention.scale,
        },
        "decoding": {
            name: getattr(recipe.decoding, name)
            for name in ("beam_size", "length_penalty_alpha", "length_penalty_beta", "max_output_factor")
        },
        "max_length": recipe.pairs.max_length,
        "max_input_length": recipe.decoding.max_input_length,
    }
