"""One model, measured on the tasks of a suite."""

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans  # type: ignore[import-untyped]
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]
from sklearn.metrics import v_measure_score  # type: ignore[import-untyped]

from encoder import SentenceEncoder
from encoder.checkpoint import load_masked_language_model
from encoder.classifier import read_heads
from encoder.config import ModelDirectoryError
from training.batches import pad
from training.config import Data, RunError
from training.data import Corpus, DataError, open_text
from training.metrics import best_threshold, bootstrap, judge_labels, ndcg, spearman
from training.objectives import encode, masked_token_loss
from training.pretrain import Masker
from training.source import Item, Source
from training.suite import (
    AnyTask,
    Classification,
    Clustering,
    Head,
    PairRetrieval,
    Perplexity,
    Retrieval,
    Similarity,
    WordInContext,
)

logger = logging.getLogger(__name__)

# What is measured on is taken as it is: its rows stand in the list of evaluation sentences themselves.
_RAW = Data(deduplicate=False)
_DEPTH = 100
_MASKING_RATE = 0.15  # that of BERT, whatever a model was trained with
_RESAMPLES_OF_CLUSTERS = 100


@dataclass(frozen=True)
class Figure:
    """One number, with the interval that holds it 95 times of 100 when the rows are drawn anew."""

    task: str
    metric: str
    value: float
    low: float
    high: float
    rows: int


