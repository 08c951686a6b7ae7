"""nearsense-train classifier: a head that reads labels from the embeddings of an encoder."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32, Int64
from pydantic import BaseModel, ConfigDict, NonNegativeFloat, PositiveInt
from sklearn.metrics import f1_score  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional

from encoder import SentenceEncoder
from encoder.classifier import HEAD_NAME, HEADS, ClassifierHead, write_head
from encoder.model_dir import read_spec
from training.config import Classes, Data, FinetuneRun, Loop, Optimizer, RunError
from training.data import Corpus
from training.metrics import judge_labels
from training.source import Source
from training.store import report

logger = logging.getLogger(__name__)

_TEXTS_AT_ONCE = 4096
# Embeddings have length 1, so that weights of the size of 1 would tell little; this puts the search where they end up.
_SCALE = 10.0


class ClassifierRun(BaseModel):
    """What a head is made from. The columns of each corpus are the text and its label."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    data: Data = Data()
    corpora: tuple[Corpus, ...]
    validation: tuple[Corpus, ...] = ()
    """Rows to stop and to calibrate by, half each; by default a tenth of each corpus, which is not trained on."""
    tests: dict[str, tuple[Corpus, ...]] = {}
    """Rows that are only measured, by the name under which the figures are stored."""
    labels: dict[str, str] = {}
    """Names for the labels of the files, such as "1" = "positive"; others stay as they are."""
    decay: NonNegativeFloat = 1e-4
    """Weight of the squared weights in the loss."""
    most_rounds: PositiveInt = 100
    patience: PositiveInt = 5
    """Rounds without a better validation macro-F1 after which the search ends; the best round's weights are kept."""
    loop: Loop = Loop(steps=1000)
    """Of the encoder's own training, with --fine-tune; so are `optimizer` and `batch_size`."""
    optimizer: Optimizer = Optimizer(rate=1e-4, warmup_steps=100)
    batch_size: PositiveInt = 64


@dataclass(frozen=True)
class LabelledRows:
    """Texts with their labels, as embeddings and numbers."""

    embeddings: Float32[np.ndarray, "rows hidden"]
    numbers: Int64[np.ndarray, " rows"]

    def part(self, rows: np.ndarray) -> "LabelledRows":
        """Give some of the rows."""
        return LabelledRows(self.embeddings[rows], self.numbers[rows])


def train_classifier(run: ClassifierRun, *, data: Path, model: Path, name: str) -> tuple[Path, ClassifierHead]:
    """Make a head on a frozen encoder and store it in the model directory, under heads/NAME.

    Args:
        run: What to make it from.
        data: What the corpora's paths are relative to.
        model: The model whose embeddings it reads.
        name: Of the head.

    Raises:
        RunError: The name is none, the directory has such a head, or the rows have fewer than two labels.
        DataError: A corpus cannot be read.
        ModelDirectoryError: `model` is no model directory.
    """
    if not HEAD_NAME.fullmatch(name):
        raise RunError(f"the name of a head must match {HEAD_NAME.pattern}, got {name!r}")
    run = _split(run)
    destination = model / HEADS / name
    if destination.exists():
        raise RunError(f"{destination} must not exist yet; remove it or choose another --name")
    encoder = SentenceEncoder.load(model)
    texts, given = _read(run, run.corpora, data, what="training")
    labels = tuple(sorted(set(given)))
    if len(labels) < 2:
        raise RunError(f"the rows must have two labels or more, got {list(labels)}")
    training = _embed(encoder, texts, given, labels)
    validation = _embed(encoder, *_read(run, run.validation, data, what="validation"), labels)
    half = np.arange(len(validation.numbers)) % 2
    stop, calibrate = (validation.part(np.flatnonzero(half == side)) for side in (0, 1))
    head = fit_head(training, stop, labels, encoder.fingerprint, run)
    before = judge_labels(head.probabilities(calibrate.embeddings), calibrate.numbers)
    head = replace(head, temperature=find_temperature(head.logits(calibrate.embeddings), calibrate.numbers))
    figures: dict[str, Any] = {
        "calibration_rows_before": before,
        "calibration_rows": judge_labels(head.probabilities(calibrate.embeddings), calibrate.numbers),
    }
    for test, corpora in run.tests.items():
        rows = _embed(encoder, *_read(run, corpora, data, what=test), labels)
        figures[test] = judge_labels(head.probabilities(rows.embeddings), rows.numbers)
    details = {
        **head.details,
        "examples": len(training.numbers),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "corpora": [corpus.path for corpus in run.corpora],
        "figures": figures,
    }
    head = replace(head, details=details)
    write_head(destination, head)
    return destination, head


