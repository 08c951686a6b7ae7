"""A teacher's vectors: made once or read from a file, stored beside the texts, brought to the student's size."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float32

from encoder.sentence import SentenceEncoder
from training.config import RunError
from training.data import Corpus, DataError, Tally
from training.progress import choose_precision
from training.source import Item
from training.store import ArrayWriter

logger = logging.getLogger(__name__)

_PCA_ROWS = 100_000


class TeacherVectors:
    """Stores a teacher's vectors of length 1 as float16, either made here or read from the corpora's files."""

    def __init__(self, path: Path, corpora: Sequence[Corpus], root: Path, teacher: str | None) -> None:
        self._path, self._corpora = path, corpora
        self._writer: ArrayWriter | None = None
        self._encoder: SentenceEncoder | None = None
        self._files: list[np.ndarray] = []
        self._done = 0
        if teacher is not None:
            self._encoder = SentenceEncoder.load(
                teacher_dir(teacher, root),
                precision="bfloat16" if choose_precision("auto", torch.device("cpu")) == torch.bfloat16 else "float32",
            )
            return
        for corpus in corpora:
            if corpus.vectors is None:
                raise RunError(f"a teacher must be named, or a file of vectors for each corpus; {corpus.path} has none")
            if corpus.split != "whole" or len(corpus.columns) > 1:
                raise RunError(
                    f"each row of {corpus.path} must be one text, since {corpus.vectors} has one vector a row"
                )
            self._files.append(_open_vectors(root / corpus.vectors))
        if len(sizes := {file.shape[1] for file in self._files}) > 1:
            raise DataError(f"the vectors of all corpora must be of one size, got {sorted(sizes)}")

    def __enter__(self) -> "TeacherVectors":
        return self

    def __call__(self, group: Sequence[Item]) -> None:
        """Store the vectors of some items, in order."""
        if self._encoder is not None:
            vectors = self._encoder.encode([item.texts[0] for item in group])
        else:
            vectors = np.stack([self._read(item) for item in group]).astype(np.float32)
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
            for item, norm in zip(group, norms[:, 0], strict=True):
                if not 0 < norm < np.inf:
                    where = f"row {item.row} (the first is 0) of {self._corpora[item.corpus].vectors}"
                    raise DataError(
                        f"a vector must be finite and not all 0, got length {norm} in {where}; make it anew"
                    )
            vectors /= norms
        if self._writer is None:
            self._writer = ArrayWriter(self._path, "<f2", vectors.shape[1])
        self._writer.append(vectors)
        self._done += len(group)
        if self._done % 102_400 < len(group):
            logger.info("%d texts have their teacher's vectors", self._done)

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        if self._writer is not None:
            self._writer.__exit__(kind, *details)

    def check_rows(self, tallies: Sequence[Tally]) -> None:
        """Refuse files of vectors that do not belong to what was read, one tally for each corpus."""
        for corpus, file, tally in zip(self._corpora, self._files, tallies, strict=False):
            if len(file) != tally.read:
                raise DataError(
                    f"{corpus.vectors} must have a row for each of the {tally.read} rows of {corpus.path}, "
                    f"got {len(file)}; make it anew from this file"
                )

    def _read(self, item: Item) -> np.ndarray:
        file, corpus = self._files[item.corpus], self._corpora[item.corpus]
        if item.row >= len(file):
            raise DataError(
                f"{corpus.vectors} must have a row for each row of {corpus.path}, got {len(file)}; make it anew"
            )
        vector: np.ndarray = file[item.row]
        return vector


def _open_vectors(path: Path) -> np.ndarray:
    try:
        vectors: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"{path} must be a whole .npy of numbers: {error}") from error
    if vectors.ndim != 2 or vectors.dtype.kind != "f":
        raise DataError(f"{path} must hold a vector of floats a row, got {vectors.dtype} of shape {vectors.shape}")
    return vectors


def teacher_dir(teacher: str, root: Path) -> Path:
    """Find a teacher: a path relative to the data directory, or absolute."""
    return root / teacher


def principal_axes(vectors: np.ndarray, size: int) -> Float32[np.ndarray, "teacher size"]:
    """Give the axes on which the vectors lie most, not centred, so that cosines are kept: teacher × size.

    Of a teacher with fewer dimensions the rest stays 0.
    """
    rows = np.linspace(0, len(vectors) - 1, min(_PCA_ROWS, len(vectors))).astype(np.int64)
    sample = np.asarray(vectors[rows], dtype=np.float64)
    _, axes = np.linalg.eigh(sample.T @ sample)  # ascending
    leading = axes[:, ::-1][:, :size]
    projection = np.zeros((vectors.shape[1], size), dtype=np.float32)
    projection[:, : leading.shape[1]] = leading
    return projection