class Evaluator:
    """Measures one model; the tasks' paths are relative to `data`."""

    def __init__(self, model: Path, data: Path) -> None:
        self.model, self._data = model, data
        self._encoder = SentenceEncoder.load(model)

    def measure(self, task: AnyTask) -> list[Figure]:
        """Give the figures of one task; none if the model has not what it takes.

        Raises:
            DataError: Its data cannot be read.
            RunError: Its data does not fit the task.
        """
        measures: dict[str, Callable[[Any], list[Figure]]] = {
            "similarity": self._similarity,
            "retrieval": self._retrieval,
            "pairs": self._pairs,
            "clustering": self._clustering,
            "classification": self._classification,
            "head": self._head,
            "words": self._words,
            "perplexity": self._perplexity,
        }
        try:
            return measures[task.kind](task)
        except (DataError, RunError, ModelDirectoryError):
            raise
        except (ValueError, LookupError) as error:  # a score that is no number, a key or a label that is not there
            raise DataError(f"the data of task {task.name!r} do not fit its kind, {task.kind}: {error!r}") from error

    def _similarity(self, task: Similarity) -> list[Figure]:
        items = self._items(task.corpora, sides=2, valued=True)
        scores = np.array([float(item.value) for item in items])
        first, second = (self._encoder.encode([item.texts[side] for item in items]) for side in (0, 1))
        cosines = (first * second).sum(axis=1).astype(np.float64)
        return [_figure(task, "spearman", lambda rows: spearman(cosines[rows], scores[rows]), len(items))]

    def _retrieval(self, task: Retrieval) -> list[Figure]:
        documents = self._texts(task.documents)
        queries = self._texts(task.queries)
        relevant: dict[str, set[str]] = defaultdict(set)
        with open_text(self._data / task.judgements) as file:
            header, *rows = (line.rstrip("\n").split("\t") for line in file)
        places = [header.index(column) for column in ("query_id", "doc_id", "relevance")]
        for query, document, relevance in ([row[place] for place in places] for row in rows):
            if float(relevance) > 0:
                relevant[query].add(document)
        judged = [key for key in queries if relevant[key]]
        keys = list(documents)
        vectors = self._encoder.encode(list(documents.values()))
        asked = self._encoder.encode([queries[key] for key in judged])
        ranked = _rank(asked, vectors, depth=_DEPTH)
        hits = [
            np.array([float(keys[row] in relevant[key]) for row in found])
            for key, found in zip(judged, ranked, strict=True)
        ]
        return _ranking_figures(task, hits, [len(relevant[key]) for key in judged])

    def _pairs(self, task: PairRetrieval) -> list[Figure]:
        items = self._items(task.corpora, sides=2)
        answers = sorted({item.texts[1] for item in items})
        place = {answer: row for row, answer in enumerate(answers)}
        asked = self._encoder.encode([item.texts[0] for item in items])
        ranked = _rank(asked, self._encoder.encode(answers), depth=_DEPTH)
        hits = [(found == place[item.texts[1]]).astype(float) for item, found in zip(items, ranked, strict=True)]
        return _ranking_figures(task, hits, [1] * len(items))

    def _clustering(self, task: Clustering) -> list[Figure]:
        items = self._items(task.corpora, valued=True)
        labels = np.array([item.value for item in items])
        vectors = self._encoder.encode([item.texts[0] for item in items])
        count = len(set(labels))
        found = [KMeans(count, n_init=1, random_state=seed).fit_predict(vectors) for seed in range(5)]

        def measure(rows: np.ndarray) -> float:
            return float(np.mean([v_measure_score(labels[rows], clusters[rows]) for clusters in found]))

        return [_figure(task, "v_measure", measure, len(items), resamples=_RESAMPLES_OF_CLUSTERS)]

    def _classification(self, task: Classification) -> list[Figure]:
        probabilities, numbers = self._regression(task, {})
        return _label_figures(task, probabilities, numbers)

    def _head(self, task: Head) -> list[Figure]:
        head = read_heads(self.model).get(task.head)
        if head is None:
            logger.info("%s has no head %s; a logistic regression takes its place", self.model, task.head)
            return _label_figures(task, *self._regression(task, task.labels))
        if head.fingerprint != self._encoder.fingerprint:
            raise RunError(f"the head {task.head} in {self.model} was made for another model, {head.fingerprint}")
        vectors, labels = self._labelled(self._items(task.corpora, valued=True), task.labels)
        if unknown := set(labels) - set(head.labels):
            raise RunError(f"the head {task.head} has the labels {list(head.labels)}, and not {sorted(unknown)[0]!r}")
        numbers = np.array([head.labels.index(label) for label in labels])
        return _label_figures(task, head.probabilities(vectors), numbers)

    def _regression(self, task: Classification | Head, names: dict[str, str]) -> tuple[np.ndarray, np.ndarray]:
        training = self._items(task.train, valued=True)
        chosen = np.random.default_rng(0).permutation(len(training))[: task.most_rows]
        model = LogisticRegression(C=10.0, max_iter=1000)
        model.fit(*self._labelled([training[row] for row in chosen], names))
        vectors, labels = self._labelled(self._items(task.corpora, valued=True), names)
        known = list(model.classes_)
        return model.predict_proba(vectors), np.array([known.index(label) for label in labels])

    def _labelled(self, items: Sequence[Item], names: dict[str, str]) -> tuple[np.ndarray, list[str]]:
        """Give the embeddings of texts, and their labels under the names given to them."""
        vectors = self._encoder.encode([item.texts[0] for item in items])
        return vectors, [names.get(item.value, item.value) for item in items]

    def _words(self, task: WordInContext) -> list[Figure]:
        threshold = best_threshold(*self._word_cosines((task.train,)))
        cosines, same = self._word_cosines(task.corpora)
        right = (cosines >= threshold) == same
        return [_figure(task, "accuracy", lambda rows: float(right[rows].mean()), len(right))]

    def _word_cosines(self, corpora: Sequence[Corpus]) -> tuple[np.ndarray, np.ndarray]:
        rows = [(*item.texts, item.value) for item in self._items(corpora, sides=4, valued=True)]
        sides = [self._word_vectors([row[side + 2] for row in rows], [row[side] for row in rows]) for side in (0, 1)]
        unit = [side / np.linalg.norm(side, axis=1, keepdims=True) for side in sides]
        return (unit[0] * unit[1]).sum(axis=1), np.array([row[4] == "T" for row in rows])

    def _word_vectors(self, texts: Sequence[str], places: Sequence[str]) -> np.ndarray:
        """Give the mean of the vectors of the tokens that make up one word of each text."""
        vectors = []
        for text, place, embedded in zip(texts, places, self._encoder.encode_tokens(texts), strict=True):
            words = text.split(" ")
            start = sum(len(word) + 1 for word in words[: int(place)])
            end = start + len(words[int(place)])
            inside = [row for row, span in enumerate(embedded.spans) if span[0] < end and span[1] > start]
            if not inside:
                raise RunError(f"word {place} of {text!r} has no token; its text was cut or is empty")
            vectors.append(embedded.vectors[inside].mean(axis=0))
        return np.stack(vectors)

    def _perplexity(self, task: Perplexity) -> list[Figure]:
        try:
            encoder, head = load_masked_language_model(self.model)
        except ModelDirectoryError as error:
            logger.info("no perplexity: %s", error)
            return []
        spec = self._encoder.spec
        masker = Masker(spec, rate=_MASKING_RATE)
        generator = np.random.default_rng(0)
        losses = []
        items = self._items(task.corpora)
        for text in self._encoder.tokenizer.encode([item.texts[0] for item in items]):
            given = pad([np.array(text.input_ids)], spec.config.pad_token_id)
            if len(text.input_ids) <= 2:
                continue
            hidden = masker.hide(given["input_ids"].numpy(), generator)
            with torch.inference_mode():
                states = encode(encoder, hidden["input_ids"], None)
                words = encoder.embeddings.word.weight
                loss, _ = masked_token_loss(head, words, states, hidden["positions"], hidden["targets"])
            losses.append((float(loss), len(hidden["positions"])))
        sums = np.array(losses)

        def measure(rows: np.ndarray) -> float:
            return float(np.exp(np.average(sums[rows, 0], weights=sums[rows, 1])))

        return [_figure(task, "perplexity", measure, len(sums))]

    def _items(self, corpora: Sequence[Corpus], *, sides: int = 1, valued: bool = False) -> list[Item]:
        items = list(Source(corpora, self._data, _RAW, sides=sides, valued=valued))
        if not items:
            raise DataError(f"there must be rows in {', '.join(corpus.path for corpus in corpora)}, got none")
        return items

    def _texts(self, path: str) -> dict[str, str]:
        with open_text(self._data / path) as file:
            rows = [json.loads(line) for line in file]
        return {str(row["_id"]): f"{row.get('title', '')} {row['text']}".strip() for row in rows}


