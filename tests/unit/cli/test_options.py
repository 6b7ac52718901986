"""What is given to a command, or to a function of the interface, arrives at the function that it is for."""

from __future__ import annotations

import inspect
import pkgutil
import re
import warnings
from ast import literal_eval
from pathlib import Path
from typing import Any, NoReturn

import pytest

import econmt
from econmt.decoding.text_reader import TextReader
from econmt.errors import InputError
from tests.unit.cli.conftest import Call

COMPUTING = "--device cpu --threads 1 --precision bfloat16"
LOADED = "device=cpu  threads=1  precision=bfloat16"
ARRIVING = """
lexicon -m MODEL -o NEW -k 7 --iterations 3 --pairs 9 --corpus TEXT/valid
    econmt.cli.lexicon.make_lexicon  folder=MODEL  output=NEW  top_k=7  iterations=3  pairs=9
quantize -m MODEL -o NEW --precision bfloat16 -c last
    econmt.cli.quantize.quantize_model  model=MODEL  output=NEW  precision=bfloat16  checkpoint=last
export MODEL NEW --runtime --precision int8 --lexicon LIST --lexicon-topk 3 --platforms windows-amd64,linux-x86_64
    econmt.cli.export.export_runtime  precision=int8  lexicon=LIST  top=3  web=False  systems=['windows-amd64', 'linux-x86_64']
export MODEL NEW --web --precision float32
    econmt.cli.export.export_runtime  folder=MODEL  destination=NEW  precision=float32  lexicon=None  top=None  web=True  systems=[]
generate -m MODEL -c last COMPUTING
    econmt.cli.generate.load_reader  folder=MODEL  checkpoint=last
generate -m MODEL --prompt a --length 3 --top-k 4 --top-p 0.5 --temperature 2 --seed 9
    econmt.decoding.text_reader.TextReader.continued  prompt=a  length=3  top_k=4  top_p=0.5  temperature=2.0  seed=9
score -m MODEL -m MODEL -c best -c last SIDES COMPUTING
    econmt.api.commands.load  model=[MODEL, MODEL]  checkpoint=['best', 'last']  LOADED
score -m MODEL SIDES --batch-size 5 --ensemble-mode log_linear
    econmt.api.translation.TrainedModel.scorer  batch_size=5  mode=log_linear
rerank -i LIST -s TEXT/one.src -m MODEL --weight 2 --batch-size 5
    econmt.api.translation.TrainedModel.scorer  batch_size=5
rerank -i LIST -s TEXT/one.src -m MODEL COMPUTING
    econmt.api.commands.load  model=[MODEL]  LOADED
rerank -i LIST -s TEXT/one.src --reverse-models MODEL --reverse-weight 3
    econmt.cli.rerank.WeightedScorer  weight=3.0  reverse=True
rerank -i LIST -r TEXT/one.zh --metric chrf
    econmt.cli.rerank.by_reference  metric=chrf  tokenize=zh
translate -m MODEL -m MODEL -c last COMPUTING
    econmt.api.commands.load  model=[MODEL, MODEL]  checkpoint=['last']  LOADED
translate -m MODEL --restrict-lexicon LIST --restrict-lexicon-topk 3 --glossary TERMS --avoid-list AVOIDED --lm-weight 0.5 --language-model MODEL
    econmt.api.translation.TrainedModel.translator  restrict_lexicon=LIST  restrict_lexicon_topk=3  avoid=('C',)  language_model=MODEL
translate -m MODEL --ensemble-mode log_linear -b 3 --nbest-size 2 --batch-size 5 --chunk-size 6 --long-lines skip --markup
    econmt.api.translation.TrainedModel.translator  search={'beam_size': 3, 'nbest_size': 2, 'markup': True, 'batch_size': 5, 'chunk_size': 6, 'long_lines': 'skip', 'ensemble_mode': 'log_linear', 'attention': True}
translate -m MODEL --sample --top-k 4 --top-p 0.5 --temperature 2 --seed 9
    econmt.api.translation.TrainedModel.translator  search={'sample': 4, 'top_p': 0.5, 'temperature': 2.0, 'seed': 9}
translate -m MODEL --split-sentences --glossary TERMS --glossary-mode constrain
    econmt.api.translation.TrainedModel.translator  search={'attention': True, 'split_sentences': True, 'glossary_mode': 'constrain'}
translate -m MODEL --language-model MODEL --lm-weight 0.5 --replace-unk --restore-case
    econmt.api.translation.TrainedModel.translator  search={'attention': True, 'lm_weight': 0.5, 'replace_unk': True, 'restore_case': True}
translate -m MODEL --brevity-penalty-weight 2 --coverage-penalty-weight 0.5 --beam-search-stop first --block-ngram-repeat 0
    econmt.api.translation.TrainedModel.translator  search={'brevity_penalty_weight': 2.0, 'coverage_penalty_weight': 0.5, 'beam_search_stop': 'first', 'block_ngram_repeat': 0}
average -m MODEL -o NEW --threads 3
    econmt.cli.average.use_threads  threads=3
prepare quickstart -o NEW --verify data.max_length=5
    econmt.cli.prepare.prepare_data  folder=NEW  verify=True
profile quickstart --bucket 5x6 --batch 7 --data-dir TEXT
    econmt.cli.profile.find_workload  name=quickstart  batch=BatchChoice(bucket='5x6', batch=7)  data_dir=TEXT
bench select quickstart --bucket 5x6 --byte-limit 1KiB --seconds 7
    econmt.cli.bench.selection.choose  seconds=7.0  compiled=False  byte_limit=1024
bench select quickstart --bucket 5x6 --compiled
    econmt.cli.bench.selection.choose  seconds=600.0  compiled=True  byte_limit=None
bench training quickstart --precision bfloat16 --length 6 --seconds 7
    econmt.cli.bench.training.row_of  name=quickstart  precision=bfloat16  length=6  seconds=7.0
serve -m MODEL -b 3 --batch-size 5 --wait-ms 7 --max-characters 11 --max-file-characters 17 --max-waiting 13 --requests-per-minute 19
    econmt_serve.command.Settings  beam_size=3  batch_size=5  wait_ms=7.0  max_characters=11  max_file_characters=17  max_waiting=13  requests_per_minute=19
serve -m MODEL --no-split-sentences --restore-case --avoid-list AVOIDED --glossary-mode constrain
    econmt_serve.command.Settings  split_sentences=False  restore_case=True  avoid=('C',)  glossary_mode=constrain
serve -m MODEL --host 127.0.0.2 --port 7
    econmt_serve.server.bind  host=127.0.0.2  port=7
serve -m MODEL --port 0 COMPUTING
    econmt.api.commands.load  model=[MODEL]  LOADED
serve -m MODEL --port 0 --forwarded-allow-ips 10.0.0.1
    econmt_serve.server.Server  proxies=['10.0.0.1/32', '::ffff:10.0.0.1/128']
distill MODEL -s TEXT/one.src -b 3 --batch-size 5 --device cpu --threads 2 --precision float32
    econmt_distill.command.TeacherChoice  folder=MODEL  command=None  beam_size=3  nbest_size=1  batch_size=5  device=cpu  threads=2  precision=float32
distill MODEL -s TEXT/one.src -t TEXT/one.zh --nbest-size 2
    econmt_distill.command.TeacherChoice.with_nbest  size=2
distill MODEL a.b=1 -s TEXT/one.src -r own --valid V --test T --also A --also B --device cpu --threads 2
    econmt_distill.command.StudentChoice  recipe=own  overrides=('a.b=1',)  valid=V  test=T  also=('A', 'B')  device=cpu  threads=2
distill MODEL -s TEXT/one.src -t TEXT/one.zh -o NEW --shard-lines 7 --shortlist 3 --data-dir TEXT
    econmt_distill.command.Distillation  source=TEXT/one.src  target=TEXT/one.zh  output=NEW  shard_lines=7  shortlist=3  data_dir=TEXT
"""