def fit_head(
    training: LabelledRows, validation: LabelledRows, labels: Sequence[str], fingerprint: str, run: ClassifierRun
) -> ClassifierHead:
    """Fit a multinomial logistic regression by L-BFGS, and stop where validation macro-F1 is best."""
    embeddings, numbers = torch.from_numpy(training.embeddings), torch.from_numpy(training.numbers)
    linear = nn.Linear(embeddings.shape[1], len(labels))
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    search = torch.optim.LBFGS(linear.parameters(), max_iter=4, history_size=20, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        value = functional.cross_entropy(linear(_SCALE * embeddings), numbers)
        value = value + run.decay * linear.weight.square().sum()
        value.backward()
        return value

    best, best_round, kept = -1.0, 0, (linear.weight.detach(), linear.bias.detach())
    rounds = 0
    while rounds < run.most_rounds and rounds - best_round < run.patience:
        rounds += 1
        search.step(loss)
        with torch.inference_mode():
            answers = linear(_SCALE * torch.from_numpy(validation.embeddings)).argmax(dim=1).numpy()
        score = float(f1_score(validation.numbers, answers, average="macro", zero_division=0))
        if score > best:
            best, best_round = score, rounds
            kept = (linear.weight.detach().clone(), linear.bias.detach().clone())
    logger.info("validation macro-F1 %.4f, best in round %d of %d", best, best_round, rounds)
    return ClassifierHead(
        labels=tuple(labels),
        weights=_SCALE * kept[0].numpy(),
        biases=kept[1].numpy(),
        fingerprint=fingerprint,
        details={"validation_macro_f1": best, "rounds": best_round},
    )


def find_temperature(logits: Float32[np.ndarray, "rows labels"], numbers: Int64[np.ndarray, " rows"]) -> float:
    """Find what the logits must be divided by for the lowest negative log likelihood, within 1/20 and 20."""
    scores, right = torch.from_numpy(logits).double(), torch.from_numpy(numbers)
    candidates = np.exp(np.linspace(-3, 3, 601))
    losses = [float(functional.cross_entropy(scores / temperature, right)) for temperature in candidates]
    return float(candidates[int(np.argmin(losses))])


def encoder_run(run: ClassifierRun, model: Path) -> FinetuneRun:
    """Describe the training of a model's encoder itself on the rows that the head is to learn from."""
    spec = read_spec(model)
    return FinetuneRun(
        data=run.data,
        loop=run.loop,
        optimizer=run.optimizer,
        objectives=(Classes(kind="classes", corpora=_split(run).corpora, batch_size=run.batch_size),),
        max_length=spec.max_length,
        pooling=spec.pooling,
    )


def _split(run: ClassifierRun) -> ClassifierRun:
    """Keep a tenth of each corpus for validation, if none was named."""
    if run.validation:
        return run
    if divided := [corpus.path for corpus in run.corpora if corpus.part != "all"]:
        raise RunError(f"validation must be named where a part of a corpus is ({divided[0]})")
    kept, apart = (
        tuple(corpus.model_copy(update={"part": part}) for corpus in run.corpora) for part in ("train", "heldout")
    )
    return run.model_copy(update={"corpora": kept, "validation": apart})


def _read(run: ClassifierRun, corpora: Sequence[Corpus], data: Path, *, what: str) -> tuple[list[str], list[str]]:
    # What is measured on is taken as it is: its rows stand in the list of evaluation sentences themselves.
    settings = Data(bad_rows=run.data.bad_rows, deduplicate=False) if what in run.tests else run.data
    source = Source(corpora, data, settings, valued=True)
    items = list(source)
    report(source, settings, what=what)
    if not items:
        raise RunError(f"there must be rows for {what}, got none from {', '.join(corpus.path for corpus in corpora)}")
    return [item.texts[0] for item in items], [run.labels.get(item.value, item.value) for item in items]


def _embed(encoder: SentenceEncoder, texts: Sequence[str], given: Sequence[str], labels: Sequence[str]) -> LabelledRows:
    if unknown := sorted(set(given) - set(labels)):
        raise RunError(
            f"the label {unknown[0]!r} is in no row of the training corpora, whose labels are {list(labels)}"
        )
    number = {label: place for place, label in enumerate(labels)}
    parts = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        parts.append(encoder.encode(texts[start : start + _TEXTS_AT_ONCE]))
        logger.info("%d of %d texts embedded", min(start + _TEXTS_AT_ONCE, len(texts)), len(texts))
    return LabelledRows(np.concatenate(parts), np.array([number[label] for label in given], dtype=np.int64))
