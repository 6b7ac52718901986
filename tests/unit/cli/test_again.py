"""Commands called again in the same process, or after one that failed, do what they did the first time."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Call

COMMANDS = [
    "translate -m {m} -i {t}/test.src --output-type attention",
    "translate -m {m} -i {t}/test.src --nbest-size 2 --length-penalty-alpha 0.3 --restrict-lexicon {l}",
    "translate -m {m} -i {t}/test.src --sample --nbest-size 2 --seed 3 --temperature 0.7",
    "translate -m {m} -m {m} -i {t}/test.src --ensemble-mode log_linear --precision float32",
    "translate -m {m} -i {t}/test.src --split-sentences --markup --restore-case --max-input-length 3",
    "score -m {m} -s {t}/test.src -t {t}/test.trg --score-type json",
    "rerank -i {n} -s {t}/test.src -m {m} --reverse-model {m} --weight 0.5 --reverse-weight 2 --nbest",
    "rerank -i {n} -r {t}/test.trg --metric chrf",
    "evaluate -r {t}/test.trg -i {t}/test.src -i {t}/test.trg --metrics bleu --metrics chrf",
    "info {m}",
    "recipes show quickstart training.seed=3",
    "export {m} {o}",
    "export --runtime {m} {o}",
    "quantize -m {m} -o {o} --precision bfloat16",
    "average -m {m} -n 2 -o {o}",
    "lexicon -m {m} -o {o} --corpus {t}/train",
]


def written(path: Path) -> dict[str, str]:
    """Checksums of a file, or of the files in a folder."""
    files = [path] if path.is_file() else path.rglob("*")
    return {
        str(file.relative_to(path.parent)).partition("/")[2]: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file()
    }


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.partition(" -")[0])
def test_again(call: Call, word_model: Path, text: Path, tmp_path: Path, command: str) -> None:
    lexicon, lists = tmp_path / "lexicon", tmp_path / "lists"
    if "{l}" in command:
        call("lexicon -m", word_model, "-o", lexicon, "--corpus", text / "train").succeeded()
    if "{n}" in command:
        made = call("translate --nbest-size 2 --beam-size 2 -m", word_model, "-i", text / "test.src")
        lists.write_text(made.succeeded().out)
    ended, files = [], []
    for number in range(3):
        output = tmp_path / str(number) / "made"
        output.parent.mkdir()
        names = {"m": word_model, "t": text, "o": output, "l": lexicon, "n": lists}
        if number == 2:  # after calls that failed
            assert call(f"{command.format(**names)} --no-such-option").code == 2
            assert call("translate -m", word_model, text=b"a b\n\xff\n").code == 2
        ended.append(call(command.format(**names)).succeeded())
        files.append(written(output) if output.exists() else {})
    outputs = [each.out.replace(f"{tmp_path}/{number}/", "") for number, each in enumerate(ended)]
    assert outputs == outputs[:1] * 3
    assert files == [files[0]] * 3
    assert ended[0].out or files[0]
