"""Toolkits of the comparison of quality by minute: models like that of recipe laws-en-fr, and transformers."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

from .. import toolkit as matched
from ..toolkit import Command, Places, Toolkit
from .econmt import Econmt
from .fairseq import Fairseq
from .opennmt import OpenNMT

RECIPE = "laws-en-fr"
SOURCE, TARGET = "en", "fr"
ENDLESS = 10_000_000
"""Updates of a run that ends at its last mark."""
START_SECONDS = 30
"""Seconds that econmt, whose own limit counts its start, gets beyond the last mark."""
BEGINS = "first update begins"
"""First words of the line that launchers print when training begins."""
TARGET_TOKENS = 6000
"""Padded tokens of a batch, as in the recipe."""
LOG_EVERY = 100
TRANSLATION_BATCH = 250
"""Sentences translated at a time."""
TF32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
"""Lets cuBLAS round factors to TF32, as cuDNN does by default."""
_BATCHES = (
    f"--max-tokens {TARGET_TOKENS} --share-all-embeddings --criterion label_smoothed_cross_entropy "
    "--label-smoothing 0.1 --num-workers 4 --no-save "
    "--no-save-optimizer-state --distributed-world-size 1"
)
_TRANSFORMER = (
    f"{_BATCHES} --arch transformer --dropout 0.1 --optimizer adam --adam-betas (0.9,0.98) --lr 7e-4 "
    "--lr-scheduler inverse_sqrt --warmup-updates 2000 --warmup-init-lr 1e-7 --clip-norm 1.0"
)


_MARK = re.compile(r"mark ([\d.]+): ([\d.]+) s, update (\d+), (\d+) bytes allocated")


class Checkpoint(NamedTuple):
    """Model of a moment of training.

    Attributes:
        mark: Seconds at which it was wanted.
        seconds: Seconds of training from the first update on.
        update: Updates so far.
        allocated_bytes: Largest memory that PyTorch's allocator gave out on the GPU until then.
        bleu, chrf: Scores of the validation text; None if they have not been measured.
    """

    mark: float
    seconds: float
    update: int
    allocated_bytes: int
    bleu: float | None = None
    chrf: float | None = None


class ByMinute(Toolkit):
    """Toolkit that saves a model at each mark; its launcher counts the seconds.

    One that translates itself leaves the translations of update U in the file ``hypotheses.U`` of its model folder, and
    those of the test text in ``hypotheses.test``.
    """

    changes: Sequence[str] = ()
    """Changes of the recipe, and further options, of those that train from econmt's store."""
    reads_store: ClassVar[bool] = False
    """True if it trains from econmt's store and needs no token files."""
    size: ClassVar[re.Pattern[str]]
    """Line of its log with the number of parameters."""

    def train_until(self, places: Places, model: Path, marks: Sequence[float]) -> Command:  # noqa: ARG002
        """Returns the command that trains until the last mark."""
        return self.train(places, model, ENDLESS)

    def checkpoints(self, lines: Sequence[str], model: Path, marks: Sequence[float]) -> list[Checkpoint]:  # noqa: ARG002
        """Returns the checkpoints in the order of their marks, from the log of training or what it wrote."""
        found = filter(None, map(_MARK.match, lines))
        return [Checkpoint(float(m[1]), float(m[2]), int(m[3]), int(m[4])) for m in found]

    def curve(self, lines: Sequence[str], model: Path) -> list[tuple[float, float]]:  # noqa: ARG002
        """Returns seconds of training and BLEU of all validations of the training itself."""
        return []

    def parameters(self, lines: Sequence[str]) -> int | None:
        """Returns the number of parameters that the log tells."""
        found = [match[1] for match in map(self.size.search, lines) if match]
        return int(found[0].replace(",", "")) if found else None


class FromStore(Econmt, ByMinute):
    """Program of this checkout, which trains from the given store."""

    reads_store = True
    size = re.compile(r"([\d,]+) parameters")

    def prepare(self, places: Places) -> list[Command]:  # noqa: ARG002
        """Prepares nothing: the recipe is shipped and the store is given."""
        return []


class EconmtByMinute(FromStore):
    """econmt's recipe as it is; it validates and saves as the recipe says, within the same seconds."""

    def train_until(self, places: Places, model: Path, marks: Sequence[float]) -> Command:
        """Returns the command that trains from the given store."""
        changes = f"data.prepared={places.data / 'store'}", f"output={model}"
        limit = f"training.max_seconds={round(marks[-1]) + START_SECONDS}"
        return Command.python(
            places, matched.LAUNCHER, "econmt", "train", RECIPE, *changes, limit, *self.changes
        )

    def checkpoints(self, lines: Sequence[str], model: Path, marks: Sequence[float]) -> list[Checkpoint]:
        """Returns the last checkpoint that was validated before each mark, as its table of metrics has it."""
        validated = self._validated(lines, model)
        before = [[each for each in validated if each.seconds <= mark] for mark in marks]
        return [rows[-1]._replace(mark=mark) for mark, rows in zip(marks, before, strict=True) if rows]

    def curve(self, lines: Sequence[str], model: Path) -> list[tuple[float, float]]:
        """Returns seconds and BLEU of all checkpoints."""
        return [(each.seconds, each.bleu) for each in self._validated(lines, model) if each.bleu is not None]

    @staticmethod
    def _validated(lines: Sequence[str], model: Path) -> list[Checkpoint]:
        began = next(float(line.split()[3]) for line in lines if line.startswith(BEGINS))
        with (model / "metrics.tsv").open(encoding="utf-8", newline="") as stream:
            return [
                Checkpoint(
                    float(row["seconds"]) - began,
                    float(row["seconds"]) - began,
                    int(row["update"]),
                    int(row["peak_memory_bytes"]),
                    float(row["bleu"]),
                )
                for row in csv.DictReader(stream, delimiter="\t")
            ]