def _figure(task: AnyTask, metric: str, measure: Callable[[np.ndarray], float], rows: int, **options: int) -> Figure:
    low, high = bootstrap(measure, rows, **options)
    return Figure(task.name, metric, measure(np.arange(rows)), low, high, rows)


def _mean_figure(task: AnyTask, metric: str, each: np.ndarray) -> Figure:
    return _figure(task, metric, lambda rows: float(each[rows].mean()), len(each))


def _rank(queries: np.ndarray, documents: np.ndarray, *, depth: int) -> np.ndarray:
    """Give the rows of the nearest documents of each query, the nearest first."""
    scores = queries @ documents.T
    return np.argsort(-scores, axis=1, kind="stable")[:, :depth]


def _ranking_figures(task: AnyTask, hits: Sequence[np.ndarray], relevant: Sequence[int]) -> list[Figure]:
    """Judge rankings: each has 1 at the ranks of relevant documents, of which there are so many."""
    gains = np.array([ndcg(found, count) for found, count in zip(hits, relevant, strict=True)])
    recalls = {
        k: np.array([found[:k].sum() / count for found, count in zip(hits, relevant, strict=True)]) for k in (10, 100)
    }
    ranks = np.array([1 / (1 + found.argmax()) if found.any() else 0.0 for found in hits])
    return [
        _mean_figure(task, "ndcg@10", gains),
        *(_mean_figure(task, f"recall@{k}", each) for k, each in recalls.items()),
        _mean_figure(task, f"mrr@{_DEPTH}", ranks),
    ]


def _label_figures(task: AnyTask, probabilities: np.ndarray, numbers: np.ndarray) -> list[Figure]:
    return [
        _figure(
            task,
            metric,
            lambda rows, metric=metric: judge_labels(probabilities[rows], numbers[rows])[metric],  # type: ignore[misc]
            len(numbers),
            resamples=_RESAMPLES_OF_CLUSTERS,
        )
        for metric in ("accuracy", "macro_f1", "calibration_error", "brier", "nll")
    ]
