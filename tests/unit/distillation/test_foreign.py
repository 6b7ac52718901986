"""Teachers of other toolkits, as tiny models with random parameters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ctranslate2
import pytest
import sentencepiece
import torch
import transformers

from econmt.errors import InputError
from econmt_distill.foreign import _needs_end
from econmt_distill.opening import open_teacher
from econmt_distill.teachers import TeacherChoice

LINES = ["a dog runs in the park", "", "two cats", "a man sleeps at home by the sea", "the boy sings"]
BEGINNING = 20
"""Characters of translations that are compared: random models end them by the length limit of their batch."""
TOKENIZER = ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of transformers in the format of Opus-MT."""
    folder = tmp_path_factory.mktemp("foreign") / "marian"
    folder.mkdir()
    text = folder.parent / "text"
    text.write_text("\n".join(LINES * 4))
    for side in ("source", "target"):
        options = {"vocab_size": 40, "minloglevel": 2, "hard_vocab_limit": False}
        sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(folder / side), **options)
        (folder / f"{side}.model").rename(folder / f"{side}.spm")
        (folder / f"{side}.vocab").unlink()
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    words = [pieces.id_to_piece(index) for index in range(3, pieces.get_piece_size())]
    vocabulary = {word: index for index, word in enumerate(["</s>", "<unk>", *words, "<pad>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    files = {"vocab": "vocab.json", "source_spm": "source.spm", "target_spm": "target.spm"}
    paths = {key: str(folder / name) for key, name in files.items()}
    transformers.MarianTokenizer(**paths, source_lang="en", target_lang="de").save_pretrained(folder)
    torch.manual_seed(3)
    layers = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in SIZES.items()}
    end = len(vocabulary) - 1
    ids = {"decoder_start_token_id": end, "pad_token_id": end, "eos_token_id": 0, "forced_eos_token_id": 0}
    sizes = {"vocab_size": len(vocabulary), "d_model": 16, "init_std": 0.6, "max_position_embeddings": 600}
    model = transformers.MarianMTModel(transformers.MarianConfig(**sizes, **ids, **layers))
    model.generation_config.bad_words_ids = [[end]]
    model.save_pretrained(folder)
    return folder


SIZES = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


@pytest.fixture(scope="module")
def converted(marian: Path) -> Path:
    """The same model, converted to CTranslate2."""
    folder = marian.with_name("ct2")
    converter = ctranslate2.converters.TransformersConverter(str(marian), copy_files=list(TOKENIZER))
    converter.convert(str(folder))
    return folder


@pytest.fixture(params=["marian", "converted"])
def either(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def translations(folder: Path, **more: Any) -> list[list[str]]:
    counted: list[int] = []
    teacher = open_teacher(TeacherChoice(folder=folder, device="cpu", threads=1, **more))
    found = teacher.translate(LINES, "text", 1, counted.append)
    assert sum(counted) == len(LINES)
    return found


def test_a_model_of_transformers_translates_in_batches_as_alone(marian: Path) -> None:
    found = translations(marian, batch_size=2, beam_size=1)
    assert found[1] == [""]
    tokenizer = transformers.AutoTokenizer.from_pretrained(marian)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(marian)
    for line, best in zip(LINES, found, strict=True):
        if line:
            ids = tokenizer(line, return_tensors="pt")
            most = 2 * ids["input_ids"].shape[1] + 10
            output = model.generate(**ids, num_beams=1, max_new_tokens=most, max_length=None)
            alone = " ".join(tokenizer.decode(output[0], skip_special_tokens=True).split())
            assert best[0][:BEGINNING] == alone[:BEGINNING]
    assert len({texts[0] for texts in found}) > 2


def test_a_model_of_ctranslate2_translates_the_same(marian: Path, converted: Path) -> None:
    assert TeacherChoice(folder=converted).kind == "ctranslate2"
    both = translations(converted, beam_size=1, precision="float32"), translations(marian, beam_size=1)
    found, expected = ([texts[0][:BEGINNING] for texts in each] for each in both)
    assert found == expected


def test_sentencepiece_models_are_enough_for_ctranslate2(converted: Path, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("tokenizer*", "vocab.json")
    bare = shutil.copytree(converted, tmp_path / "bare", ignore=ignored)
    assert _needs_end(bare)
    both = (translations(folder, beam_size=1, precision="float32") for folder in (bare, converted))
    found, expected = ([[text.replace(" ", "") for text in texts] for texts in each] for each in both)
    assert found == expected
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "add_source_eos": True}))
    assert not _needs_end(bare)
    (bare / "target.spm").unlink()
    (bare / "source.spm").unlink()
    with pytest.raises(InputError, match="bare: holds no tokenizer; put"):
        open_teacher(TeacherChoice(folder=bare, device="cpu"))


def test_several_translations(either: Path) -> None:
    choice = TeacherChoice(folder=either).with_nbest(3)
    assert (choice.beam_size, choice.nbest_size) == (5, 3)
    found, best = (translations(either, beam_size=5, **more) for more in ({"nbest_size": 3}, {}))
    assert [len(texts) for texts in found] == [3, 1, 3, 3, 3]
    assert [texts[0] for texts in found] == [texts[0] for texts in best]


def test_lines_that_are_too_long_get_empty_translations(either: Path) -> None:
    teacher = open_teacher(TeacherChoice(folder=either, device="cpu", threads=1, beam_size=1))
    longest = "dog " * 150
    assert teacher.translate([longest * 2, longest, "dog"], "text", 1, lambda _: None)[0] == [""]


def test_unknown_codes_are_told(marian: Path) -> None:
    with pytest.raises(InputError, match="--codes eng_Latn: not a language in the vocabulary of"):
        open_teacher(TeacherChoice(folder=marian, codes=("eng_Latn", "deu_Latn")))


def test_only_safetensors_are_loaded(marian: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(marian, tmp_path / "pickled")
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="pickled: the model cannot be loaded from safetensors"):
        open_teacher(TeacherChoice(folder=folder, device="cpu"))


def test_code_of_the_folder_is_not_run(marian: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(marian, tmp_path / "code")
    config = json.loads((folder / "config.json").read_text())
    code = {name: f"own.{name}" for name in ("AutoConfig", "AutoModelForSeq2SeqLM")}
    config |= {"model_type": "own", "auto_map": code}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match="code: "):
        open_teacher(TeacherChoice(folder=folder, device="cpu"))
    assert not (tmp_path / "ran").exists()
