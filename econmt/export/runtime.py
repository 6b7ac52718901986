"""Folders for ``econmt_runtime``, which translates without PyTorch.

``model.json`` has the shape of the model, how to search and the checksums of all files, ``arrays.safetensors`` its
weights as a search multiplies with them, under the names of the parts of :class:`econmt_runtime.model.RuntimeModel`;
beside them lie the vocabulary, the runtime's modules and the C library, so that ``python FOLDER`` translates.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from econmt.checkpoint.checkpoints import load_model
from econmt.checkpoint.lexicons import read_lexicon
from econmt.checkpoint.quantized import STEPS
from econmt.checkpoint.tensor_files import CHECKSUM, FORMAT, read_metadata, write_tensors, write_text
from econmt.config.recipe import Recipe
from econmt.config.unfused import decoder_steps, encoder_steps
from econmt.data.files import whole_folder, writing
from econmt.data.text.subwords import fingerprint, vocabulary_files
from econmt.decoding.search.options import SearchOptions
from econmt.errors import InputError
from econmt.export.model_folder import check_new
from econmt.model.inference.weights import SearchWeights
from econmt.model.layers import weights_of
from econmt.model.translation import TranslationModel
from econmt_ops.backends import c as native
from econmt_ops.core.int8 import in_groups, rounded
from econmt_ops.core.weights import LowRank

RUNTIME_FORMAT = "econmt-runtime-2"
_ENCODERS, _DECODERS = ("lstm", "gru", "ssru"), ("lstm", "ssru")
_BEAM = 64
"""Largest beam, as econmt_runtime.library.MOST_WORDS."""
_LAUNCHER = "launcher.py"
_NO_MODULES = "MODULES: dict[str, str] = {}"


def export_runtime(
    folder: Path,
    destination: Path,
    precision: str | None = None,
    lexicon: Path | None = None,
    top: int | None = None,
) -> Path:
    """Writes a folder that translates without PyTorch.

    Args:
        folder: a model folder. destination: the folder to make.
        precision: float32 or int8; None: int8 if the model's matrices are.
        lexicon: a file of ``econmt lexicon``, or None. top: words that are kept of each of its; None: all.

    Returns:
        The destination.

    Raises:
        InputError: the runtime does not know such a model, or a file cannot be read or written.
    """
    loaded = load_model(folder)
    _check(loaded.recipe, folder)
    check_new(destination)
    library = _library()
    tensors = _tensors(loaded.model)
    if (precision or loaded.stored or "float32") == "int8":
        tensors = _in_8_bits(tensors)
    if lexicon is not None:
        table = read_lexicon(lexicon, fingerprint(folder), loaded.vocabularies)
        tensors["lexicon"] = table[:, :top].contiguous()
    files = vocabulary_files(folder)
    config = _config(loaded.model, loaded.recipe, [path.name for path in files])
    config["joint"] = loaded.vocabularies.source is loaded.vocabularies.target
    with writing(destination), whole_folder(destination) as place:
        for path in files:
            shutil.copyfile(path, place / path.name)
        write_tensors(place / "arrays.safetensors", tensors, {"format": FORMAT})
        package = place / "econmt_runtime"
        package.mkdir()
        for module in sorted(_runtime().glob("*.py")):
            if module.name != _LAUNCHER:
                shutil.copyfile(module, package / module.name)
        write_text(place / "__main__.py", _main_module(package))
        shutil.copyfile(library, package / library.name)
        arrays = place / "arrays.safetensors"
        config["arrays"] = read_metadata(arrays)[CHECKSUM]
        rest = sorted(path for path in place.rglob("*") if path.is_file() and path != arrays)
        config["files"] = {path.relative_to(place).as_posix(): _checksum(path) for path in rest}
        write_text(place / "model.json", json.dumps(_signed(config), indent=1) + "\n")
    return destination


def _main_module(package: Path) -> str:
    """Makes the folder's ``__main__.py``: the launcher with the checksums of the modules in ``package``."""
    launcher = (_runtime() / _LAUNCHER).read_text(encoding="utf-8")
    assert _NO_MODULES in launcher
    checksums = {path.name: _checksum(path) for path in sorted(package.iterdir())}
    return launcher.replace(_NO_MODULES, f"MODULES: dict[str, str] = {json.dumps(checksums, indent=4)}")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _signed(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the checksum that econmt_runtime.checks compares."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return {**config, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()}


def _runtime() -> Path:
    """Finds the folder of the runtime's modules without importing them."""
    found = importlib.util.find_spec("econmt_runtime")
    if found is None or found.origin is None:
        raise InputError("econmt_runtime is not installed beside econmt; install econmt again")
    return Path(found.origin).parent


def _library() -> Path:
    path = native.library_path()
    if path is None or not native.is_built():
        raise InputError(
            "econmt was installed without its C library, which the runtime needs; install gcc or set CC, then install "
            "econmt again"
        )
    return path


def _check(recipe: Recipe, folder: Path) -> None:
    """Raises InputError for models and searches that the runtime does not know."""
    model, decoding = recipe.translation_model, recipe.decoding
    for part, cell, known in (
        ("encoder", model.encoder.cell, _ENCODERS),
        ("decoder", model.decoder.cell, _DECODERS),
    ):
        if cell not in known:
            raise InputError(f"{folder}: the runtime has {part}s of {', '.join(known)}, not of {cell}")
    if model.source_factors_num_embed:
        raise InputError(f"{folder}: reads source factors, which the runtime does not know")
    if stepped := encoder_steps(model) or decoder_steps(model):
        raise InputError(f"{folder}: the runtime does not know its {stepped}")
    if model.decoder.copy_attention:
        raise InputError(f"{folder}: the runtime does not know its decoder.copy_attention")
    if decoding.beam_size > _BEAM:
        raise InputError(
            f"{folder}: its decoding.beam_size is {decoding.beam_size}; the runtime keeps {_BEAM} hypotheses at most"
        )
    if decoding.block_ngram_repeat:
        raise InputError(f"{folder}: its decoding.block_ngram_repeat is none that the runtime knows")
    if SearchOptions.from_recipe(decoding).penalizes or decoding.beam_prune:
        raise InputError(f"{folder}: its search has penalties or is pruned, which the runtime does not know")
    if decoding.beam_search_stop != "all":
        raise InputError(
            f"{folder}: its beam_search_stop is {decoding.beam_search_stop}; the runtime has all alone"
        )
    if model.encoder.bidirectional == "none" and model.encoder.residual:
        raise InputError(f"{folder}: the runtime has residual encoders with a layer of two directions alone")


def _whole(matrix: Any) -> Tensor:
    """A weight, of factors their product."""
    made: Tensor = matrix.left @ matrix.right if isinstance(matrix, LowRank) else matrix
    return made.detach()


def _layer(made: dict[str, Tensor], name: str, cell: str, weights: Any) -> None:
    """Adds the products of a layer: ``read`` of what it reads, ``recur`` of its h."""
    made[f"{name}.read.weight"], made[f"{name}.read.bias"] = _whole(weights.input), weights.bias.detach()
    if cell != "ssru":
        made[f"{name}.recur.weight"] = _whole(weights.hidden)
    if cell == "gru":
        made[f"{name}.recur.bias"] = weights.hidden_bias.detach()


def _tensors(model: TranslationModel) -> dict[str, Tensor]:
    """The weights under the runtime's names, in float32."""
    made: dict[str, Tensor] = {}
    encoder, decoder, attention = model.encoder, model.decoder, model.decoder.attention
    made["source.weight"] = model.source_embedding.weight.detach()
    if model.target_embedding.weight is not model.source_embedding.weight:
        made["target.weight"] = model.target_embedding.weight.detach()
    pairs = [weights_of(encoder.forward_layers), weights_of(encoder.backward_layers)]
    for way, layers in enumerate(pairs):
        for number, weights in enumerate(layers):
            _layer(made, f"encoder.{number}.{way}", encoder.config.cell, weights)
    for number, weights in enumerate(weights_of(encoder.upper_layers), len(pairs[0])):
        _layer(made, f"encoder.{number}.0", encoder.config.cell, weights)
    for number, weights in enumerate(weights_of(decoder.layers)):
        _layer(made, f"decoder.{number}", decoder.config.cell, weights)
    search = SearchWeights.of(decoder, attention.query)
    if search.fed is not None:
        made["decoder.0.read.weight"] = _whole(search.word)
        recurrent = torch.cat([_whole(search.fed), made["decoder.0.recur.weight"]], 1)
        made["decoder.0.recur.weight"] = recurrent
    if attention.key is not None:
        made["attention.key.weight"] = attention.key.weight.detach()
        if attention.key.bias is not None:
            made["attention.key.bias"] = attention.key.bias.detach()
    for name in ("score", "gain", "shift"):
        value = getattr(attention, name)
        if value is not None:
            made[f"attention.{name}"] = value.detach()
    if decoder.start is not None:
        made["start.weight"], made["start.bias"] = decoder.start.weight.detach(), decoder.start.bias.detach()
    made["values.weight"] = search.values
    if search.query is not None:
        made["query.weight"] = search.query
    made["own.weight"], made["own.bias"] = search.own, search.own_bias
    if model.readout is not None:
        made["readout.weight"], made["readout.bias"] = (
            model.readout.weight.detach(),
            model.readout.bias.detach(),
        )
    if model.output_weight is not model.target_embedding.weight:
        made["output.weight"] = model.output_weight.detach()
    made["output.bias"] = model.output_bias.detach()
    return {name: tensor.float().contiguous() for name, tensor in made.items()}


def _in_8_bits(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in 8 bits, with the steps of their rows; everything else as it is.

    Those of single words stay in rows; others are in the groups that the C library reads.
    """
    made: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = name.removesuffix(".weight")
        if part == name:
            made[name] = tensor
            continue
        made[name], made[part + STEPS] = rounded(tensor)
        if part not in ("source", "target", "output"):
            made[name], made[f"{part}.sums"] = in_groups(made[name])
    return made


def _config(model: TranslationModel, recipe: Recipe, files: Sequence[str]) -> dict[str, Any]:
    """Returns the content of ``model.json``."""
    encoder, decoder, attention = model.encoder, model.decoder.config, model.decoder.attention
    return {
        "format": RUNTIME_FORMAT,
        "name": recipe.name,
        "vocabulary_files": list(files),
        "one_table": model.target_embedding.weight is model.source_embedding.weight,
        "tied_output": model.output_weight is model.target_embedding.weight,
        "encoder": {
            "cell": encoder.config.cell,
            "directions": [2] * len(encoder.forward_layers) + [1] * len(encoder.upper_layers),
            "residual": encoder.config.residual,
            "reverse_input": encoder.config.reverse_input,
        },
        "decoder": {
            "cell": decoder.cell,
            "layers": decoder.layers,
            "size": decoder.size,
            "feeding": decoder.input_feeding,
            "residual": decoder.residual,
            "average": decoder.state_init == "avg",
            "asked": SearchWeights.of(model.decoder, attention.query).asked,
        },
        "attention": {"norm": attention.layer_norm is not None, "scale": attention.scale},
        "decoding": {
            name: getattr(recipe.decoding, name)
            for name in ("beam_size", "length_penalty_alpha", "length_penalty_beta", "max_output_factor")
        },
        "max_length": recipe.pairs.max_length,
        "max_input_length": recipe.decoding.max_input_length,
    }
