"""Models by language pair, and taken anew when their folders change."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import starmap
from pathlib import Path

import pytest
import torch

import econmt
from econmt.api import TrainedModel, saved_model
from econmt.api.requests import Glossary, constraint_tokens
from econmt.checkpoint.tensor_files import read_tensors, write_tensors
from econmt.data.text.vocabulary import UNK
from econmt.decoding.results import hard_alignment, translation_of
from econmt.decoding.search.beam import Hypothesis
from econmt.decoding.translation import Translation
from econmt.errors import InputError
from econmt_serve.access import Keys
from econmt_serve.answers import languages
from econmt_serve.app import Service
from econmt_serve.models import LoadedModels, Served, TranslationJob, by_pair
from econmt_serve.server import Server, bind
from econmt_serve.settings import Refused, Settings
from tests.conftest import PATIENCE, fails_with
from tests.unit.cli.test_runtime import two_targets
from tests.unit.serving.conftest import MORE, Client, serving
from tests.unit.training.tiny import Run


@pytest.fixture(scope="module")
def better(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model of the same shape and vocabulary with other parameters."""
    home = tmp_path_factory.mktemp("better")
    shutil.copytree(folder.parent / "prepared", home / "prepared")
    run = Run(folder.parent, home / "run", (*MORE, "training.seed=9"))
    run.train()
    return run.folder.path


@pytest.fixture
def mine(folder: Path, tmp_path: Path) -> Path:
    """A copy of the folder that a test may change."""
    return Path(shutil.copytree(folder, tmp_path / "mine"))


def put(source: Path, target: Path) -> None:
    """Puts parameters in the place of others, as training does."""
    fresh = target / "params.best.safetensors.tmp"
    shutil.copyfile(source / "params.best.safetensors", fresh)
    fresh.replace(target / "params.best.safetensors")


def test_models_of_a_pair_are_an_ensemble_among_others(folder: Path, better: Path, mine: Path) -> None:
    recipe = mine / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("target: trg", "target: fr", 1))
    served = by_pair([folder, mine, better], Settings())
    pairs = [(*each.pairs[0][1:], len(each.folders)) for each in served]
    assert pairs == [("src", "trg", 2), ("src", "fr", 1)]
    single = econmt.load([folder, better]).translate(["a b c"])[0]
    (answer,) = served[0].loaded.translate([econmt.Request("a b c")], TranslationJob())
    assert isinstance(answer, tuple)
    assert answer.text == single.text
    served[1].loaded.beam = 2
    told = asyncio.run(Service(served, Settings(), Keys())._frontend(None))
    assert json.loads(told.body)["alternatives"] == 1, "of all pairs"
    with pytest.raises(InputError, match="no such model folder"):
        by_pair([mine / "nosuch"], Settings())


@pytest.fixture(scope="module")
def tagged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_targets(folder.parent, tmp_path_factory.mktemp("tagged"))


def test_a_target_among_several_is_a_tag_before_each_sentence(tagged: Path) -> None:
    lines = [f"<2{code}> {text}" for code in ("de", "fr") for text in ("a b!", "C")]
    made = [each.text for each in econmt.load(tagged, precision="float32").translate(lines)]
    assert len({*made}) == 4
    german, french = " ".join(made[:2]), " ".join(made[2:])
    with serving(tagged, Settings()) as client:

        def ask(q: object, **languages: str) -> object:
            return client.post("/translate", q=q, **languages).json["translatedText"]

        listed = [(each["code"], each["targets"]) for each in client.get("/languages").json]
        assert listed == [("fr", ["de"]), ("de", ["fr"])]
        languages = client.get("/frontend/settings").json["language"]
        assert [each["code"] for each in languages.values()] == ["auto", "fr"]
        assert ask("a b! C\n3\n<2fr> C", target="de") == f"{german}\n3\n{made[3]}"
        assert ask("a b! C", source="de", target="fr") == french
        for prefix, target in ("<2fr>", "de"), (" ", "fr"):
            assert ask({"text": "C", "source_prefix": prefix}, target=target) == made[3]
        file = client.ask("POST", "/translate_file?target=de", b"a b! C\n", {"Content-Type": "text/plain"})
        assert file.content.decode() == f"{german}\n"
        refusal = client.post("/translate", q="a b").json
        assert refusal["error"] == "source auto and target none fit several pairs; name the target"
        assert refusal["hint"] == "this server translates auto to fr, auto to de"
        assert client.post("/translate", q="a b", source="fr", target="fr").status == 400
    with pytest.raises(InputError, match="for one language pair; send them in requests"):
        by_pair([tagged], Settings(avoid=("A",)))


