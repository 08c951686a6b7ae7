"""Classifier heads: a label read from an embedding by a linear map. Stored without pickle, used without torch.

A head is a directory: head.safetensors has `weights` and `biases`, head.json the labels, the temperature, the
fingerprint of the model whose embeddings it reads, and how it was made. A model directory holds its own in heads/NAME.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from jaxtyping import Float32

from encoder.config import ModelDirectoryError
from encoder.files import whole_directory

HEADS = "heads"
HEAD_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_TENSORS, _DESCRIPTION = "head.safetensors", "head.json"


@dataclass(frozen=True, kw_only=True)
class ClassifierHead:
    """A classifier of embeddings of length 1, ready to decide.

    Raises:
        ModelDirectoryError: Labels are fewer than two, repeated or not text; shapes do not fit them; a number is not
            finite; or the temperature is not positive.
    """

    labels: tuple[str, ...]
    weights: Float32[np.ndarray, "labels hidden"]
    biases: Float32[np.ndarray, " labels"]
    fingerprint: str
    """Of the model whose embeddings it reads."""
    temperature: float = 1.0
    """Logits are divided by it, so that probabilities come true as often as they say.
    Source: Guo et al. 2017, arXiv:1706.04599."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """How it was made and what it reached; JSON, and changes nothing."""

    def __post_init__(self) -> None:
        labels = self.labels
        if len(labels) < 2 or len(set(labels)) < len(labels) or not all(isinstance(label, str) for label in labels):
            raise ModelDirectoryError(f"a head must have two labels or more, texts that differ, got {labels}")
        if self.weights.ndim != 2 or len(self.weights) != len(labels) or self.biases.shape != (len(labels),):
            raise ModelDirectoryError(
                f"a head of {len(labels)} labels must have as many rows of weights and biases, "
                f"got {self.weights.shape} and {self.biases.shape}"
            )
        if not (np.isfinite(self.weights).all() and np.isfinite(self.biases).all()):
            raise ModelDirectoryError("the weights and biases of a head must be finite")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ModelDirectoryError(f"the temperature of a head must be positive, got {self.temperature}")

    def logits(self, embeddings: Float32[np.ndarray, "texts hidden"]) -> Float32[np.ndarray, "texts labels"]:
        """Give the scores of the labels, in their order, divided by the temperature."""
        return (embeddings @ self.weights.T + self.biases) / np.float32(self.temperature)

    def probabilities(self, embeddings: Float32[np.ndarray, "texts hidden"]) -> Float32[np.ndarray, "texts labels"]:
        """Give the probability of each label, in their order."""
        logits = self.logits(embeddings)
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponents / exponents.sum(axis=1, keepdims=True)


def write_head(destination: Path, head: ClassifierHead) -> None:
    """Store a head in a new directory, whole or not at all.

    Raises:
        ModelDirectoryError: The destination exists.
    """
    described = {
        "labels": list(head.labels),
        "fingerprint": head.fingerprint,
        "temperature": head.temperature,
        "details": dict(head.details),
    }
    tensors = {"weights": np.ascontiguousarray(head.weights), "biases": np.ascontiguousarray(head.biases)}
    with whole_directory(destination) as partial:
        (partial / _TENSORS).write_bytes(safetensors.numpy.save(tensors))
        text = json.dumps(described, indent=2, ensure_ascii=False, allow_nan=False)
        (partial / _DESCRIPTION).write_text(f"{text}\n", encoding="utf-8")


def read_head(path: Path) -> ClassifierHead:
    """Read a head.

    Raises:
        ModelDirectoryError: It is incomplete or damaged. The message names the directory.
    """
    try:
        described = json.loads((path / _DESCRIPTION).read_text(encoding="utf-8"))
        tensors = safetensors.numpy.load((path / _TENSORS).read_bytes())
        return ClassifierHead(
            labels=tuple(described["labels"]),
            weights=tensors["weights"].astype(np.float32),
            biases=tensors["biases"].astype(np.float32),
            fingerprint=str(described["fingerprint"]),
            temperature=float(described["temperature"]),
            details=dict(described["details"]),
        )
    except (OSError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise ModelDirectoryError(f"the classifier in {path} is damaged ({error}); remove that directory") from error


def read_heads(model_dir: Path) -> dict[str, ClassifierHead]:
    """Read the heads of a model directory, by name.

    Raises:
        ModelDirectoryError: One is damaged, or its name does not match `[a-z0-9][a-z0-9_-]{0,62}`.
    """
    heads = {path.name: read_head(path) for path in sorted((model_dir / HEADS).glob("[!.]*"))}
    if strange := [name for name in heads if not HEAD_NAME.fullmatch(name)]:
        raise ModelDirectoryError(f"the name of a head must match {HEAD_NAME.pattern}, got {strange[0]!r}")
    return heads
