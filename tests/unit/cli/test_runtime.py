"""The runtime translates as ``econmt translate`` does, with nothing of PyTorch loaded."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import econmt
import econmt_runtime
from econmt.checkpoint.checkpoints import parameters_metadata
from econmt.checkpoint.tensor_files import FORMAT, read_metadata, write_tensors
from econmt.config.conditions import MOST_RUNTIME_WORDS
from econmt.config.recipe import Model, read_recipe, recipe_text
from econmt.data.text.subwords import fingerprint, load_vocabularies
from econmt.decoding.formats import format_nbest
from econmt.decoding.translation import Translation
from econmt.export.lexicon import write_lexicon
from econmt.export.runtime import _signed, export_runtime
from econmt.tasks.translation import TranslationTask
from econmt_ops.backends.c import library as structures
from econmt_runtime import RuntimeInputError, library
from econmt_runtime.__main__ import _shown, main
from econmt_runtime.arrays import read_arrays
from econmt_runtime.shapes import check_shapes
from econmt_runtime.text import RuntimeWords, normalized, one_line
from econmt_runtime.translator import RuntimeTranslation, RuntimeTranslator
from tests.conftest import econmt_environment
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused
from tests.unit.decoding.test_real_model import COMBINATIONS
from tests.unit.training.tiny import Run

LINES = ["a b c", "h g", "", "d d d e a b c h g f e d c b a", "b", "zzz a"]
VARIANTS: dict[str, dict[str, Any]] = {
    "additive": {},
    "dot": {"attention": {"type": "scaled_dot"}, "decoder": {"size": 8, "state_init": "zero"}},
    "bilinear": {"attention": {"type": "bilinear"}, "decoder": {"size": 9, "state_init": "avg"}},
    "gnmt": {"decoder": {"size": 8, "layers": 3, "input_feeding": False, "residual": True}},
    "reverse": {"encoder": {"size": 8, "layers": 2, "bidirectional": "none", "reverse_input": True}},
    "ranks": {
        "decoder": {"size": 8, "rank": 3},
        "encoder": {"size": 8, "layers": 2, "rank": 2, "bidirectional": "all"},
    },
    "tied": {"weight_tying": "trg_softmax"},
    "student": {
        "encoder": {"cell": "gru", "size": 6, "layers": 3, "residual": True},
        "decoder": {"cell": "ssru", "size": 7, "layers": 2, "input_feeding": False, "residual": True},
        "attention": {"type": "bilinear"},
    },
    "gru-deep": {
        "encoder": {"cell": "gru", "size": 8},
        "decoder": {"cell": "gru", "size": 8, "layers": 2, "residual": True, "state_init": "avg"},
        "attention": {"type": "dot"},
    },
    "gru-gnmt": {"decoder": {"cell": "gru", "size": 8, "layers": 2, "input_feeding": False}},
    "ssru": {
        "encoder": {"cell": "ssru", "size": 6},
        "decoder": {"cell": "ssru", "size": 7, "layers": 1, "input_feeding": False},
    },
    "groundhog": {
        "decoder": {"size": 8, "state_init": "zero"},
        "attention": {"size": 7, "layer_norm": True, "coverage": {"type": "count"}},
        "layer_normalization": True,
    },
    "best": {
        "encoder": {"size": 8, "layers": 4, "residual": True},
        "decoder": {"size": 8, "layers": 4},
        "attention": {"size": 7, "layer_norm": True},
        "layer_normalization": True,
    },
    "normalized": {
        "encoder": {"cell": "lnlstm", "size": 8, "layers": 2},
        "decoder": {"cell": "lnglstm", "size": 8, "layers": 2, "input_feeding": False},
    },
    "normalized-both": {
        "encoder": {"cell": "lnglstm", "size": 8, "layers": 2, "bidirectional": "all"},
        "decoder": {"cell": "lnlstm", "size": 8, "layers": 2, "input_feeding": False, "residual": True},
    },
    **COMBINATIONS,
}


def random_model(
    like: Path, folder: Path, variant: str | dict[str, Any], decoding: dict[str, object] | None = None
) -> Path:
    """A model folder with random parameters and the vocabulary of another."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("params*", "training_state", "prepared"))
    recipe = read_recipe(folder / "recipe.yaml")
    sections = {"embedding": 6, "encoder": {"size": 8}, "decoder": {"size": 8}, "attention": {"size": 8}}
    changes = VARIANTS[variant] if isinstance(variant, str) else variant
    model = Model.model_validate({**sections, **changes})
    changed = recipe.decoding.model_copy(update=decoding or {})
    recipe = recipe.model_copy(update={"model": model, "decoding": changed})
    (folder / "recipe.yaml").write_text(recipe_text(recipe))
    task = TranslationTask(recipe, *(each.size for each in load_vocabularies(folder).sides))
    torch.manual_seed(3)
    made = task.build_model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    metadata = parameters_metadata(task.description(), 1, fingerprint(folder))
    tensors = {name: parameter.detach() for name, parameter in dict(made.named_parameters()).items()}
    write_tensors(folder / "params.best.safetensors", tensors, metadata)
    return folder


