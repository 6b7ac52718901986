from __future__ import annotations

import math
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from econmt.data.text.vocabulary import SPECIAL_TOKENS, UNK, WordVocabulary
from scripts.bench.compare.launchers import plain
from scripts.bench.compare.make_data import STRANGE, piece_lines, vocabulary_files, write_test
from scripts.bench.compare.measure import (
    FailedError,
    Mark,
    Reading,
    Window,
    marks_of,
    resident_bytes,
    window_of,
)
from scripts.bench.compare.report import Measured, set_ratios
from scripts.bench.compare.toolkit import Places
from scripts.bench.compare.tools import TOOLKITS
from scripts.bench.compare.turns import Trainee, run_alone, write_log
from scripts.bench.plain_model import Sizes

# Lines as the toolkits printed them, and what they say.
TRAINING = {
    "fairseq": (
        "2026-11-20 13:06:39 | INFO | train_inner | epoch 001:     20 / 454 loss=8.64, ppl=398.88, wps=1031, ups=1.3, "
        "wpb=792.9, bsz=64, num_updates=20, lr=0.001, gnorm=1.724, clip=100, train_wall=8, wall=17",
        Reading(20, 7929.0),
    ),
    "opennmt": (
        "[2026-11-20 13:14:31,220 INFO] Step 20/100000; acc: 13.9; ppl: 486.1; xent: 6.2; lr: 0.00100; sents:     640; "
        "bsz:  856/ 932/64; 763/831 tok/s;     26 sec;",
        Reading(20, 9320.0),
    ),
    # these are started by launchers of this repository, which count in their stead
    "joeynmt": ("update 20: 9440 target tokens", Reading(20, 9440.0)),
    "plain": ("update 20: 9440 target tokens, loss 6.411", Reading(20, 9440.0)),
    "econmt": ("update 20: 9440 target tokens", Reading(20, 9440.0)),
}
TRANSLATION = {
    "fairseq": (
        "2026-11-20 13:06:59 | INFO | fairseq_cli.generate | Translated 200 sentences (3,393 tokens) in 4.7s "
        "(42.49 sentences/s, 720.93 tokens/s)",
        4.7,
    ),
    "opennmt": ("[2026-11-20 13:14:36,258 INFO] Total translation time (s): 1.8", 1.8),
    "joeynmt": ("2026-11-20 13:26:03,309 - INFO - joeynmt.prediction - Generation took 3.9398[sec].", 3.9398),
    "plain": ("translated in 5.331 s", 5.331),
    "econmt": ("econmt: 200 lines, 2712 target tokens in 3.4 s (797 tokens/s)", 3.4),
}


@pytest.mark.parametrize("key", TRAINING)
def test_a_line_of_each_training_log_is_understood_and_no_other(key: str) -> None:
    toolkit = TOOLKITS[key]()
    for line, expected in TRAINING.values():
        own = key in ("fairseq", "opennmt")
        counted = line.startswith("update")
        understood = line == TRAINING[key][0] if own else counted
        assert toolkit.reading(line) == (expected if understood else None)
    progress = "update 20  epoch 1  loss 6.4110  perplexity 608.50  2,345 target tokens/s  memory 822 MB"
    assert toolkit.reading(progress) is None


@pytest.mark.parametrize("key", TRANSLATION)
def test_each_stopwatch_of_translation_is_read(key: str) -> None:
    toolkit = TOOLKITS[key]()
    for other, (line, seconds) in TRANSLATION.items():
        assert toolkit.translation_seconds(line) == (seconds if other == key else None)


def test_printed_translations_are_told_from_the_log(tmp_path: Path) -> None:
    fairseq = [
        "S-0\t▁A",
        "H-0\t-0.5\t▁Ein ▁Mann .",
        "P-0\t-0.1",
        "H-12\t-0.7\t▁Eine",
        TRANSLATION["fairseq"][0],
    ]
    assert TOOLKITS["fairseq"]().output_lines(fairseq, tmp_path) == ["▁Ein ▁Mann .", "▁Eine"]
    joeynmt = ["loading", TRANSLATION["joeynmt"][0], "▁Ein ▁Mann .", "▁Eine"]
    assert TOOLKITS["joeynmt"]().output_lines(joeynmt, tmp_path) == ["▁Ein ▁Mann .", "▁Eine"]
    written = tmp_path / "output.txt"
    written.write_text("▁Zwei\n", encoding="utf-8")
    assert TOOLKITS["opennmt"]().output_lines([], written) == ["▁Zwei"]


def test_throughput_is_the_tokens_past_the_warm_up_over_the_time_between_their_lines() -> None:
    readings = [
        (0.0, Reading(10, 1.0)),  # warm-up
        (9.0, Reading(20, 5.0)),  # starts the window: what it says lies before
        (10.0, Reading(30, 1000.0)),
        (13.0, Reading(40, 2000.0)),
    ]
    assert marks_of(readings, 20) == [Mark(0, 0.0, 0.0), Mark(10, 1.0, 1000.0), Mark(20, 4.0, 3000.0)]
    assert window_of(marks_of(readings, 20)) == Window(20, 4.0, 750.0)
    assert window_of(marks_of(readings, 40)) is None
    assert window_of(marks_of(readings, 50)) is None
    assert marks_of([], 0) == []


