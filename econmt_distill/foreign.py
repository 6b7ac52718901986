"""Teachers of other toolkits: translation models of Hugging Face's transformers and of CTranslate2.

The packages are those of the extra ``distill``, imported when such a teacher is opened. Nothing in a model's folder is
executed: parameters are read from safetensors files, and code of the folder is not trusted.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch

from econmt.api import EconmtError, InputError, resolve_device
from econmt.api.translation import batches_by_length
from econmt_distill.teachers import DEFAULT_BEAM, GPU_BATCH, Done, TeacherChoice

LONGEST = 500
"""Largest number of tokens on a side, below the 512 positions of most models; longer lines are not translated."""
_CPU_BATCH = 32
_BATCH_TOKENS = 64
"""Padded source tokens of a batch, by sentence of the batch size."""
_GROUP = 1024
"""Lines that CTranslate2 gets at a time."""
_EOS = "</s>"


def _import(name: str, choice: TeacherChoice) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(
            f"{choice.folder}: a model of {name}, which is not installed; run pip install 'econmt[distill]'"
        ) from None


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _target_length(source: int, most: int = LONGEST) -> int:
    """Returns the maximum number of target tokens for a source length, as in econmt's searches, at most ``most``."""
    return min(2 * source + 10, most)


def _one_line(text: str) -> str:
    """Returns a text with single spaces; byte pieces of a model may have spelled line ends and NUL characters."""
    return " ".join(text.replace("\0", " ").split())


class _Tokenizer:
    """Tokenizer of transformers, with the language codes of a multilingual model."""

    def __init__(self, choice: TeacherChoice) -> None:
        transformers = _import("transformers", choice)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        warnings.filterwarnings(
            "ignore", module="transformers"
        )  # advice about packages that normalise punctuation
        try:
            self.inner = transformers.AutoTokenizer.from_pretrained(
                str(choice.folder), trust_remote_code=False, local_files_only=True
            )
        except (OSError, ValueError, ImportError, KeyError) as error:
            raise InputError(f"{choice.folder}: its tokenizer cannot be loaded: {_reason(error)}") from None
        self.start: int | None = None
        if choice.codes is not None:
            source, target = choice.codes
            for code in choice.codes:
                self._token(code, choice)
            self.inner.src_lang = source
            self.start = self._token(target, choice)

    def _token(self, code: str, choice: TeacherChoice) -> int:
        """Returns the token of a language."""
        names = getattr(self.inner, "lang_code_to_token", None) or {}
        token: int | None = self.inner.convert_tokens_to_ids(names.get(code, code))
        if token is None or token == self.inner.unk_token_id:
            raise InputError(f"--codes {code}: not a language in the vocabulary of {choice.folder}")
        return token

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each line, special tokens included."""
        ids: list[list[int]] = self.inner(list(lines))["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids."""
        return _one_line(str(self.inner.decode(list(ids), skip_special_tokens=True)))


class TransformersTeacher:
    """Sequence-to-sequence model of transformers, such as Opus-MT, NLLB or M2M-100."""

    def __init__(self, choice: TeacherChoice) -> None:
        transformers = _import("transformers", choice)
        self._tokenizer = _Tokenizer(choice)
        self._device = resolve_device(choice.device)
        if choice.precision == "int8":
            raise InputError(f"--precision int8: {choice.folder} needs float32, bfloat16 or float16")
        automatic = "bfloat16" if self._device.type == "cuda" else "float32"
        dtype = getattr(torch, automatic if choice.precision == "auto" else choice.precision)
        if choice.threads is not None:
            torch.set_num_threads(choice.threads)
        try:
            model = transformers.AutoModelForSeq2SeqLM.from_pretrained(
                str(choice.folder),
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
            )
        except (OSError, ValueError, ImportError, KeyError, RuntimeError) as error:
            raise InputError(
                f"{choice.folder}: the model cannot be loaded from safetensors: {_reason(error)}"
            ) from None
        self._model = model.to(self._device).eval()
        # One position for the token that a translation begins with.
        self._longest = min(LONGEST, getattr(model.config, "max_position_embeddings", None) or LONGEST) - 1
        self._batch = choice.batch_size or (GPU_BATCH if self._device.type == "cuda" else _CPU_BATCH)
        self._nbest = choice.nbest_size
        self._search: dict[str, Any] = {"do_sample": False, "num_return_sequences": choice.nbest_size}
        if choice.beam_size is not None:
            self._search["num_beams"] = choice.beam_size
        if self._tokenizer.start is not None:
            self._search["forced_bos_token_id"] = self._tokenizer.start

    def translate(self, lines: Sequence[str], where: str, first: int, done: Done) -> list[list[str]]:  # noqa: ARG002
        """Translates lines; see :class:`~econmt_distill.teachers.Teacher`."""
        ids = self._tokenizer.encode(lines)
        found = [[""]] * len(lines)
        filled = [i for i, line in enumerate(lines) if line.strip() and len(ids[i]) <= self._longest]
        done(len(lines) - len(filled))
        batches = batches_by_length([len(ids[i]) for i in filled], self._batch, self._batch * _BATCH_TOKENS)
        for batch in batches:
            chosen = [filled[position] for position in batch]
            for index, texts in zip(chosen, self._search_batch([ids[i] for i in chosen]), strict=True):
                found[index] = texts
            done(len(batch))
        return found

    @torch.inference_mode()
    def _search_batch(self, rows: Sequence[list[int]]) -> Iterator[list[str]]:
        padded = self._tokenizer.inner.pad({"input_ids": list(rows)}, return_tensors="pt").to(self._device)
        most = _target_length(max(map(len, rows)), self._longest)
        # Models with a maximum of their own would warn of both.
        output = self._model.generate(**padded, **self._search, max_new_tokens=most, max_length=None).tolist()
        texts = [self._tokenizer.decode(row) for row in output]
        for row in range(len(rows)):
            yield texts[row * self._nbest : (row + 1) * self._nbest]