def test_a_model_of_several_targets_beside_one_of_a_pair(tagged: Path, mine: Path, tmp_path: Path) -> None:
    several = Path(shutil.copytree(tagged, tmp_path / "several"))
    for recipe in (each / "recipe.yaml" for each in (several, mine)):
        recipe.write_text(recipe.read_text().replace("source: src", "source: en", 1))
    recipe.write_text(recipe.read_text().replace("target: trg", "target: fr", 1))
    for first, folders in ("mine", [mine, several]), ("several", [several, mine]):
        service = Service(by_pair(folders, Settings()), Settings(), Keys())
        asked = ("en", "fr"), ("auto", "fr"), ("en", "de"), ("de", "")
        pairs = [(each.served.folders[0].name, *each[1:]) for each in starmap(service._pair, asked)]
        rest = [("several", *each) for each in (("auto", "fr"), ("en", "de"), ("de", "fr"))]
        assert pairs == [(first, "en", "fr"), *rest]
        listed = sorted((each["code"], sorted(each["targets"])) for each in languages(service._pairs))
        assert listed == [("de", ["fr"]), ("en", ["de", "fr"]), ("fr", ["de"])]


def test_a_source_prefix_is_read_and_does_not_count_as_a_word(tagged: Path) -> None:
    model = econmt.load(tagged, precision="float32")
    requests = [econmt.Request(text, source_prefix="<2de>") for text in ("a b c", "A B", "3", "")]
    terms = Glossary({"b": "D E", "<": "C"})
    found, capitals, *copies = model.translate(requests, restore_case=True, glossary=terms)
    plain, small = model.translate(["<2de> a b c", "<2de> A b"], glossary=Glossary({"b": "D E"}))
    assert (found.text, found.score, found.source_tokens) == (plain.text, plain.score, plain.source_tokens)
    assert plain.attention is not None
    seen = plain.attention[:, 1:], plain.source_tokens[1:]
    words = hard_alignment(*seen, plain.tokens, model.vocabularies)
    assert found.hypotheses[0].alignment == words != []
    assert capitals.text == small.text.upper()
    assert len({each.log_probability for each in model.score([requests[0], "<2de> a b c"], ["A"] * 2)}) == 1
    assert [each.text for each in copies] == ["3", ""]
    attention = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.0, 1.0]])
    unknown = Hypothesis([UNK], 0.0, 0.0, attention, cut=False)
    line = "<2de> a", model.vocabularies.source.encode("<2de> a"), [unknown], iter("?"), model.vocabularies
    assert translation_of(*line, "<2de> ", replace_unk=True).text == "a"


