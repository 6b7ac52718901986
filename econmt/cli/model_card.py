"""Model card of a trained model, with the YAML header that the Hugging Face Hub reads."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import econmt
from econmt.checkpoint.folder import ModelFolder
from econmt.checkpoint.tensor_files import read_tensors
from econmt.config.recipe import Data, Recipe, read_recipe
from econmt.config.yaml_reader import dump_yaml
from econmt.data.batching.store import META_FILE, open_prepared
from econmt.data.text.catalog import CATALOG
from econmt.errors import InputError
from econmt.export.model_folder import read_metrics
from econmt.training.results import ResultsFile, read_results
from econmt_memory.report.tables import format_bytes


class _CardFacts(NamedTuple):
    """Facts about a run, read from its files."""

    home: ModelFolder
    recipe: Recipe
    update: str
    parameters: int
    results: ResultsFile | None
    metrics: dict[str, float]
    counts: dict[str, int]


def check_licence(name: str) -> str:
    """Returns a licence by the Hub's name; raises InputError if the text cannot be one."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{1,40}", name):
        raise InputError(
            f"--license {name[:40]!r}: give it as the Hub names it, such as apache-2.0, cc-by-4.0 or other"
        )
    return name


def card_of(home: ModelFolder, licence: str) -> str:
    """Makes the card of the best checkpoint of a run; facts that its files lack are left out."""
    tensors, metadata = read_tensors(home.best)
    update = metadata.get("update", "")
    counts: dict[str, int] = {}
    if (home.prepared / META_FILE).is_file():
        counts = open_prepared(home.prepared).statistics["train"]
    facts = _CardFacts(
        home,
        read_recipe(home.recipe),
        update,
        sum(tensor.numel() for tensor in tensors.values()),
        read_results(home),
        next((row for row in read_metrics(home.metrics) if str(row["update"]) == update), {}),
        counts,
    )
    header, data = _header(facts, licence), _data(facts, licence)
    return "\n".join(filter(None, (header, _introduction(facts), _quality(facts), data, _costs(facts))))


def _languages(recipe: Recipe) -> list[str]:
    """Returns the codes of the languages, if the suffixes of the text files are codes."""
    sides = [recipe.data.source, recipe.data.target] if isinstance(recipe.data, Data) else []
    codes = [side.lower().replace("_", "-").partition("-")[0] for side in sides]
    return [code for code in dict.fromkeys(codes) if re.fullmatch("[a-z]{2,3}", code)]


def _bleu(facts: _CardFacts) -> float | None:
    """Returns BLEU of the best checkpoint: from the results if these are its, else from the metrics."""
    results = facts.results
    if results is not None and str(results.best_update) == facts.update:
        return results.bleu
    value = facts.metrics.get("bleu", math.nan)
    return None if math.isnan(value) else value


def _evaluated(facts: _CardFacts) -> str:
    """Returns the name of the text that BLEU was computed on."""
    results, data = facts.results, facts.recipe.data
    if results is not None and str(results.best_update) == facts.update and results.corpus == "test":
        return results.test or ""
    return data.valid


def _header(facts: _CardFacts, licence: str) -> str:
    translates, languages = isinstance(facts.recipe.data, Data), _languages(facts.recipe)
    task = "translation" if translates else "text-generation"
    header: dict[str, Any] = {
        **({"language": languages} if languages else {}),
        "license": licence,
        "library_name": "econmt",
        "pipeline_tag": task,
        "tags": ["econmt", "lstm", *(["translation", "attention"] if translates else ["language-model"])],
    }
    bleu = _bleu(facts)
    if bleu is not None:
        text = _evaluated(facts)
        header["metrics"] = ["bleu"]
        metric = {"type": "bleu", "value": round(bleu, 2), "name": "BLEU"}
        if facts.results is not None:
            metric["args"] = {"signature": facts.results.signature}
        results = [{"task": {"type": task}, "dataset": {"name": text, "type": text}, "metrics": [metric]}]
        header["model-index"] = [{"name": facts.recipe.name, "results": results}]
    return f"---\n{dump_yaml(header)}---\n"


def _translate_line(data: Data) -> str:
    """Returns a command line for trying the model."""
    if not data.source_factors:
        return 'echo "..." | econmt translate -m hf://OWNER/NAME\n'
    files = "".join(f" --input-factors text.{name}" for name in data.source_factors)
    return f"econmt translate -m hf://OWNER/NAME -i text.{data.source}{files}\n"


def _introduction(facts: _CardFacts) -> str:
    data, title, kind = facts.recipe.data, "a language model", "A language model"
    command = "hf download OWNER/NAME --local-dir model && econmt generate -m model\n"
    if isinstance(data, Data):
        title, kind = f"{data.source} to {data.target}", "An attention-LSTM translation model"
        command = _translate_line(data)
    return (
        f"# {facts.recipe.name}: {title}\n\n{kind} of {facts.parameters:,} parameters, trained with econmt "
        f"{econmt.__version__}; the whole recipe is in `recipe.yaml`.\n\n"
        f"```bash\npip install '.[hub]'  # in a checkout of econmt\n{command}```\n"
    )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    # A vertical bar ends a cell of Markdown even in code, and BLEU's signature is full of them.
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "".join(f"| {name} | {text} |\n" for name, text in cells)


def _quality(facts: _CardFacts) -> str:
    rows = []
    bleu, results = _bleu(facts), facts.results
    if bleu is not None:
        rows.append((f"BLEU on {_evaluated(facts)}", f"{bleu:.2f}"))
        if results is not None:
            rows.append(("its signature", f"`{results.signature}`"))
    if "valid_perplexity" in facts.metrics:
        rows.append((f"perplexity of {facts.recipe.data.valid}", f"{facts.metrics['valid_perplexity']:.3f}"))
    return f"## Quality\n\n| | |\n|---|---|\n{_table(rows)}" if rows else ""


def _data(facts: _CardFacts, licence: str) -> str:
    data = facts.recipe.data
    lines = ["## Data and licence", "", f"The model: {licence}. It was trained on", ""]
    for prefix in data.train:
        known = CATALOG.get(prefix.partition("/")[0])
        of_text = "" if known is None else f": {known.origin}; licence of the text: {known.licence}"
        lines.append(f"- {prefix}{of_text}")
    if facts.counts:
        unit = "pairs" if isinstance(data, Data) else "lines"
        lines += ["", f"in all {facts.counts['pairs']:,} {unit} of {facts.counts['lines']:,}."]
    lines += ["", f"Validated on {data.valid}" + (f", tested on {data.test}." if data.test else "."), ""]
    return "\n".join(lines)


def _costs(facts: _CardFacts) -> str:
    metrics = facts.metrics
    rows = [("file of parameters", format_bytes(facts.home.best.stat().st_size))]
    for key, name, form in (
        ("target_tokens", "target tokens read in training", "{:,.0f}"),
        ("seconds", "seconds of training", "{:,.0f}"),
        ("target_tokens_per_second", "target tokens a second in training", "{:,.0f}"),
    ):
        if key in metrics:
            rows.append((name, form.format(metrics[key])))
    if "peak_memory_bytes" in metrics:
        where = "GPU" if facts.recipe.training.device.startswith("cuda") else "process or GPU"
        rows.append((f"most memory in training ({where})", format_bytes(int(metrics["peak_memory_bytes"]))))
    return f"## Memory and speed\n\n| | |\n|---|---|\n{_table(rows)}"
