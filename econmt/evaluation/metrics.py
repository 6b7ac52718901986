"""BLEU, chrF and TER with sacreBLEU, and the significance of the difference of two systems.

Every figure is sacreBLEU's own: the same text on its command line gives the same number and the same signature.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sacrebleu.metrics.base import Metric
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from sacrebleu.metrics.ter import TER
from sacrebleu.significance import PairedTest, Result

from econmt.config.recipe import Recipe
from econmt.errors import EconmtError, InputError

# Silences sacreBLEU's advice about names of tokenizers.
logging.getLogger("sacrebleu").setLevel(logging.ERROR)

METRICS = ("bleu", "chrf", "ter")
_BY_LANGUAGE = {
    **dict.fromkeys(("zh", "zho", "chi", "cmn", "yue", "wuu", "nan", "hak", "lzh"), "zh"),
    **dict.fromkeys(("ja", "jpn"), "ja-mecab"),
    **dict.fromkeys(("ko", "kor"), "ko-mecab"),
    **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm", "my", "mya", "bur"), "char"),
    **dict.fromkeys(("bo", "bod", "tib", "dz", "dzo"), "char"),
}
"""sacreBLEU's tokenizers for languages without spaces between words or with rich morphology; others: 13a."""
_EXTRAS = {"ja-mecab": "sacrebleu[ja]", "ko-mecab": "sacrebleu[ko]"}
_HIGHER_IS_BETTER = {"bleu": True, "chrf": True, "ter": False}


class Score(NamedTuple):
    """Value of a metric for a corpus.

    Attributes:
        name: its name as sacreBLEU writes it: BLEU, chrF2, TER.
        value: its value in percent, not rounded.
        signature: sacreBLEU's signature, which has everything needed to compute it again.
        text: value, signature and details (precisions, brevity penalty) as printed by sacreBLEU, rounded.
    """

    name: str
    value: float
    signature: str
    text: str


class Comparison(NamedTuple):
    """Result of one system in a paired bootstrap test against a baseline.

    Attributes:
        system: its name. value: its metric in percent.
        mean, interval: mean and half width of the 95 % interval over the resampled test sets.
        p_value: probability of a difference at least this large between equally good systems; None for the baseline.
        better: True if the value is better than the baseline's; None if it is equal, or for the baseline.
    """

    system: str
    value: float
    mean: float
    interval: float
    p_value: float | None
    better: bool | None


class Significance(NamedTuple):
    """Result of a paired bootstrap test for one metric, the baseline first."""

    name: str
    signature: str
    systems: list[Comparison]


class Tokenizer(NamedTuple):
    """Tokenizer of BLEU: sacreBLEU's name, and a note for the user, usually empty."""

    name: str
    note: str = ""


def tokenizer_of(language: str) -> Tokenizer:
    """Returns BLEU's tokenizer for a target language, given as the suffix of its files: ``ja``, ``zh_CN``, ``tok.ko``.

    If the tokenizer of the language is not installed, BLEU counts single characters.
    """
    parts = re.split(r"[._-]", language.lower())
    name = next((_BY_LANGUAGE[part] for part in parts if part in _BY_LANGUAGE), "13a")
    if name in _EXTRAS and not _is_installed(name):
        return Tokenizer(
            "char",
            f"BLEU of {language} counts characters: the tokenizer {name} is not installed (pip install "
            f"'{_EXTRAS[name]}')",
        )
    return Tokenizer(name)


def recipe_tokenizer(recipe: Recipe, signature: str = "") -> Tokenizer:
    """Returns BLEU's tokenizer of a run: the recipe's, the one of earlier checkpoints, or that of the target language.

    ``signature`` of the run's last BLEU names the tokenizer of earlier checkpoints; it is empty at the start.

    Raises:
        EconmtError: The tokenizer is not installed.
    """
    chosen = recipe.training.bleu_tokenizer
    began = re.search(r"\btok:([^|]+)", signature)
    if chosen == "auto" and began is None:
        return tokenizer_of(recipe.pairs.target)
    name = began[1] if began is not None and chosen == "auto" else chosen
    make_metric("bleu", [[""]], tokenize=name)
    return Tokenizer(name)


def _is_installed(tokenizer: str) -> bool:
    try:
        BLEU(tokenize=tokenizer)
    except RuntimeError:
        return False
    return True