def two_targets(text: Path, folder: Path) -> Path:
    """A random model whose tags choose between two target languages."""
    tags = ("data.train=[train, train]", "data.tags=[<2fr>, <2de>]", "data.subwords={type: bpe, size: 38}")
    like = Run(text, folder / "like", (*tags, f"data.prepared={folder}/prepared")).trained()
    return random_model(like.folder.path, folder / "model", "lstm, softrelu", {"beam_size": 3})


def write_random_lexicon(path: Path, folder: Path) -> None:
    """Writes a lexicon of nine random words for each source word of a model, and of none for padding."""
    size = load_vocabularies(folder).source.size
    torch.manual_seed(1)
    table = torch.stack([torch.zeros(9), *(torch.randperm(size)[:9] for _ in range(size - 1))]).int()
    write_lexicon(path, table, fingerprint(folder))


def assert_alike(found: list[RuntimeTranslation], expected: list[Translation], **tolerance: float) -> None:
    """The runtime's translations have the texts and scores of econmt's."""
    assert [each.text for each in found] == [each.text for each in expected]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], **tolerance)


def exact(folder: Path) -> econmt.TrainedModel:
    return econmt.load(folder, device="cpu", precision="float32")


@pytest.mark.sampled(10)
@pytest.mark.parametrize("variant", VARIANTS)
def test_translations_are_those_of_econmt(word_model: Path, tmp_path: Path, variant: str) -> None:
    folder = random_model(word_model, tmp_path / "model", variant, {"max_output_factor": 1.5, "beam_size": 4})
    made = export_runtime(folder, tmp_path / "runtime")
    for beam in (4, 1):
        found = econmt_runtime.load(made, beam_size=beam).translate(LINES)
        assert_alike(found, exact(folder).translate(LINES, beam_size=beam), abs=1e-4)
        assert len({each.score for each in found}) > 3


def test_lines_without_words_are_copied_as_in_econmt(model: Path, whole: Path) -> None:
    lines = ["3", " 1,234.56\t\u2013 ", "", "a b", "https://x.org/a", "tom@x.org.", "- " * 100_000, "a 3"]
    expected, said = exact(model).translate(lines, nbest_size=2), list[str]()
    found = econmt_runtime.load(whole, nbest_size=2, warn=said.append).translate(lines)
    assert [[entry.text for entry in each.nbest] for each in found] == [
        [entry.text for entry in each.hypotheses] for each in expected
    ]
    copies = ["3", "1,234.56\t\u2013", "", "https://x.org/a", "tom@x.org.", ("- " * 100_000)[:-1]]
    assert [each.text for at, each in enumerate(found) if at not in (3, 7)] == copies
    assert [each.score for each in found[:3]] == [0.0] * 3
    assert said == []


@pytest.mark.parametrize("variant", ["additive", "student", "gru-deep"])
def test_8_bits(variant: str, subword_model: Path, call: Call, tmp_path: Path, use: Any) -> None:
    folder = random_model(subword_model, tmp_path / "model", variant)
    small, lexicon, made = (tmp_path / name for name in ("small", "lexicon", "runtime"))
    assert call("quantize", "-m", folder, "-o", small).code == 0
    write_random_lexicon(lexicon, folder)
    ended = call("export", "--runtime", small, made, "--lexicon", lexicon, "--lexicon-topk", 5)
    assert (ended.code, ended.lines) == (0, [str(made)]), ended.err
    model, scores = econmt.load(small, device="cpu"), set()
    for level in range(3):
        use(level)
        for options, words in ({"threads": 2}, 5), ({"shortlist": 2}, 2), ({"shortlist": 0}, 0):
            found = econmt_runtime.load(made, **options).translate(LINES)
            more = {"restrict_lexicon": lexicon, "restrict_lexicon_topk": words} if words else {}
            assert_alike(found, model.translate(LINES, **more), abs=1e-5 if words else 1e-12)
            scores.add(tuple(each.score for each in found))
    assert len(scores) == 3  # at every level the same, bit for bit
    assert read_arrays(made / "arrays.safetensors")["lexicon"].dtype == np.int16


