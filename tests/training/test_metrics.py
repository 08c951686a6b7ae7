import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from training.metrics import best_threshold, bootstrap, calibration_error, judge_labels, ndcg, spearman


def test_spearman_is_scipys_with_ties() -> None:
    generator = np.random.default_rng(0)
    first, second = generator.integers(5, size=50).astype(float), generator.random(50)
    assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert spearman(second, second**3) == pytest.approx(1)
    assert spearman(second, -second) == pytest.approx(-1)
    assert spearman(np.ones(50), second) == 0.0


def test_ndcg_by_hand() -> None:
    # Relevant at ranks 2 and 4, of three that there are: (1/log2 3 + 1/log2 5) / (1 + 1/log2 3 + 1/log2 4).
    gain = 1 / math.log2(3) + 1 / math.log2(5)
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert ndcg(np.array([0.0, 1, 0, 1, 0]), 3) == pytest.approx(gain / ideal)
    assert ndcg(np.array([0.0, 1, 0, 1, 0]), 3, k=3) == pytest.approx(1 / math.log2(3) / ideal)
    assert ndcg(np.ones(20), 20) == pytest.approx(1)
    assert ndcg(np.zeros(20), 1) == 0.0


def test_calibration_error_by_hand() -> None:
    # Two bins of two rows: sure of 0.6 and right half the time; sure of 0.9 and always right.
    probabilities = np.array([[0.6, 0.4], [0.4, 0.6], [0.9, 0.1], [0.9, 0.1]])
    numbers = np.array([0, 0, 0, 0])
    assert calibration_error(probabilities, numbers, bins=2) == pytest.approx(0.5 * 0.1 + 0.5 * 0.1)
    assert calibration_error(probabilities[:1], numbers[:1], bins=10) == pytest.approx(0.4)  # fewer rows than bins


def test_labels_are_judged_by_hand() -> None:
    probabilities = np.array([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.5, 0.25, 0.25]])
    judged = judge_labels(probabilities, np.array([0, 1, 1]))
    assert judged["rows"] == 3
    assert judged["accuracy"] == pytest.approx(2 / 3)
    assert judged["macro_f1"] == pytest.approx((2 / 3 + 2 / 3 + 0) / 3)  # the third label is in no row
    assert judged["brier"] == pytest.approx((0.375 + 0.375 + 0.25 + 0.5625 + 0.0625) / 3)
    assert judged["nll"] == pytest.approx((2 * math.log(2) + math.log(4)) / 3)
    assert judged["confusion"] == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]


def test_a_probability_of_nothing_is_no_infinity() -> None:
    assert math.isfinite(judge_labels(np.array([[1.0, 0.0]]), np.array([1]))["nll"])


def test_the_interval_of_a_mean_is_that_of_theory() -> None:
    values = np.random.default_rng(1).random(400)
    low, high = bootstrap(lambda rows: float(values[rows].mean()), 400)
    error = values.std(ddof=1) / math.sqrt(400)
    assert (low + high) / 2 == pytest.approx(values.mean())
    assert (high - low) / 2 == pytest.approx(1.96 * error, rel=0.1)


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=30))
def test_no_threshold_is_right_more_often(rows: list[tuple[int, bool]]) -> None:
    scores = np.array([score for score, _ in rows], dtype=float)
    positive = np.array([each for _, each in rows])

    def right(threshold: float) -> int:
        return int(((scores >= threshold) == positive).sum())

    assert right(best_threshold(scores, positive)) == max(map(right, [*scores, scores.max() + 1]))