def test_new_parameters_are_tried_at_once_after_broken(better: Path, mine: Path) -> None:
    full = [False]

    def loaded(folders: Sequence[Path]) -> TrainedModel:
        if full[0]:
            raise MemoryError
        return econmt.load(list(folders))

    served = Served([mine], Settings(), loaded)

    def tries(count: int) -> str:
        """F for each check of the folder that fails, a dot for one that tries nothing, ! for a success."""
        said = ""
        for _ in range(count):
            try:
                said += "!" if served.reload() else "."
            except (InputError, MemoryError):
                said += "F"
        return said

    (mine / "params.best.safetensors").write_bytes(b"broken")
    assert tries(11) == "F..F....F.."
    assert served.loaded.translate([econmt.Request("a b c")], TranslationJob()), "those before are there"
    (mine / "params.best.safetensors").write_bytes(b"broken otherwise")
    assert tries(9) == "F..F....F", "as if it was the first"
    put(better, mine)
    assert tries(4) == "!..."
    (mine / "params.best.safetensors").write_bytes(b"broken")
    assert tries(4) == "F..F", "also after a success"
    full[0] = True
    put(better, mine)
    assert tries(1) == "F"
    full[0] = False
    assert tries(4) == "..!.", "of the same file, when it can be loaded"
    served.tags = {"de": "<2de>"}
    put(better, mine)
    assert tries(1) == "F", "a model of other target languages"


def test_a_reload_tells_both_checkpoints(folder: Path, better: Path, mine: Path) -> None:
    served = Served([mine], Settings())
    rows = (folder / "metrics.tsv").read_text().split("\n")
    names, values = (row.split("\t") for row in rows[:2])
    values[names.index("bleu")] = "7.25"
    put(better, mine)
    (mine / "metrics.tsv").write_text("\n".join(["\t".join(row) for row in (names, values)]) + "\n")
    old = dict(zip(names, rows[1].split("\t"), strict=True))["bleu"]
    # The files of both have the same update, since both runs are equally long.
    assert served.reload() == f"{mine}: update 12 (BLEU 7.2) replaces update 12 (BLEU {float(old):.1f})"
    (mine / "metrics.tsv").unlink()
    put(folder, mine)
    assert served.reload() == f"{mine}: update 12 replaces update 12 (BLEU 7.2)"
    put(folder, mine)
    assert served.reload() == f"{mine}: the same parameters are loaded again"
    tensors, metadata = read_tensors(folder / "params.best.safetensors")
    write_tensors(mine / "params.best.safetensors", tensors, {**metadata, "update": "6"})
    assert served.reload() == f"{mine}: update 6 replaces update 12"


def test_few_searches_are_kept_whatever_is_asked(folder: Path, model: TrainedModel) -> None:
    served = Served([folder], Settings(), partial(econmt.load, precision="float32"))
    request = econmt.Request("a b c d")
    for nbest in range(1, 5):
        expected = model.translate([request], nbest_size=nbest)[0].hypotheses
        for attention in (False, True):
            (answer,) = served.loaded.translate([request], TranslationJob(nbest, attention))
            assert isinstance(answer, Translation)
            assert [each.text for each in answer.hypotheses] == [each.text for each in expected]
    assert len(served.loaded._translators) == 3


def test_lists_of_the_server_count_in_plain_requests(folder: Path) -> None:
    """A term as long as any translation may be fits, a longer one does not."""
    translator = econmt.load(folder).translator({})
    _, most = constraint_tokens(translator, econmt.Request("a"))
    for count in (most, most + 1):
        settings = Settings(glossary=Glossary({"a": " ".join("A" * count)}))
        loaded = Served([folder], settings, partial(econmt.load, precision="float32")).loaded
        answers = loaded.translate([econmt.Request("a"), econmt.Request("b")], TranslationJob())
        assert isinstance(answers[1], Translation)
        assert isinstance(answers[0], Refused) == (count > most)


def test_a_model_of_the_hub_is_served_from_its_copy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        saved_model, "local_model", lambda name: folder if str(name).startswith("hf:") else name
    )
    (served,) = by_pair([Path("hf://some/model")], Settings())
    assert served.folders == [folder]