def test_memory_is_read_from_the_kernels_account() -> None:
    status = "Name:\tpython\nVmPeak:\t 9000 kB\nVmHWM:\t  3000 kB\nVmRSS:\t  2000 kB\nRssAnon:\t 1000 kB\n"
    assert resident_bytes(status) == (2_048_000, 3_072_000)
    assert resident_bytes("Name:\tkthreadd\n") == (0, 0)


def test_a_command_that_fails_says_what_it_printed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"]
    failed = run_alone(Trainee(words, {}, tmp_path))
    assert isinstance(failed, FailedError)
    with pytest.raises(FailedError, match=r"ended with status 3(.|\n)*out of luck"):
        write_log(failed, tmp_path / "log")
    assert "out of luck" in (tmp_path / "log").read_text()


def test_pieces_are_one_word_each_in_every_format() -> None:
    vocabulary = WordVocabulary([*SPECIAL_TOKENS, "▁Ein", "\xa0", "s"])
    assert piece_lines(vocabulary, [[4, 5, 6], [UNK]]) == ["▁Ein <U+00A0> s", STRANGE]
    with pytest.raises(ValueError, match="id 0"):
        piece_lines(vocabulary, [[4, 0]])
    files = vocabulary_files(["a", "▁b", "\xa0"], Counter({"▁b": 7, "a": 2}))
    assert files["joeynmt.txt"] == "▁b\na\n<U+00A0>\n"
    assert files["opennmt.txt"] == "▁b\t7\na\t2\n<U+00A0>\t0\n"
    assert files["fairseq.txt"] == "▁b 7\na 2\n<U+00A0> 0\n"


def test_all_models_are_matched(tmp_path: Path) -> None:
    places = Places(tmp_path / "data", tmp_path, Path("python"))
    said = {}
    for key, toolkit in TOOLKITS.items():
        maker = toolkit()
        if key != "fairseq":
            maker.prepare(places)
        words = maker.train(places, tmp_path / "model", 50).words
        files = [path.read_text(encoding="utf-8") for path in tmp_path.glob("*.yaml")]
        said[key] = " ".join(words) + "\n".join(files)
        for path in tmp_path.glob("*.yaml"):
            path.unlink()
    assert "512" in said["fairseq"]
    assert "--batch-size 64" in said["fairseq"]
    for key in ("opennmt", "joeynmt"):
        assert "batch_size: 64" in said[key]
        assert "512" in said[key]
    assert "precision: float32" in said["econmt-float32"]
    assert "precision" not in said["econmt"]
    for key, precision in (("plain", "float32"), ("plain-bfloat16", "bfloat16")):
        assert f"--precision {precision} train" in said[key]


def test_a_row_has_the_median_of_translations_and_names_what_failed() -> None:
    row = Measured("econmt", "1", peer=False, window=Window(10, 5.0, 1000.0), peaks=[10**9, 2 * 10**9])
    row.translations, row.output_words = [3.0, 2.0, 9.0], 600
    assert row.row() == {
        "toolkit": "econmt",
        "version": "1",
        "precision": "float32",
        "target tokens/s": 1000,
        "to the fastest peer": "",
        "peak MB": 2000,
        "words out": 600,
        "words/s": 200,
        "sentences, s": "3.00",
    }
    broken = Measured("other", "2", failure="does not start").row()
    assert broken == {"toolkit": "other", "version": "2", "precision": "float32", "failure": "does not start"}


def row_of(name: str, course: list[Mark], peer: bool) -> Measured:
    return Measured(name, "1", peer=peer, window=window_of(course), course=course)