IN_PYTHON = """
model.translate(['a'], avoid=['b'], glossary='g', restrict_lexicon='l', restrict_lexicon_topk=3, language_model='m')
    econmt.api.translation.TrainedModel.translator  avoid=['b']  glossary=g  restrict_lexicon=l  restrict_lexicon_topk=3  language_model=m  batch_size=None
model.translate(['a'], beam_size=4, nbest_size=2, batch_size=5, seed=7)
    econmt.api.translation.TrainedModel.translator  search={'beam_size': 4, 'nbest_size': 2, 'seed': 7}  batch_size=5
model.translate(['a'], sample=True, top_k=5, replace_unk=True)
    econmt.api.translation.Translator  options={'sample': 5, 'replace_unk': True, 'nbest_size': 1}  warn=WARN
model.score(['a'], ['b'], batch_size=5, ensemble_mode='log_linear')
    econmt.api.translation.Scorer  batch_size=5  mode=log_linear  warn=WARN
econmt.load('MODEL', 'last', device='cpu', threads=3, precision='bfloat16')
    econmt.api.interface.load_translation_models  folders=[MODEL]  checkpoints=['last']  device=cpu  threads=3  precision=bfloat16
econmt.evaluate(['a'], ['b'], ['bleu'], tokenize='char', lowercase=True)
    econmt.api.interface.make_metric  name=bleu  references=[['b']]  tokenize=char  lowercase=True
econmt.train('quickstart', {'training.seed': 2}, overwrite_output=True)
    econmt.api.interface.run_recipe  overwrite_output=True  resume_with_changes=False  verify=False
econmt.train('quickstart', search=[], resume_with_changes=True, verify=True)
    econmt.api.interface.run_recipe  overwrite_output=False  resume_with_changes=True  verify=True  search=[]
econmt.train('quickstart', {'training.seed': 2, 'output': 'ä'})
    econmt.api.interface.load_recipe  overrides=['training.seed=2', 'output="ä"']
econmt.train('quickstart', data_dir='TEXT', quiet=True)
    econmt.api.interface.search_path  data_dir=TEXT
"""


