"""The figures that models are judged by, from arrays alone, and how sure one can be of them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy.stats import rankdata  # type: ignore[import-untyped]
from sklearn.metrics import confusion_matrix, f1_score  # type: ignore[import-untyped]

_BINS = 10
_RESAMPLES = 1000


def spearman(first: Float[np.ndarray, " pairs"], second: Float[np.ndarray, " pairs"]) -> float:
    """Give the rank correlation; 0 where one side has a single value, so that it orders nothing."""
    ranks = [rankdata(values) for values in (first, second)]
    if any(np.ptp(rank) == 0 for rank in ranks):
        return 0.0
    return float(np.corrcoef(*ranks)[0, 1])


def ndcg(relevances: Float[np.ndarray, " ranked"], relevant: int, *, k: int = 10) -> float:
    """Give the normalised discounted gain of a ranking, where a document counts or does not.

    Args:
        relevances: 1 where the document at this rank is relevant, else 0; the best first.
        relevant: Relevant documents there are, found or not; at least 1.
        k: Ranks that count.
    """
    discounts = 1 / np.log2(np.arange(k) + 2)
    found = relevances[:k]
    return float(found @ discounts[: len(found)] / discounts[:relevant].sum())


def calibration_error(
    probabilities: Float[np.ndarray, "rows labels"], numbers: Int[np.ndarray, " rows"], *, bins: int = _BINS
) -> float:
    """Give the expected calibration error: how far the probability of the answer is from how often it is right.

    The rows are sorted by that probability and cut into bins of equal size, so that none is empty.
    Source: Nixon et al. 2019, arXiv:1904.01685 (equal mass).
    """
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == numbers
    order = np.argsort(confidence, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    gaps = [len(part) * abs(confidence[part].mean() - right[part].mean()) for part in parts]
    return float(sum(gaps) / len(order))


def judge_labels(probabilities: Float[np.ndarray, "rows labels"], numbers: Int[np.ndarray, " rows"]) -> dict[str, Any]:
    """Give accuracy, macro-F1, calibration error, Brier score, negative log likelihood, and the confusion matrix.

    Args:
        probabilities: Of each label.
        numbers: Which label is right.

    Returns:
        JSON; row i of `confusion` counts what the rows of label i were taken for.
    """
    count = probabilities.shape[1]
    answers = probabilities.argmax(axis=1)
    given = np.clip(probabilities[np.arange(len(numbers)), numbers].astype(np.float64), 1e-12, 1)
    return {
        "rows": len(numbers),
        "accuracy": float((answers == numbers).mean()),
        "macro_f1": float(f1_score(numbers, answers, average="macro", labels=range(count), zero_division=0)),
        "calibration_error": calibration_error(probabilities, numbers),
        "brier": float(((probabilities - np.eye(count)[numbers]) ** 2).sum(axis=1).mean()),
        "nll": float(-np.log(given).mean()),
        "confusion": confusion_matrix(numbers, answers, labels=range(count)).tolist(),
    }


def bootstrap(
    measure: Callable[[np.ndarray], float], rows: int, *, seed: int = 0, resamples: int = _RESAMPLES
) -> tuple[float, float]:
    """Give the 95 % interval of a figure: 1.96 standard errors either side, by drawing rows again and again.

    Not the quantiles of what is drawn: a calibration error or a V-measure of rows that stand there twice is larger.

    Args:
        measure: Gives the figure of the rows with these indices.
        rows: How many there are.
        seed: Decides the draws, with replacement.
        resamples: How often to draw.

    Source: Efron & Tibshirani 1993, chapters 6 and 12.
    """
    generator = np.random.default_rng(seed)
    error = np.std([measure(generator.integers(rows, size=rows)) for _ in range(resamples)], ddof=1)
    value = measure(np.arange(rows))
    return float(value - 1.96 * error), float(value + 1.96 * error)


def best_threshold(scores: Float[np.ndarray, " rows"], positive: Sequence[bool] | np.ndarray) -> float:
    """Give the threshold at or above which "yes" is right most often."""
    thresholds, places = np.unique(np.append(scores, scores.max() + 1), return_inverse=True)
    yes = np.append(np.asarray(positive), False)
    counts = [np.bincount(places, weights=weights, minlength=len(thresholds)) for weights in (yes, ~yes)]
    # At a threshold the yes at or above it are right, and the no below it.
    right = counts[0][::-1].cumsum()[::-1] + counts[1].cumsum() - counts[1]
    return float(thresholds[right.argmax()])