class CTranslate2Teacher:
    """Translation model of CTranslate2.

    Its folder also has a tokenizer of transformers (``tokenizer_config.json`` with its files) or SentencePiece models:
    ``source.spm`` and ``target.spm``, or one for both.
    """

    def __init__(self, choice: TeacherChoice) -> None:
        package = _import("ctranslate2", choice)
        assert choice.folder is not None
        device = resolve_device(choice.device)
        try:
            self._translator = package.Translator(
                str(choice.folder),
                device=device.type,
                device_index=device.index or 0,
                compute_type=choice.precision,
                inter_threads=1,
                intra_threads=choice.threads or 0,
            )
        except (RuntimeError, ValueError) as error:
            raise InputError(f"{choice.folder}: the model cannot be loaded: {_reason(error)}") from None
        self._prefix: list[str] = []
        self._encode, self._decode = self._codec(choice, choice.folder)
        batch = choice.batch_size or (GPU_BATCH if device.type == "cuda" else _CPU_BATCH)
        self._search = {
            "beam_size": choice.beam_size or DEFAULT_BEAM,
            "num_hypotheses": choice.nbest_size,
            "max_batch_size": batch * _BATCH_TOKENS,
            "batch_type": "tokens",
        }

    def _codec(
        self, choice: TeacherChoice, folder: Path
    ) -> tuple[Callable[[Sequence[str]], list[list[str]]], Callable[[list[str]], str]]:
        """Returns functions from lines to tokens, and from tokens to text."""
        if any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
            tokenizer = _Tokenizer(choice)
            inner = tokenizer.inner
            if tokenizer.start is not None:
                self._prefix = [inner.convert_ids_to_tokens(tokenizer.start)]

            def encode(lines: Sequence[str]) -> list[list[str]]:
                return [inner.convert_ids_to_tokens(ids) for ids in tokenizer.encode(lines)]

            return encode, lambda tokens: tokenizer.decode(inner.convert_tokens_to_ids(tokens))
        if choice.codes is not None:
            raise InputError(
                f"--codes needs a tokenizer of transformers in {folder}: convert the model with --copy_files "
                "tokenizer_config.json and the files that it names"
            )
        source, target = (
            sentencepiece.SentencePieceProcessor(model_file=str(path))
            for path in _sentencepiece_models(folder)
        )
        ends = [_EOS] if _needs_end(folder) else []
        return (
            lambda lines: [[*source.encode(line, out_type=str), *ends] for line in lines],
            lambda tokens: _one_line(str(target.decode(tokens))),
        )

    def translate(self, lines: Sequence[str], where: str, first: int, done: Done) -> list[list[str]]:
        """Translates lines; see :class:`~econmt_distill.teachers.Teacher`."""
        tokens = self._encode(lines)
        found = [[""]] * len(lines)
        filled = [i for i, line in enumerate(lines) if line.strip() and len(tokens[i]) <= LONGEST]
        done(len(lines) - len(filled))
        filled.sort(key=lambda index: -len(tokens[index]))
        for begin in range(0, len(filled), _GROUP):
            group = filled[begin : begin + _GROUP]
            try:
                results = self._translator.translate_batch(
                    [tokens[index] for index in group],
                    target_prefix=[self._prefix] * len(group) if self._prefix else None,
                    max_decoding_length=_target_length(len(tokens[group[0]])),
                    **self._search,
                )
            except RuntimeError as error:
                raise EconmtError(
                    f"{where}:{first + group[0]}: CTranslate2 cannot translate it: {_reason(error)}"
                ) from None
            skipped = len(self._prefix)
            for index, result in zip(group, results, strict=True):
                found[index] = [self._decode(hypothesis[skipped:]) for hypothesis in result.hypotheses]
            done(len(group))
        return found


def _sentencepiece_models(folder: Path) -> tuple[Path, Path]:
    """Returns the models of source and target in a folder of CTranslate2."""
    source, target = folder / "source.spm", folder / "target.spm"
    if source.is_file() and target.is_file():
        return source, target
    models = [path for path in sorted(folder.iterdir()) if path.suffix in (".spm", ".model")]
    if len(models) != 1:
        raise InputError(
            f"{folder}: holds no tokenizer; put tokenizer_config.json with its files there, or SentencePiece models: "
            "source.spm and target.spm, or one for both languages"
        )
    return models[0], models[0]


def _needs_end(folder: Path) -> bool:
    """Returns True if the end of a source has to be written: for models converted from transformers' Marian and BART.

    Those begin translations with the end-of-sentence token; models that CTranslate2 ends itself say so.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return not config.get("add_source_eos") and config.get("decoder_start_token") == _EOS
