from __future__ import annotations

import re
from pathlib import Path

import pytest

from econmt.config.recipe import load_recipe, parse_recipe, shipped_recipes
from tests.unit.cli.conftest import Call
from tests.unit.cli.test_refusals import refused

NAMES = {"quickstart", "iwslt", "multi30k", "tatoeba", "laws-en-fr", "groundhog", "best", "gnmt", "student"}
NAMES |= {"ptb", "wikitext2", "wikitext2-awd"}


def test_list_has_a_row_for_each_recipe(call: Call) -> None:
    done = call("recipes", "list")
    rows = done.out.splitlines()
    assert {row.split()[0] for row in rows if not row.startswith(" ")} == NAMES
    place = next(number for number, row in enumerate(rows) if row.startswith("multi30k"))
    assert rows[place].endswith("en-de multi30k/train")
    assert "image captions" in rows[place + 1]


def test_show_resolves_overrides(call: Call) -> None:
    done = call("recipes", "show", "iwslt", "training.batch.size=256")
    recipe = parse_recipe(done.out, "shown")
    assert recipe == load_recipe("iwslt", ["training.batch.size=256"])
    assert "threads: null" in done.out
    changed = call("recipes", "show", "iwslt", "training.batch.size=256", "--changed-only").out
    assert parse_recipe(changed, "shown") == recipe
    assert "threads" not in changed
    assert len(changed.splitlines()) < len(done.out.splitlines())


def test_copy_keeps_what_is_there(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("recipes", "copy", "tatoeba")
    assert done.out == "tatoeba.yaml\n"
    assert (tmp_path / "tatoeba.yaml").read_bytes() == shipped_recipes()["tatoeba"].read_bytes()

    (tmp_path / "mine.yaml").write_text("precious")
    refused(call("recipes copy tatoeba mine.yaml"), "mine.yaml: exists already")
    assert (tmp_path / "mine.yaml").read_text() == "precious"
    assert call("recipes", "copy", "tatoeba", "mine.yaml", "--force").code == 0
    assert (tmp_path / "mine.yaml").read_bytes() == shipped_recipes()["tatoeba"].read_bytes()

    (tmp_path / "folder").mkdir()
    assert call("recipes", "copy", "best", "folder").out == "folder/best.yaml\n"


def test_validate_tells_all_complaints(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_text("name: 3\noutput: x\n")
    done = call("recipes", "validate", "best", "bad.yaml", "groundhog")
    assert done.code == 2
    assert done.lines == ["best: ok (iwslt15-en-vi-best)", "groundhog: ok (iwslt15-en-vi-groundhog)"]
    assert done.err.splitlines() == [
        "econmt: error: bad.yaml:1: name: expected text, found 3",
        "econmt: error: bad.yaml:1: data: missing; text, subwords and filters",
        "econmt: error: bad.yaml:1: training: missing; optimisation, batches and checkpoints",
    ]
    assert call("recipes", "validate", *shipped_recipes().values()).code == 0


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_key_of_a_shipped_recipe_has_a_comment(name: str) -> None:
    file = shipped_recipes()[name]
    lines = file.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ")
    assert f"#   econmt train {name}" in lines
    bare = [line for line in lines if re.match(r" *[a-z_]+:", line) and not re.search(r" # \S", line)]
    assert bare == []
    sections = {"name", "output", "data", "model", "training"}
    sections |= {"decoding"} if load_recipe(name).task == "translation" else set()
    assert sections <= {line.partition(":")[0] for line in lines}


def test_the_iwslt_recipe_is_the_model_of_the_paper() -> None:
    recipe = load_recipe("iwslt")
    model, training = recipe.model, recipe.training
    assert (model.embedding, model.attention.type, model.attention.size) == (512, "additive", 512)
    assert (model.encoder.layers, model.encoder.size, model.encoder.bidirectional) == (2, 512, "bottom")
    assert (model.decoder.layers, model.decoder.size, model.decoder.input_feeding) == (2, 512, True)
    assert (training.batch.type, training.batch.size, training.bucket_width) == ("sentence", 128, 10)
    assert (training.optimizer.name, training.optimizer.learning_rate) == ("adam", 3e-4)
    assert training.early_stopping.metric == "bleu"
    assert training.early_stopping.max_num_checkpoint_not_improved == 5
    subwords = recipe.data.subwords.model_dump(exclude_defaults=True)
    assert subwords == {"type": "words", "source": 17191, "target": 7709}