def test_a_failed_reload_leaves_the_server_at_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    errors = iter((RuntimeError("no\nmemory"), KeyError("update"), InputError("no folder")))
    done = threading.Event()

    def fails(_: Served) -> str:
        for error in errors:
            raise error
        done.set()
        return ""

    monkeypatch.setattr(Served, "reload", fails)
    with serving(folder, Settings(watch_seconds=0.02)) as client:
        while not done.is_set():  # a watch that ends stops the server
            assert client.get("/health").status == 200
        assert client.post("/translate", q="a b c").status == 200
    said = [
        f"econmt: warning: the parameters before go on: {each}"
        for each in ("RuntimeError: no\\nmemory", "KeyError: 'update'", "no folder")
    ]
    assert [line for line in capfd.readouterr().err.splitlines() if "go on" in line] == said


@pytest.mark.parametrize(
    ("name", "told"), [("tokens", "Exception in ASGI application"), ("translate", "division by zero")]
)
def test_a_bug_is_answered_and_told_and_the_server_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, told: str
) -> None:
    with serving(folder, Settings()) as client:
        monkeypatch.setattr(LoadedModels, name, lambda *_: 1 / 0)
        answer = client.post("/translate", q="a b c")
        assert (answer.status, answer.json) == (500, {"error": "this is a bug in econmt: ZeroDivisionError"})
        monkeypatch.undo()
        assert client.post("/translate", q="a b c").status == 200
        failed = b"econmt_failed_batches_total 1.0" in client.get("/metrics").content
        assert failed == (name == "translate")
    assert told in caplog.text


def test_a_sentence_too_long_to_be_translated_whole_is_refused(mine: Path) -> None:
    recipe = mine / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_input_length: 1000", "max_input_length: 4", 1))
    served = Served([mine], Settings())
    assert served.loaded.tokens(econmt.Request("a b c"), "line 1") == 4
    with pytest.raises(Refused, match="line 2: a sentence of 6 tokens; at most 4 are translated whole"):
        served.loaded.tokens(econmt.Request("a b c", source_prefix="d"), "line 2")
    numbers = econmt.Request("1 2 3 4 5 6")
    assert served.loaded.tokens(numbers, "line 3") > 4, "a line without words is copied whole"


def test_a_server_takes_better_parameters_up_while_it_answers(folder: Path, better: Path, mine: Path) -> None:
    texts = ["a b c d", "h g f", "b d"]
    old, new = (
        [t.text for t in econmt.load(each, precision="float32").translate(texts)] for each in (folder, better)
    )
    assert old != new

    def ask(client: Client) -> list[str]:
        found: list[str] = client.post("/translate", q=texts).json["translatedText"]
        return found

    with serving(mine, Settings(watch_seconds=0.02)) as client:
        assert ask(client) == old
        put(better, mine)
        end = time.monotonic() + PATIENCE
        while (found := ask(client)) != new:
            assert found == old
            assert time.monotonic() < end, "the better parameters never came"
        for result in ("done", "failed"):  # a failed one is tried again, and counted again
            while f'econmt_reloads_total{{result="{result}"}}'.encode() not in client.get("/metrics").content:
                assert time.monotonic() < end
            (mine / "params.best.safetensors").write_bytes(b"no parameters")
        assert ask(client) == new


def test_a_lost_device_ends_the_server_with_an_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service([Served([folder], Settings())], Settings(), Keys())
    server = Server(service)
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(LoadedModels, "translate", fails_with(lost))
    with bind("127.0.0.1", 0) as bound, ThreadPoolExecutor(1) as threads:
        running = threads.submit(server.run, bound)
        answer = Client(bound.getsockname()[1], service, []).post("/translate", q="a b c")
        with pytest.raises(RuntimeError, match="CUDA error"):
            running.result(PATIENCE)
    assert answer.json == {"error": "the server is stopping; ask again when it is back"}
    assert answer.status == 503


def test_a_signal_that_comes_before_the_server_waits_for_one_ends_it(folder: Path) -> None:
    server = Server(Service([Served([folder], Settings())], Settings(), Keys()))
    server._server.interrupts.received = signal.SIGTERM
    with bind("127.0.0.1", 0) as bound, ThreadPoolExecutor(1) as threads:
        assert threads.submit(server.run, bound).result(PATIENCE).name == "SIGTERM"
