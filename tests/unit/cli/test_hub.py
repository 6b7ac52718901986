"""Model cards that the Hub's own library reads, and models that are named as the Hub's; without any network."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import econmt
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.hub import FILES
from econmt.cli.model_card import card_of
from econmt.errors import InputError
from tests.conftest import fails_with
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_translate import failure
from tests.unit.training.tiny import metrics

TEXT = "a b c\nd\n"


@pytest.fixture
def exported(call: Call, word_model: Path, tmp_path: Path) -> Path:
    made = tmp_path / "made"
    ended = call("export", word_model, made, "--hub", "--license", "cc-by-nc-4.0")
    assert (ended.code, ended.lines) == (0, [str(made)])
    return made


def test_a_card_says_what_the_run_knows(exported: Path, word_model: Path) -> None:
    card = huggingface_hub.ModelCard.load(exported / "README.md")
    data = card.data
    assert data.language == ["src", "trg"]
    assert (data.license, data.library_name, data.pipeline_tag) == ("cc-by-nc-4.0", "econmt", "translation")
    (result,) = data.eval_results
    assert (result.task_type, result.metric_type) == ("translation", "bleu")
    assert result.dataset_name.endswith("/valid")
    assert "tok:13a" in result.metric_args["signature"]
    best = min(metrics(ModelFolder(word_model)), key=lambda row: row["valid_perplexity"])
    assert result.metric_value == round(best["bleu"], 2)
    signature = result.metric_args["signature"].replace("|", "\\|")  # else the table's cell ends there
    for words in (
        "# reverse: src to trg",
        f"| {result.metric_value:.2f} |",
        f"`{signature}`",
        "The model: cc-by-nc-4.0.",
        f"{best['valid_perplexity']:.3f}",
        f"{best['target_tokens_per_second']:,.0f}",
        "most memory in training",
        "econmt translate -m hf://OWNER/NAME",
    ):
        assert words in card.text


def test_a_folder_with_a_card_is_a_model(call: Call, exported: Path, word_model: Path) -> None:
    names = {"README.md", "recipe.yaml", "params.best.safetensors", "vocab.source.txt", "vocab.target.txt"}
    assert {path.name for path in exported.iterdir()} == names
    plain = call("translate", "-m", word_model, text=TEXT)
    assert call("translate", "-m", exported, text=TEXT).lines == plain.lines
    assert call("info", exported).code == 0


def test_a_run_without_figures_has_a_card_too(call: Call, word_model: Path, tmp_path: Path) -> None:
    bare, made = tmp_path / "bare", tmp_path / "made"
    assert call("export", word_model, bare).code == 0
    assert not (bare / "README.md").exists()
    assert call("export", bare, made, "--hub", "--license", "other").code == 0
    card = huggingface_hub.ModelCard.load(made / "README.md")
    assert card.data.eval_results is None
    assert "## Quality" not in card.text


def test_a_model_of_the_hub_is_fetched_and_translates(
    call: Call, exported: Path, word_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        """Copies what is asked for, as the Hub would."""
        asked.append((name, revision))
        place = tmp_path / f"cache-{len(asked)}"
        place.mkdir()
        for path in exported.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copyfile(path, place / path.name)
        return str(place)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    plain = call("translate", "-m", word_model, text=TEXT).lines
    assert call("translate", "-m", "hf://me/reverse-model", text=TEXT).lines == plain
    assert call("score", "-m", "hf://me/reverse-model@v1.0", text="a b\tB A\n").code == 0
    found = econmt.load(["hf://me/x", exported], device="cpu").translate(["a b c"])
    assert found[0].text == plain[0]
    assert asked == [("me/reverse-model", None), ("me/reverse-model", "v1.0"), ("me/x", None)]
    assert "README.md" not in FILES


def test_what_cannot_be_fetched_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = fails_with(LocalEntryNotFoundError("no connection\nand much more"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    failure(call("translate", "-m", "hf://me/x", text=TEXT), "hf://me/x: cannot be downloaded: no connection")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(InputError, match=r"pip install huggingface_hub, or use a model folder"):
        econmt.load("hf://me/x")


def test_a_card_does_not_mix_figures_of_two_checkpoints(word_model: Path, tmp_path: Path) -> None:
    """The results are those of a best checkpoint of before, on the test text."""
    copy = ModelFolder(shutil.copytree(word_model, tmp_path / "run"))
    best = min(metrics(copy), key=lambda row: row["valid_perplexity"])
    changed = {"best_update": 999, "corpus": "test", "test": "news", "bleu": 77.0}
    copy.results.write_text(json.dumps(json.loads(copy.results.read_text()) | changed))
    (tmp_path / "README.md").write_text(card_of(copy, "mit"))
    (result,) = huggingface_hub.ModelCard.load(tmp_path / "README.md").data.eval_results
    assert result.dataset_name.endswith("/valid")
    assert result.metric_value == round(best["bleu"], 2)