def cases(table: str) -> list[tuple[str, str]]:
    return re.findall(r"^(\S.*)\n    (.*)$", table, re.MULTILINE)


@pytest.fixture(scope="session")
def names(text: Path, word_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Words that stand for files and for several options in what is given to commands."""
    folder = tmp_path_factory.mktemp("options")
    content = {"one.src": "a\n", "one.zh": "A\n", "LIST": "0 ||| A ||| logprob= -1 ||| -1\n"}
    for name, written in {**content, "TERMS": "a = B\n", "AVOIDED": "C\n"}.items():
        (folder / name).write_text(written)
    for side in ("src", "trg"):
        (folder / f"valid.{side}").write_bytes((text / f"valid.{side}").read_bytes())
    files = {name: str(folder / name) for name in ("LIST", "TERMS", "AVOIDED", "NEW")}
    sides = f"-s {folder}/one.src -t {folder}/one.zh"
    options = {"COMPUTING": COMPUTING, "LOADED": LOADED, "SIDES": sides}
    return {**files, **options, "MODEL": str(word_model), "TEXT": str(folder)}


def record(monkeypatch: pytest.MonkeyPatch, name: str) -> dict[str, Any]:
    """Has a function keep its arguments, in what is returned, and then do nothing but raise an error."""
    arguments: dict[str, Any] = {}
    signature = inspect.signature(pkgutil.resolve_name(name))

    def function(*given: Any, **named: Any) -> NoReturn:
        bound = signature.bind(*given, **named)
        bound.apply_defaults()
        for parameter in signature.parameters.values():
            value = bound.arguments[parameter.name]
            arguments.update(value if parameter.kind is parameter.VAR_KEYWORD else {parameter.name: value})
        raise InputError("arrived")

    monkeypatch.setattr(name, function)
    return arguments


def check(arguments: dict[str, Any], expected: list[str]) -> None:
    for name, _, value in (each.partition("=") for each in expected):
        found = arguments[name]
        if value.startswith("{"):
            assert {**dict(found), **literal_eval(value)} == dict(found)
        elif value == "WARN":
            assert found is warnings.warn
        else:
            assert re.sub(r"PosixPath\('(.*?)'\)", r"\1", str(found)) == value, name


@pytest.mark.parametrize(("command", "arrival"), cases(ARRIVING))
def test_options_arrive(
    call: Call, names: dict[str, str], monkeypatch: pytest.MonkeyPatch, command: str, arrival: str
) -> None:
    words = re.compile(rf"\b({'|'.join(names)})\b")
    command, arrival = (words.sub(lambda word: names[word[0]], each) for each in (command, arrival))
    target, *expected = re.split("  +", arrival)
    if target.endswith("continued"):
        monkeypatch.setattr("econmt.cli.generate.load_reader", lambda *_: object.__new__(TextReader))
    arguments = record(monkeypatch, target)
    ended = call(command)
    assert (ended.code, "arrived" in ended.err) == (2, True), ended.err
    check(arguments, expected)


@pytest.mark.parametrize(("code", "arrival"), cases(IN_PYTHON))
def test_arguments_arrive(
    names: dict[str, str], monkeypatch: pytest.MonkeyPatch, code: str, arrival: str
) -> None:
    words = re.compile(r"\b(MODEL|TEXT)\b")
    code, arrival = (words.sub(lambda word: names[word[0]], each) for each in (code, arrival))
    model = econmt.load(names["MODEL"])
    target, *expected = re.split("  +", arrival)
    arguments = record(monkeypatch, target)
    with pytest.raises(InputError, match="arrived"):
        eval(code, {"econmt": econmt, "model": model})
    check(arguments, expected)


@pytest.mark.parametrize(
    "command",
    [
        "translate -m MODEL -i TEXT/one.src",
        "translate -m MODEL --glossary TERMS",
        "translate -m MODEL --avoid-list AVOIDED",
        "translate -m MODEL --restrict-lexicon LIST",
        "score -m MODEL -s TEXT/one.src -t TEXT/one.zh",
        "score -m MODEL -t TEXT/one.zh -s TEXT/one.src",
        "rerank -m MODEL -s TEXT/one.src -i LIST",
        "rerank -m MODEL -i LIST -s TEXT/one.src",
        "rerank -i LIST -r TEXT/one.zh",
    ],
)
def test_no_input_is_overwritten(call: Call, names: dict[str, str], command: str) -> None:
    words = re.sub(rf"\b({'|'.join(names)})\b", lambda word: names[word[0]], command).split()
    before = Path(words[-1]).read_text()
    ended = call(*words, "-o", words[-1])
    assert (ended.code, "is also an input" in ended.err) == (2, True), ended.err
    assert Path(words[-1]).read_text() == before