def make_metric(
    name: str, references: Sequence[Sequence[str]], *, tokenize: str | None = None, lowercase: bool = False
) -> Metric:
    """Returns a metric of sacreBLEU with its defaults.

    Args:
        name: one of :data:`METRICS`. references: a list of lines for each set of references.
        tokenize: BLEU's tokenizer, sacreBLEU's default if None. lowercase: ignore case (TER does so by default).

    Raises:
        InputError: if there is no such metric or tokenizer.
        EconmtError: if the tokenizer is not installed.
    """
    known = [list(lines) for lines in references]
    if name == "bleu":
        if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
            raise InputError(
                f"tokenizer '{tokenize}': unknown; give one of {', '.join(sorted(BLEU.TOKENIZERS))}"
            )
        try:
            return BLEU(references=known, tokenize=tokenize, lowercase=lowercase)
        except RuntimeError:
            extra = _EXTRAS.get(str(tokenize), "sacrebleu")
            raise EconmtError(f"tokenizer '{tokenize}': not installed; pip install '{extra}'") from None
        except OSError as error:  # some tokenizers download a model
            raise EconmtError(f"tokenizer '{tokenize}': its model cannot be fetched ({error})") from None
    if name == "chrf":
        return CHRF(references=known, lowercase=lowercase)
    if name == "ter":
        return TER(references=known)
    raise InputError(f"metric '{name}': unknown; give some of {', '.join(METRICS)}")


def corpus_score(metric: Metric, hypotheses: Sequence[str], *, width: int = 2) -> Score:
    """Computes a metric, which contains the references, for a corpus; its text has ``width`` decimals."""
    result = metric.corpus_score(list(hypotheses), None)
    _forget_lines()
    signature = str(metric.get_signature())
    return Score(result.name, float(result.score), signature, result.format(width, signature=signature))


def _forget_lines() -> None:
    """Clears the caches of sacreBLEU's tokenizers.

    They keep the last 65,536 lines and the tokenizer of every metric, so that runs with many validations would grow by
    tens of megabytes.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("sacrebleu.tokenizers."):
            for kind in vars(module).values():
                for function in vars(kind).values() if isinstance(kind, type) else ():
                    if hasattr(function, "cache_clear"):
                        function.cache_clear()


def sentence_bleu(tokenize: str) -> BLEU:
    """Returns sacreBLEU's metric for single sentences: exponential smoothing, effective order."""
    return BLEU(effective_order=True, tokenize=tokenize)


def bleu(hypotheses: Sequence[str], references: Sequence[str], tokenize: str | None = None) -> Score:
    """Computes cased, detokenised BLEU with sacreBLEU's defaults and the tokenizer of a sacreBLEU name, 13a if None.

    Raises:
        ValueError: if there are not as many hypotheses as references, or none.
    """
    if len(hypotheses) != len(references) or not hypotheses:
        raise ValueError(f"got {len(hypotheses)} hypotheses and {len(references)} references")
    return corpus_score(make_metric("bleu", [references], tokenize=tokenize), hypotheses)


def paired_bootstrap(
    systems: Mapping[str, Sequence[str]], metrics: Mapping[str, Metric], samples: int = 1000
) -> list[Significance]:
    """Compares systems with the first of them by paired bootstrap resampling (Koehn, 2004), as sacreBLEU does.

    Args:
        systems: lines of at least two systems by name, the baseline first.
        metrics: metrics by name, which contain the references.
        samples: number of resampled test sets. The seed is sacreBLEU's (``SACREBLEU_SEED``, 12345).
    """
    assert len(systems) > 1
    named: list[tuple[str, Sequence[str]]] = [(name, list(lines)) for name, lines in systems.items()]
    test = PairedTest(named, metrics, None, test_type="bs", n_samples=samples)
    signatures, scores = test()
    outcome = []
    # The results have sacreBLEU's names, in the order of the metrics.
    for (key, signature), metric in zip(signatures.items(), metrics, strict=True):
        results = [result for result in scores[key] if isinstance(result, Result)]
        baseline = results[0].score
        comparisons = [
            Comparison(
                name,
                float(result.score),
                math.nan if result.mean is None else float(result.mean),
                math.nan if result.ci is None else float(result.ci),
                None if result.p_value is None else float(result.p_value),
                None
                if result.p_value is None or result.score == baseline
                else (result.score > baseline) == _HIGHER_IS_BETTER[metric],
            )
            for name, result in zip(systems, results, strict=True)
        ]
        outcome.append(Significance(key, str(signature), comparisons))
    return outcome