class PlainTransformer(FromStore):
    """Transformer of :mod:`scripts.bench.transformer`, which translates when training is over."""

    name = "plain transformer, 4+4 layers of 384"
    precision = "bfloat16"
    sizes: ClassVar[str] = "econmt"

    def train_until(self, places: Places, model: Path, marks: Sequence[float]) -> Command:
        """Returns the command that trains from the given store."""
        words = RECIPE, model, f"data.prepared={places.data / 'store'}", *self.changes
        options = "--size", self.sizes, "--marks", *marks
        return Command.python(places, "-m", "scripts.bench", "transformer", *words, *options)


class PlainTransformerBase(PlainTransformer):
    """Transformer of the base size."""

    name = "plain transformer, base"
    sizes = "base"


class FairseqByMinute(Fairseq, ByMinute):
    """fairseq, whose binarised token files all of its models share."""

    size = re.compile(r"num\. shared model params: ([\d,]+)")
    log_every = LOG_EVERY
    translation_batch = TRANSLATION_BATCH

    def _binary(self, places: Places) -> Path:
        return places.data / "binary"

    def prepare(self, places: Places) -> list[Command]:
        """Returns the command that binarises the token files unless they are."""
        last = self._binary(places) / f"test.{places.source}-{places.target}.{places.target}.idx"
        return [] if last.is_file() else super().prepare(places)


class FairseqLstm(FairseqByMinute):
    """Architecture ``lstm`` with the layers of econmt's recipe."""

    name = "fairseq lstm"
    precision = "tf32"
    training_options = (
        f"{_BATCHES} --arch lstm --encoder-embed-dim 512 --encoder-hidden-size 256 --encoder-layers 2 "
        "--encoder-bidirectional --decoder-embed-dim 512 --decoder-hidden-size 512 --decoder-out-embed-dim 512 "
        "--decoder-layers 2 --dropout 0.2 --optimizer adam --adam-betas (0.9,0.999) --lr 1e-3 --clip-norm 1.0"
    )

    def variables(self) -> dict[str, str]:
        """Returns the variables of fairseq, and that of TF32."""
        return super().variables() | TF32


class FairseqTransformer(FairseqByMinute):
    """Transformer of about as many parameters as econmt's recipe has."""

    name = "fairseq transformer, 4+4 layers of 384"
    precision = "float16"
    encoder: ClassVar[tuple[int, int, int]] = 4, 384, 1024
    """Layers, width and inner width of the encoder."""
    training_options = (
        f"{_TRANSFORMER} --encoder-layers 4 --decoder-layers 4 --encoder-embed-dim 384 --decoder-embed-dim 384 "
        "--encoder-ffn-embed-dim 1024 --decoder-ffn-embed-dim 1024 --encoder-attention-heads 6 "
        "--decoder-attention-heads 6"
    )

    def train(self, places: Places, model: Path, updates: int) -> Command:
        """Returns the command of fairseq, in float16 on a GPU."""
        command = super().train(places, model, updates)
        return command._replace(words=[*command.words, *["--fp16"][: self.device == "cuda"]])

    def parameters(self, lines: Sequence[str]) -> int | None:
        """Returns the number that the log tells without the second, unused weights of this release's encoder layers."""
        layers, width, inner = self.encoder
        unused = layers * (4 * width * (width + 1) + 2 * width * inner + width + inner)
        counted = super().parameters(lines)
        return None if counted is None else counted - unused


class FairseqTransformerBase(FairseqTransformer):
    """Transformer of the base size: six layers of 512 on each side."""

    name = "fairseq transformer, base"
    encoder = 6, 512, 2048
    training_options = _TRANSFORMER


class OpenNMTByMinute(OpenNMT, ByMinute):
    """Recurrent model with the layers of econmt's recipe."""

    size = re.compile(r"number of parameters: (\d+)")
    precision = "tf32"
    log_every = LOG_EVERY
    translation_batch = TRANSLATION_BATCH
    config = OpenNMT.config | {
        "keep_checkpoint": -1, "report_every": LOG_EVERY, "num_workers": 2, "bucket_size": 65_536, "enc_layers": 2,
        "dec_layers": 2, "share_vocab": True, "share_embeddings": True, "share_decoder_embeddings": True,
        "dropout": [0.2], "label_smoothing": 0.1, "batch_size": TARGET_TOKENS, "batch_type": "tokens",
    }  # fmt: skip

    def variables(self) -> dict[str, str]:
        """Returns the variables of OpenNMT-py, and that of TF32."""
        return super().variables() | TF32


BY_MINUTE: dict[str, type[ByMinute]] = {
    "econmt": EconmtByMinute,
    "transformer": PlainTransformer,
    "transformer-base": PlainTransformerBase,
    "fairseq-lstm": FairseqLstm,
    "fairseq-transformer": FairseqTransformer,
    "fairseq-transformer-base": FairseqTransformerBase,
    "opennmt": OpenNMTByMinute,
}
"""Toolkits by the names that ``--only`` takes, in the order of the table."""
