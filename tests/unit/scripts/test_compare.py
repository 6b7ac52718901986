from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from scripts.compare.make_data import piece_line, vocabulary_files
from scripts.compare.measure import FailedError, Reading, Window, measured_window, resident_bytes, run
from scripts.compare.report import Row, cells, markdown, write_csv
from scripts.compare.toolkit import Places
from scripts.compare.tools import TOOLKITS

# Lines as the toolkits printed them, and what they say.
TRAINING = {
    "fairseq": (
        "2026-11-20 13:06:39 | INFO | train_inner | epoch 001:     20 / 454 loss=8.64, ppl=398.88, wps=1031, ups=1.3, "
        "wpb=792.9, bsz=64, num_updates=20, lr=0.001, gnorm=1.724, clip=100, train_wall=8, wall=17",
        Reading(20, 1031.0),
    ),
    "opennmt": (
        "[2026-11-20 13:14:31,220 INFO] Step 20/100000; acc: 13.9; ppl: 486.1; xent: 6.2; lr: 0.00100; sents:     640; "
        "bsz:  856/ 932/64; 763/831 tok/s;     26 sec;",
        Reading(20, 831.0),
    ),
    "joeynmt": (
        "2026-11-20 13:25:54,585 - INFO - joeynmt.training - Epoch   1, Step:       20, Batch Loss:     8.175524, "
        "Batch Acc: 0.069423, Tokens per Sec:      242, Lr: 0.000100",
        Reading(20, 242.0),
    ),
    "sockeye": (
        "[INFO:sockeye.training] Epoch[0] Batch [20]\tSpeed: 23.13 samples/sec 325.84 tokens/sec 0.36 updates/sec\t"
        "perplexity=1277.269026",
        Reading(20, 325.84),
    ),
    "plain": ("update 20 loss 6.411 1097.8 target tokens/s", Reading(20, 1097.8)),
    "econmt": (
        "update 20  epoch 1  loss 6.4110  perplexity 608.50  learning rate 0.001  gradient norm 0.91  "
        "2,345 target tokens/s  memory 822 MB  time left 0:01:02",
        Reading(20, 2345.0),
    ),
}
TRANSLATION = {
    "fairseq": (
        "2026-11-20 13:06:59 | INFO | fairseq_cli.generate | Translated 200 sentences (3,393 tokens) in 4.7s "
        "(42.49 sentences/s, 720.93 tokens/s)",
        4.7,
    ),
    "opennmt": ("[2026-11-20 13:14:36,258 INFO] Total translation time (s): 1.8", 1.8),
    "joeynmt": ("2026-11-20 13:26:03,309 - INFO - joeynmt.prediction - Generation took 3.9398[sec].", 3.9398),
    "sockeye": (
        "[INFO:__main__] Processed 200 lines. Total time: 5.8345, sec/sent: 0.0292, sent/sec: 34.2786",
        5.8345,
    ),
    "plain": ("translated in 5.331 s", 5.331),
    "econmt": ("econmt: 200 lines, 2712 target tokens in 3.4 s (797 tokens/s)", 3.4),
}


@pytest.mark.parametrize("key", TRAINING)
def test_a_line_of_each_training_log_is_understood_and_no_other(key: str) -> None:
    toolkit = TOOLKITS[key]()
    for other, (line, expected) in TRAINING.items():
        assert toolkit.reading(line) == (expected if other == key else None)


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
    assert TOOLKITS["sockeye"]().output_lines([], written) == ["▁Zwei"]


def test_throughput_counts_each_line_by_the_time_since_the_one_before() -> None:
    readings = [
        (0.0, Reading(10, 1.0)),  # warm-up
        (9.0, Reading(20, 5.0)),  # starts the window: what it says lies before
        (10.0, Reading(30, 1000.0)),
        (13.0, Reading(40, 2000.0)),
    ]
    assert measured_window(readings, 20) == Window(20, 4.0, (1000.0 + 3 * 2000.0) / 4)
    assert measured_window(readings, 40) is None
    assert measured_window([], 0) is None


def test_memory_is_read_from_the_kernels_account() -> None:
    status = "Name:\tpython\nVmPeak:\t 9000 kB\nVmHWM:\t  3000 kB\nVmRSS:\t  2000 kB\nRssAnon:\t 1000 kB\n"
    assert resident_bytes(status) == (2_048_000, 3_072_000)
    assert resident_bytes("Name:\tkthreadd\n") == (0, 0)


def test_a_run_is_stopped_once_its_window_is_long_enough(tmp_path: Path) -> None:
    program = (
        "import time\n"
        "for update in range(1, 10**6):\n"
        "    print(f'update {update} loss 1.0 100.0 target tokens/s', flush=True)\n"
        "    time.sleep(0.001)\n"
    )
    plain = TOOLKITS["plain"]()
    finished = run(
        [sys.executable, "-c", program], {}, tmp_path, reading=plain.reading, warm_up=2, window_seconds=0.02
    )
    assert finished.window is not None
    assert finished.window.seconds >= 0.02
    assert finished.window.tokens_per_second == pytest.approx(100.0)
    assert finished.window.updates < 1000


def test_a_command_that_fails_says_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"ended with status 3(.|\n)*out of luck"):
        run([sys.executable, "-c", "import sys; print('out of luck'); sys.exit(3)"], {}, tmp_path)


def test_pieces_are_one_word_each_in_every_format() -> None:
    assert piece_line(["▁Ein", "\xa0", "s"]) == "▁Ein <U+00A0> s"
    with pytest.raises(ValueError, match="<unk>"):
        piece_line(["▁Ein", "<unk>"])
    files = vocabulary_files(["a", "▁b", "\xa0"], Counter({"▁b": 7, "a": 2}))
    assert files["joeynmt.txt"] == "▁b\na\n<U+00A0>\n"
    assert files["opennmt.txt"] == "▁b\t7\na\t2\n<U+00A0>\t0\n"
    assert files["fairseq.txt"] == "▁b 7\na 2\n<U+00A0> 0\n"
    assert '"<pad>": 0' in files["sockeye.json"]
    assert '"▁b": 4' in files["sockeye.json"]


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
    for key in ("fairseq", "sockeye"):
        assert "512" in said[key]
        assert "--batch-size 64" in said[key]
    for key in ("opennmt", "joeynmt"):
        assert "batch_size: 64" in said[key]
        assert "512" in said[key]
    assert "precision: float32" in said["econmt-float32"]
    assert "precision" not in said["econmt"]


def test_the_table_has_medians_and_names_what_failed(tmp_path: Path) -> None:
    row = Row(
        "econmt",
        "1",
        "nothing",
        [Window(10, 5.0, 1000.0), Window(10, 5.0, 3000.0)],
        [10**9, 2 * 10**9],
        [3.0],
    )
    row.output_words = 600
    broken = Row("other", "2", "much", failure="does not start")
    assert cells(row) == ["econmt", "1", "2,000 (1,000 to 3,000)", "2,000 MB", "3.0", "600", "200", "nothing"]
    about = dict.fromkeys(("cpu", "cores", "memory_gb", "threads", "date", "commit", "load"), "x")
    text = markdown([row, broken], about, 2, 25.0)
    assert text.splitlines()[-1] == "| other | 2 | failed |  |  |  |  | does not start |"
    write_csv(tmp_path / "table.csv", [row, broken])
    lines = (tmp_path / "table.csv").read_text(encoding="utf-8").splitlines()
    assert lines[1:] == ["econmt,1,2000.0,2000000000,3.0,600,", "other,2,,,,,does not start"]