@pytest.mark.parametrize("size", [32_768, 32_769])
def test_lexicons_hold_every_id(word_model: Path, tmp_path: Path, size: int) -> None:
    like = shutil.copytree(word_model, tmp_path / "like")
    with (like / "vocab.target.txt").open("a", encoding="utf-8") as file:
        file.writelines(f"W{number}\n" for number in range(load_vocabularies(like).target.size, size))
    folder = random_model(like, tmp_path / "model", "additive")
    last = size - 1
    sizes = [vocabulary.size for vocabulary in load_vocabularies(folder).sides]
    assert sizes[1] == size
    write_lexicon(
        tmp_path / "lexicon", torch.full((sizes[0], 1), last, dtype=torch.int32), fingerprint(folder)
    )
    made = export_runtime(folder, tmp_path / "runtime", lexicon=tmp_path / "lexicon")
    stored = read_arrays(made / "arrays.safetensors")["lexicon"]
    assert stored.dtype == (np.int16 if size == 32_768 else np.int32)
    assert (stored == last).all()
    config, arrays = json.loads((made / "model.json").read_text()), read_arrays(made / "arrays.safetensors")
    for wrong in (size, -1):
        arrays["lexicon"] = np.full(stored.shape, wrong, np.int32)
        with pytest.raises(ValueError, match="'lexicon' contains word ids outside of the vocabulary"):
            check_shapes(arrays, config, *sizes)
    allowed = econmt_runtime.load(made)._allowed(np.array([[5, 6, 3]]))
    assert np.flatnonzero(allowed[0]).tolist() == [0, 1, 2, 3, last]
    found = econmt_runtime.load(made).translate(LINES)
    expected = exact(folder).translate(LINES, restrict_lexicon=tmp_path / "lexicon")
    assert [each.text for each in found] == [each.text for each in expected]
    assert {word for each in found for word in each.text.split()} <= {f"W{last}", "<unk>"}


def test_a_folder_runs_alone_and_loads_no_torch(whole: Path, tmp_path: Path) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['runtime', '--score']\n"
        f"try:\n    runpy.run_path({str(whole)!r}, run_name='__main__')\n"
        "except SystemExit as end:\n    code = end.code\n"
        "print(code, sorted({'torch', 'econmt', 'econmt_ops', 'pydantic'} & set(sys.modules)), file=sys.stderr)"
    )
    command, lines = [sys.executable, "-I", "-c", code], "\n".join(LINES)  # which no PYTHONPATH reaches
    place: dict[str, Any] = {"env": econmt_environment(), "cwd": tmp_path}
    done = subprocess.run(command, input=lines, capture_output=True, text=True, **place)
    assert done.stderr == "0 []\n"
    assert done.stdout.count("\n") == len(LINES)