def test_ratios_are_to_the_fastest_peer_with_the_scatter_of_their_parts() -> None:
    ours = row_of("econmt", [Mark(10 * i, 2.0 * i, 400.0 * i) for i in range(6)], peer=False)
    twice = row_of("twice", [Mark(10 * i, 2.0 * i, 800.0 * i) for i in range(6)], peer=False)
    # Half as fast as ours in the first half of eight seconds, as fast as ours in the second.
    course = [Mark(0, 0.0, 0.0), Mark(10, 2.0, 200.0), Mark(20, 4.0, 400.0), Mark(30, 8.0, 1200.0)]
    peer = row_of("peer", [*course, Mark(40, 9.0, 1350.0)], peer=True)
    slow = row_of("slow", [Mark(0, 0.0, 0.0), Mark(10, 12.0, 600.0)], peer=True)
    broken = Measured("broken", "1", failure="does not start")
    set_ratios([ours, twice, peer, slow, broken])
    assert broken.ratio is None
    assert ours.ratio is not None
    assert (ours.rival, ours.ratio.value) == ("peer", pytest.approx(200 / 150))
    assert ours.ratio.high == pytest.approx(2.0)  # of the first quarter of nine seconds
    assert ours.ratio.low == pytest.approx(1.0)  # of the third quarter
    assert slow.ratio is not None
    assert slow.ratio == pytest.approx((50 / 150,) * 3)  # one stretch, so one part
    assert peer.ratio == (1.0, 1.0, 1.0)
    set_ratios([ours, twice])  # no peer: to the fastest
    assert (ours.rival, ours.ratio.value) == ("twice", pytest.approx(0.5))

    def row(name: str, speed: float, precision: str, *, peer: bool = True) -> Measured:
        return Measured(name, "1", precision, peer, Window(9, 1.0, speed))

    rows = [
        row("chooses", 400.0, "auto", peer=False),
        row("ours", 300.0, "float32", peer=False),
        row("ours, bfloat16", 500.0, "bfloat16", peer=False),
        row("peer", 100.0, "float32"),
        row("slow peer", 50.0, "float32"),
        row("peer, bfloat16", 200.0, "bfloat16"),
        row("ours, tf32", 600.0, "tf32", peer=False),
    ]
    set_ratios(rows)
    assert [(row.rival, row.ratio and row.ratio.value) for row in rows] == [
        ("peer, bfloat16", 2.0),
        ("peer", 3.0),
        ("peer, bfloat16", 2.5),
        ("peer", 1.0),
        ("peer", 0.5),
        ("peer, bfloat16", 1.0),
        ("peer, bfloat16", 3.0),
    ]


def words_of(key: str, device: str, folder: Path) -> str:
    """All that tells a toolkit how to train and translate: command lines and configurations."""
    toolkit = TOOLKITS[key]()
    toolkit.device = device
    places = Places(folder / "data", folder, Path(sys.executable))
    commands = [
        toolkit.train(places, folder / "model", 10),
        toolkit.translate(places, folder / "model", folder),
    ]
    written = [path.read_text() for path in sorted(folder.glob("*.yaml"))]
    return "\n".join([*(" ".join(command.words) for command in commands), *written])


@pytest.mark.parametrize(
    ("key", "cpu", "cuda"),
    [
        ("fairseq", "--cpu", None),
        ("opennmt", "gpu_ranks: []", "gpu_ranks:\n- 0"),
        ("opennmt", "-gpu -1", "-gpu 0"),
    ],
)
def test_each_is_told_by_its_own_option_to_take_the_gpu(
    key: str, cpu: str, cuda: str | None, tmp_path: Path
) -> None:
    for device, own, other in (("cpu", cpu, cuda), ("cuda", cuda, cpu)):
        said = words_of(key, device, tmp_path)
        assert own is None or own in said
        assert other is None or other not in said


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.thorough)])
def test_the_plain_loop_learns_and_translates(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = [("a b", "A B"), ("b", "B"), ("a", "A")] * 8
    for side, column in (("en", 0), ("de", 1)):
        words = "ab" if column == 0 else "AB"
        (tmp_path / f"vocabulary.{side}.joeynmt.txt").write_text("".join(f"{word}\n" for word in words))
        for split in ("train", "test"):
            (tmp_path / f"{split}.{side}").write_text("".join(f"{pair[column]}\n" for pair in pairs))
    tiny = partial(Sizes, embedding=64, encoder=64, decoder=64, attention=64)
    monkeypatch.setattr(plain, "Sizes", tiny)
    model, output = tmp_path / "model", tmp_path / "output"
    for words in (["train", tmp_path, model, "100", "50"], ["translate", tmp_path, model, output]):
        monkeypatch.setattr(sys, "argv", ["plain.py", "--precision", precision, *map(str, words)])
        plain.main()
    said = capsys.readouterr().out.splitlines()
    assert TOOLKITS["plain"]().reading(said[0]) == Reading(50, 50 * (8 * 4 + 3 * 8))
    assert TOOLKITS["plain"]().translation_seconds(said[-1]) is not None
    losses = [float(line.rpartition("loss ")[2]) for line in said[:2]]
    assert losses[1] < losses[0] < math.log(6)  # better than chance among six entries
    translations = [line.split() for line in output.read_text().splitlines()]
    assert len(translations) == len(pairs)
    assert {word for words in translations for word in words} <= {"A", "B"}


def test_any_text_can_be_translated_and_what_is_unknown_is_unknown_to_all(tmp_path: Path) -> None:
    vocabularies = [WordVocabulary([*SPECIAL_TOKENS, *words.split()]) for words in ("a dog", "ein Hund")]
    pairs = [("a dog", "ein Hund"), ("a cat", "ein ein Hund")]
    assert write_test(tmp_path, vocabularies, pairs) == (2, 7)
    assert (tmp_path / "test.en").read_text(encoding="utf-8") == "a dog\na \N{REPLACEMENT CHARACTER}\n"
    assert (tmp_path / "test.raw.en").read_text(encoding="utf-8") == "a dog\na cat\n"
    assert (tmp_path / "test.de").read_text(encoding="utf-8") == "ein Hund\nein ein Hund\n"
