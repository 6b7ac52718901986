"""Commands that cannot be carried out: each is refused with exit code 2 and one clear line, before it does anything."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest
import torch

from econmt.errors import printable
from tests.unit.cli.conftest import Call, Ended

FILES = {
    "lists": "".join(f"{number} ||| A ||| logprob= -1.000000 ||| -0.500000\n" for number in range(4)),
    "mine.csv": "a,b\n1,2\n",
    "one": "a\n",
    "two": "a\nb\n",
    "empty": "",
    "terms": "b c\tH\n",
    "avoid": "H\n",
    "unwritable": "# terms\n\nd\tF F\nz = Ä\n",
    "account.json": '{"ledger": {"entries": []}}',
    "none.json": "[]",
    "long": "a " * 60_000 + "\n",
}
"""Files in the folder of the commands; M is a model over words, S one over subwords."""
REFUSED = [
    ("translate --nosuch", "--nosuch", "see econmt translate --help"),
    ("trian", "trian"),
    ("help trian", "No such command 'trian'"),
    ("recipes list --nosuch", "--nosuch"),
    ("recipes show", "Missing argument"),
    ("recipes copy one new.yaml", "expected keys and values"),
    ("recipes copy best none/such.yaml", "none: no such folder"),
    ("translate -m M --top-k 5", "--top-k is for --sample"),
    ("translate -m M --top-p 0.5", "--top-p is for --sample"),
    ("translate -m M --temperature 0.5", "--temperature is for --sample"),
    ("translate -m M --seed 1", "--seed is for --sample"),
    ("translate -m M --sample -b 2", "--beam-size is for searching"),
    ("translate -m M --device cpu:1", "device 'cpu:1': unknown"),
    ("translate -m M --device cuda:99", "cuda:99"),
    ("translate -m none", "none: no such model folder"),
    ("translate -m M -i 'a\0b'", "argument 5 'a\\x00b' has a NUL character; remove it"),
    ("train quickstart 'output=\"a\\0b\"'", "the character U+0000 is not allowed in a recipe"),
    ("translate -m M -i none", "none: no such file"),
    ("translate -m M --checkpoint 7", "no checkpoint '7'"),
    ("translate -m M --checkpoint 6 --checkpoint 8", "2 checkpoints are given for 1 models"),
    ("translate -m M -b 2 --nbest-size 3", "nbest_size 3", "beam_size 2"),
    ("translate -m M -m S", "S", "vocabularies differ"),
    ("translate -m M -o none/out", "none: no such folder"),
    ("translate -m M -o out.gz", "out.gz: lines are written without compression; leave out .gz"),
    ("translate -m M -i pipe", "pipe: a named pipe, not a file; give a file, or its text on standard input"),
    ("translate -m M --beam-prune nan", "--beam-prune"),
    ("translate -m M --avoid-list none", "none: no such file"),
    ("translate -m M --avoid-list avoid --glossary terms", "terms:1: b c = H contains an avoided phrase"),
    ("translate -m S --glossary unwritable", "unwritable:4: z = Ä has characters or words that the target"),
    ("translate -m S --glossary-mode annotate", "--glossary-mode is for --glossary"),
    ("translate -m S --glossary-mode annotate --glossary terms", "was not trained with data.annotate_terms"),
    ("translate -m M --split-sentences --nbest-size 2", "--nbest-size is for lines of one sentence"),
    ("translate -m M --language-model S", "holds a translation model; language_model takes a language model"),
    ("translate -m M --language-model none", "no such model folder"),
    ("translate -m M --lm-weight 1", "--lm-weight is for --language-model; give that too, or leave it out"),
    ("translate -m M --restrict-lexicon-topk 1", "restrict-lexicon"),
    ("translate -m hf://reverse", "hf://reverse: not the name of a model of the Hub; use hf://OWNER/NAME"),
    ("translate -m M --length-penalty-beta -1", "at least 0"),
    ("translate -m M --checkpoint ²", "checkpoint '²'"),
    (f"translate -m M --checkpoint {'9' * 5000}", "checkpoint '999"),
    ("translate -m M --attention-picture a.xyz", "unknown image format"),
    ("translate -m M --attention-picture none/a.png", "no such folder"),
    ("translate -m M --output ''", "(after --output) is empty"),
    ("translate -m M --output= -b", "(--output) is empty"),
    ("translate -m M --checkpoint \udcff", "'\\xff' is not valid UTF-8"),
    ("score -m M --length-penalty-beta 2", "--length-penalty-beta is for --score-type: normalized or json"),
    ("score -m M", "standard input:1", "0 tabs; expected one"),
    ("score -m M -s one", "both --source and --target"),
    ("score -m M --total", "--total is for language models"),
    ("score -m M -s two -t one", "2 lines"),
    ("evaluate -r two -i two --metrics ,", "--metrics ',': names no metric"),
    ("evaluate -r two -i two --metrics ter --tokenize 13a", "--tokenize is for bleu, which --metrics"),
    ("evaluate -r two -i two --metrics ter --lowercase", "--lowercase is for bleu and chrf"),
    ("evaluate -r two -i two --metrics rouge", "metric 'rouge'", "bleu, chrf, ter"),
    ("evaluate -r two -i two --tokenize what", "tokenizer 'what'", "13a"),
    ("evaluate -r two -i two --tokenize 13a --language de", "--language cannot be combined with --tokenize"),
    ("evaluate -r two -i two --language ../etc", "--language '../etc': give the code"),
    ("evaluate -r two -i two --samples 9", "--samples is for comparing"),
    ("evaluate -r two -i two --json --width 3", "--width is for text"),
    ("evaluate -r two -i one", "one has 1 lines", "two has 2"),
    ("evaluate -r two -r one -i two", "one has 1 lines", "two has 2"),
    ("evaluate -r two -i none", "none", "no such file"),
    ("evaluate -r two -i empty", "empty"),
    ("evaluate -r two -i one -i one", "given twice"),
    ("evaluate -r long -i long", "long:1: 120,000 characters"),
    ("rerank -i lists -r one", "lists of 4 sentences but", "has 1 lines"),
    ("rerank -i lists", "give either --reference, or --models or --reverse-models"),
    ("rerank -i lists -r one -m M", "give either --reference"),
    ("rerank -i lists -m M", "as --source"),
    ("rerank -i lists -r one --weight 2", "--weight is for --models"),
    ("rerank -i lists -s one -m M --reverse-weight 2", "--reverse-weight is for --reverse-models"),
    ("rerank -i lists -s one -m M --metric chrf", "--metric is for --reference"),
    ("rerank -r one", "standard input:1: expected number ||| text"),
    ("train quickstart -o a output=b", "output is given twice"),
    ("train quickstart --fresh --resume-with-changes", "cannot be combined with --resume-with-changes"),
    ("prepare quickstart -o a data.prepared=b", "data.prepared is given twice"),
    ("average -m M -o loop", "loop: a link that leads to itself"),
    ("average -m none -o new", "no such folder"),
    ("export M loop", "loop: a link that leads to itself"),
    ("export M new --hub", "--hub is for --license; give that too"),
    ("export M new --license other", "--license is for --hub; give that too"),
    ("export M new --hub --license 'MIT\n---'", "--license 'MIT"),
    ("export M new --precision int8", "--precision is for --runtime"),
    ("bench select quickstart --csv nowhere/x.csv", "nowhere: no such folder"),
    ("bench select quickstart --plot .", ".: a folder; give the name of a file"),
    ("bench training quickstart --csv mine.csv", "mine.csv: not a table of econmt bench"),
    ("bench select quickstart --byte-limit many", "--byte-limit:"),
    ("bench training nosuch", "nosuch: no such recipe"),
    ("bench scan --device cuda", "No such command 'scan'"),
    ("profile iwsl --estimate", "no such recipe; did you mean the shipped recipe iwslt?"),
    ("profile quickstart --fit 1GiB --batch 3", "--fit cannot be combined with --batch: it finds the batch"),
    ("profile quickstart --estimate --device cuda:x", "device 'cuda:x': unknown"),
    ("profile quickstart --device cuda", "torch sees no GPU here; add --estimate to predict without one"),
    ("profile quickstart --bucket 6by5", "--bucket '6by5': expected source x target positions, as 100x80"),
    ("profile quickstart --bucket 0x5", "--bucket '0x5': expected source x target positions, as 100x80"),
    ("profile quickstart --fit much", "--fit: expected a size like 4GiB", "found 'much'"),
    ("profile quickstart --estimate --measure", "--estimate cannot be combined with --measure: it runs"),
    ("profile quickstart --trace t.json --estimate", "--estimate cannot be combined with --trace: it runs"),
    ("profile quickstart --html p.html --fit 1GB", "--fit cannot be combined with --html: it prints a table"),
    ("profile quickstart --html no/such/p.html", "no/such: no such folder"),
    ("profile --diff account.json", "--diff compares two files; give their names: econmt profile --diff"),
    ("profile --diff account.json account.json --json", "--diff cannot be combined with --json: it compares"),
    ("profile --diff account.json none.json", "none.json: no memory account; expected the output of"),
]
"""A command, and parts of the line with which it is refused."""
OVERRIDES = [
    ("training.optimizer.betas=[0.9]", "betas[1]: missing"),
    ("training.optimizer.betas=[0.9, 0.9, 0.9]", "at most 2 items"),
    ("model.encoder.residual=!!bool maybe", "'maybe' is not a valid bool"),
    ("training.label_smoothing=!!float ''", "'' is not a valid float"),
    ('name="\\U00110000"', "not valid YAML"),
    ('name="\\ud800"', "U+D800 is not allowed"),
    ('name="a\\eb"', "U+001B is not allowed"),
    ('"a\\0": 3', "expected key=value"),
    ("training.batch.size=100000000000000000000", "must be at most 1000000"),
    ("training.batch.size=" + "9" * 60, "a whole number of more than 40 digits"),
    ("training.memory_budget=" + "9" * 400 + "GB", "expected a size like 4GiB"),
    ("data.train=['/']", "a path without the language suffix"),
    ("data.valid=..", "a path without the language suffix"),
    ("data.test=corpus/", "a path without the language suffix"),
    ("data.source=e/n", "cannot contain a slash"),
    ("data.train=['~nouser/x']", "home folder ~nouser does not exist"),
    ("name=" + "x" * 5000, "at most 4,096"),
]
"""A change of a recipe that nobody means, and words of the line with which it is refused."""
REFUSED += [(f"recipes show quickstart {shlex.quote(change)}", words) for change, words in OVERRIDES]


def refused(ended: Ended, *words: str) -> None:
    """Asserts that a command was refused with one line, which can be printed and has these words."""
    lines = ended.err.splitlines()
    assert ended.code == 2, ended.err
    assert len(lines) == 1, ended.err
    assert lines[0].startswith("econmt: error: ")
    assert printable(lines[0]) == lines[0]
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(("command", "words"), [(command, words) for command, *words in REFUSED])
def test_a_command_that_cannot_be_carried_out_is_refused_in_a_line(
    call: Call,
    word_model: Path,
    subword_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, content in FILES.items():
        Path(name).write_text(content, encoding="utf-8")
    for name, model in (("M", word_model), ("S", subword_model)):
        Path(name).symlink_to(model)
    Path("loop").symlink_to("loop")
    os.mkfifo("pipe")
    ended = call(*shlex.split(command), text="a\n")
    refused(ended, *words)
    assert ended.out == ""
    assert not Path("new").exists()