def test_what_the_runtime_lacks_is_refused_in_a_line(call: Call, word_model: Path, tmp_path: Path) -> None:
    qrnn = {"decoder": {"cell": "qrnn", "size": 8, "input_feeding": False}}
    needed = "lstm or gru or ssru or lnlstm or lnglstm"
    for number, (variant, decoding, message) in enumerate(
        (
            (qrnn, {}, f"model.decoder.cell: qrnn; it needs model.decoder.cell: {needed}"),
            ({}, {"beam_prune": 1.0}, "decoding.beam_prune: 1.0; it needs decoding.beam_prune: 0"),
            ({}, {"min_output_length": 2}, "does not support decoding.min_output_length: 2"),
            ({}, {"word_penalty": 0.5}, "does not support decoding.word_penalty: 0.5"),
            ({}, {"repetition_penalty": 1.5}, "does not support decoding.repetition_penalty: 1.5"),
            ({}, {"beam_size": 65}, "decoding.beam_size: 65; it needs decoding.beam_size of at most 64"),
            ({}, {"beam_search_stop": "first"}, "does not support decoding.beam_search_stop: first"),
        )
    ):
        folder = random_model(word_model, tmp_path / str(number), variant, decoding)
        refused(call("export --runtime", folder, tmp_path / "made"), message)
        assert not (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def model(word_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder."""
    return random_model(word_model, tmp_path_factory.mktemp("model") / "model", "additive")


@pytest.fixture(scope="module")
def whole(model: Path) -> Path:
    """What is exported of it."""
    return export_runtime(model, model.parent / "runtime")


def rewritten(whole: Path, made: Path, **changed: torch.Tensor | None) -> Path:
    """A copy of a folder with other arrays, or without some, and checksums that fit them."""
    shutil.copytree(whole, made)
    tensors = {**load_file(made / "arrays.safetensors"), **changed}
    found = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_tensors(made / "arrays.safetensors", found, {"format": FORMAT})
    config = json.loads((made / "model.json").read_text())
    del config["checksum"]
    config["arrays"] = read_metadata(made / "arrays.safetensors")["checksum"]
    (made / "model.json").write_text(json.dumps(_signed(config)))
    return made


OPTIONAL = ("score", "keys.weight", "query.weight", "readout.weight", "start.weight")


@pytest.mark.parametrize(
    ("precision", "variant"),
    [("float32", "gnmt"), ("int8", "gnmt"), ("float32", "lnlstm, gru"), ("int8", "best")],
)
def test_every_array_is_compared_with_the_rest(
    word_model: Path, tmp_path: Path, precision: str, variant: str
) -> None:
    folder = random_model(word_model, tmp_path / "model", variant)
    made = export_runtime(folder, tmp_path / "runtime", precision)
    config, arrays = json.loads((made / "model.json").read_text()), read_arrays(made / "arrays.safetensors")
    sizes = [vocabulary.size for vocabulary in load_vocabularies(folder).sides]
    check_shapes(arrays, config, *sizes)
    for name, array in arrays.items():
        longer, shorter = np.concatenate([array, array[:1]]), array[:-1]
        for wrong in (longer, shorter, array[..., None], array.astype(np.float64)):
            with pytest.raises(ValueError):
                check_shapes({**arrays, name: wrong}, config, *sizes)
        if array.dtype == np.int8:
            with pytest.raises(ValueError, match="contains -128"):
                check_shapes({**arrays, name: np.full_like(array, -128)}, config, *sizes)
        if not name.endswith(".bias") and name not in OPTIONAL:
            with pytest.raises((ValueError, KeyError)):
                check_shapes({key: value for key, value in arrays.items() if key != name}, config, *sizes)
    for changed in ({"size": 9}, {"size": 7}, {"layers": 2}, {"asked": -1}, {"asked": 8}):
        with pytest.raises((ValueError, KeyError)):
            check_shapes(arrays, {**config, "decoder": {**config["decoder"], **changed}}, *sizes)
    for wrong_sizes in ((sizes[0] + 1, sizes[1]), (sizes[0], sizes[1] - 1)):
        with pytest.raises(ValueError, match="but the vocabulary has"):
            check_shapes(arrays, config, *wrong_sizes)


def test_damage_shows_on_loading(whole: Path, tmp_path: Path) -> None:
    flipped = shutil.copytree(whole, tmp_path / "flipped")
    path = flipped / "arrays.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(RuntimeInputError, match="its checksum does not match"):
        econmt_runtime.load(flipped)
    other = shutil.copytree(whole, tmp_path / "other")
    text = (whole / "model.json").read_text()
    (other / "model.json").write_text(text.replace('"max_length": ', '"max_length": 1'))
    with pytest.raises(RuntimeInputError, match=r"model.json: changed since it was exported"):
        econmt_runtime.load(other)
    strange = rewritten(whole, tmp_path / "strange", **{"output.bias": torch.zeros(3)})
    shutil.copyfile(whole / "model.json", strange / "model.json")
    with pytest.raises(RuntimeInputError, match="its checksum differs from"):
        econmt_runtime.load(strange)
    short = rewritten(whole, tmp_path / "short", **{"own.bias": torch.zeros(3)})
    with pytest.raises(RuntimeInputError, match=r"'own.bias' is float32 \(3,\), expected float32"):
        econmt_runtime.load(short)


def test_options_out_of_range_are_refused(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, message in {
        "--beam-size 0": "beam size 0: use a value from 1 to 64",
        "--shortlist -5": "shortlist -5: use 0",
        "--threads 0": "threads 0: use 1 or more",
        "--nbest-size 0": "n-best size 0: use a value from 1 to the beam size, 2",
        "--nbest-size 6": "n-best size 6: use a value from 1 to the beam size, 2",
    }.items():
        monkeypatch.setattr(sys, "argv", ["runtime", *option.split()])
        assert main(str(whole)) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(RuntimeInputError, match=r"beam size 2\.5: use a value"):
        econmt_runtime.load(whole, beam_size=2.5)


def test_lists_of_the_best_are_those_of_econmt(
    word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = random_model(word_model, tmp_path / "model", "ssru")
    made, text = export_runtime(folder, tmp_path / "runtime"), tmp_path / "text"
    text.write_text("\n".join(LINES) + "\n")
    expected = exact(folder).translate(LINES, nbest_size=2)
    monkeypatch.setattr(sys, "argv", ["runtime", "-i", str(text), "--nbest-size", "2"])
    monkeypatch.setattr("econmt_runtime.lines._READ", 30)  # in blocks, whose lines are numbered on
    seen: list[int] = []
    translate = RuntimeTranslator.translate

    def noted(translator: RuntimeTranslator, lines: list[str], first: int) -> list[RuntimeTranslation]:
        seen.extend(range(first, first + len(lines)))
        return translate(translator, lines, first)

    monkeypatch.setattr(RuntimeTranslator, "translate", noted)
    assert main(str(made)) == 0
    assert seen == [*range(1, len(LINES) + 1)]
    wanted = [row for number, each in enumerate(expected) for row in format_nbest(each, number)]
    found = capsys.readouterr().out.splitlines()
    assert len(found) == len(wanted) > len(LINES) + 3
    for one, other in zip(found, wanted, strict=True):
        *same, log_probability, score = re.split(r" \|\|\| (?:logprob= )?", one)
        *text_of, likely, best = re.split(r" \|\|\| (?:logprob= )?", other)
        assert same == text_of
        assert [float(log_probability), float(score)] == pytest.approx([float(likely), float(best)], abs=1e-4)
    monkeypatch.setattr(sys, "argv", ["runtime", "--score", "--nbest-size", "2"])
    with pytest.raises(SystemExit):
        main(str(made))


def test_long_lines_are_warned_of_and_what_is_no_list_of_lines_is_refused(whole: Path) -> None:
    said: list[str] = []
    translator = econmt_runtime.load(whole, beam_size=1, warn=said.append)
    translator.config |= {"max_length": 40, "max_input_length": 60}
    for words, blanks, warned in (
        (40, 0, ""),
        (41, 0, "41 source tokens, more than the 40 that the model was trained on"),
        (60, 0, "60 source"),
        (61, 0, "only the beginning is translated"),
        (3, 2995, ""),
        (3, 2996, "only"),
    ):
        said.clear()
        ids = translator._encode([" ".join(["a"] * words) + " " * blanks], 1)
        assert len(ids[0]) == min(words, 60)
        assert len(said) == (warned != "")
        assert warned in "".join(said)
    said.clear()
    translator.translate(["a " * 40, "a " * 41, "", "a " * 61, *["a " * 41] * 4], 7)
    assert [line.split(":")[0] for line in said[:4]] == ["line 8", "line 10", "line 11", "line 12"]
    assert said[4:] == ["further lines of more than 40 source tokens: 2"]
    translator = econmt_runtime.load(whole)
    for lines in ("a b c", ["a", 1], None):
        with pytest.raises(RuntimeInputError, match="expects a list of lines of text"):
            translator.translate(lines)
    with pytest.raises(RuntimeInputError, match="line 8: the character U\\+D83D is not allowed"):
        translator.translate(["a", "b \ud83d"], 7)


def test_errors_count_all_lines_of_the_input(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bias = load_file(whole / "arrays.safetensors")["output.bias"] * math.nan
    made, text = rewritten(whole, tmp_path / "broken", **{"output.bias": bias}), tmp_path / "text"
    monkeypatch.setattr("econmt_runtime.lines._READ", 10)
    text.write_text("\n" * 40 + "a\n")
    monkeypatch.setattr(sys, "argv", ["runtime", "-i", str(text)])
    assert main(str(made)) == 2
    assert "line 41: the model gives no finite probability" in capsys.readouterr().err


def test_structures_special_words_and_normalised_text(tmp_path: Path) -> None:
    assert (MOST_RUNTIME_WORDS, structures._VERSION) == (library.MOST_WORDS, library.VERSION)
    for name, fields in library.STRUCTURES.items():
        expected = [field[0] for field in structures.structures()[name].kind._fields_]
        assert [field.lstrip("*") for field in fields.split()] == expected
    (tmp_path / "words").write_text("<pad>\n<unk>\n<s>\n</s>\na\nb\n")
    words = RuntimeWords(tmp_path / "words")
    assert words.encode("b <s> </s>  <pad> <unk> c a") == [5, 1, 1, 1, 1, 1, 4]
    assert words.decode([2, 5, 1, 4, 3, 0]) == "b <unk> a"
    assert one_line(" a\rb\n c\r") == "a b  c"
    found = RuntimeTranslation("x ||| y", -0.5, -1.25)
    assert (
        _shown(found, 3, 2, score=False)
        == "3 ||| x &#124;&#124;&#124; y ||| logprob= -1.250000 ||| -0.500000"
    )
    from econmt.data.text import vocabulary

    for text in ("  a\u00a0", "e\u0301", "\u3000x y\u2009"):
        assert normalized(text) == vocabulary.normalized(text)
