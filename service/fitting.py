"""Fit a logistic regression, in a process of its own: safetensors on standard input, safetensors on standard output.

The service does not import scikit-learn, which would cost it a second at the start and 80 MB for ever.

    python -m service.fitting C
"""

import sys

import numpy as np
import safetensors.numpy
from sklearn.linear_model import LogisticRegression  # type: ignore[import-untyped]


def fit(vectors: np.ndarray, labels: np.ndarray, *, inverse_regularization: float) -> tuple[np.ndarray, np.ndarray]:
    """Give the weights, one row per class in ascending order of its number, and the biases.

    Of two classes the first has the row 0, so that softmax over the rows is the logistic function.
    """
    model = LogisticRegression(C=inverse_regularization, max_iter=1000).fit(vectors, labels)
    weights, biases = model.coef_, model.intercept_
    if len(weights) == 1:
        weights, biases = np.vstack([0 * weights, weights]), np.concatenate([0 * biases, biases])
    return weights.astype(np.float32), biases.astype(np.float32)


if __name__ == "__main__":
    given = safetensors.numpy.load(sys.stdin.buffer.read())
    weights, biases = fit(given["vectors"], given["labels"], inverse_regularization=float(sys.argv[1]))
    sys.stdout.buffer.write(safetensors.numpy.save({"weights": weights, "biases": biases}))
