"""Classifiers: logistic regressions on embeddings, taught over the API and kept in the data directory.

A directory each, in it one per version: head.safetensors (weights, biases) and head.json (labels, the model's
fingerprint, how it was made). The highest version is the one that serves.
"""

import asyncio
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import safetensors.numpy
from jaxtyping import Float32

from service.errors import ConflictError, InvalidError, ModelError, NotFoundError, NotReadyError

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_HEAD, _DESCRIPTION = "head.safetensors", "head.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a client may know of a classifier."""

    name: str
    labels: list[str]
    fingerprint: str
    """Of the model whose embeddings it reads."""
    examples: int
    C: float
    """Inverse strength of regularisation."""
    created: str
    """ISO 8601, UTC."""


@dataclass(frozen=True, slots=True)
class Head:
    """A classifier, ready to decide."""

    description: Description
    weights: Float32[np.ndarray, "labels hidden"]
    biases: Float32[np.ndarray, " labels"]

    def probabilities(self, vectors: Float32[np.ndarray, "texts hidden"]) -> Float32[np.ndarray, "texts labels"]:
        """Give the probability of each label, in the order of `description.labels`."""
        logits = vectors @ self.weights.T + self.biases
        exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
        return exponents / exponents.sum(axis=1, keepdims=True)


class Classifiers:
    """All classifiers of a data directory, for one model. Any number of threads may share it.

    Args:
        path: Their directory; made if it is missing.
        fingerprint: Of the model that all vectors given to this object come from.

    Raises:
        NotReadyError: A classifier is damaged.
    """

    def __init__(self, path: Path, *, fingerprint: str) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._fitting = asyncio.Semaphore(1)
        path.mkdir(mode=0o700, exist_ok=True)
        for dropped in path.glob(".*"):  # by a process that was killed meanwhile
            shutil.rmtree(dropped)
        folders = [folder for folder in path.iterdir() if any(folder.glob("[0-9]*"))]
        self._heads = {folder.name: _read(max(folder.glob("[0-9]*"))) for folder in folders}

    def list(self) -> list[Description]:
        """Tell what classifiers there are, by name, those of other models included."""
        return [self._heads[name].description for name in sorted(self._heads)]

    def get(self, name: str) -> Head:
        """Give a classifier.

        Raises:
            InvalidError: The name does not match `[a-z0-9][a-z0-9_-]{0,62}`.
            NotFoundError: There is none of that name.
        """
        check_name(name)
        head = self._heads.get(name)
        if head is None:
            raise NotFoundError(f"there is no classifier {name}; teach one with PUT /classifiers/{name}")
        return head

    def ready(self, name: str) -> Head:
        """Give a classifier that reads this model's embeddings.

        Raises:
            ConflictError: It was taught on another model's. And what `get` raises.
        """
        head = self.get(name)
        if head.description.fingerprint != self._fingerprint:
            raise ConflictError(
                f"classifier {name} was taught on model {head.description.fingerprint}, and {self._fingerprint} is "
                "served; teach it again, or serve that model"
            )
        return head

    async def teach(
        self,
        name: str,
        vectors: Float32[np.ndarray, "examples hidden"],
        labels: Sequence[str],
        *,
        inverse_regularization: float,
    ) -> Description:
        """Fit a classifier and store it; a former one of that name serves until then. When this returns it is on disk.

        Raises:
            InvalidError: The name breaks its rule, or there are fewer than two labels.
            ModelError: The fit failed.
        """
        check_name(name)
        names = sorted(set(labels))
        if len(names) < 2:
            raise InvalidError(f"the examples must have at least two labels, got only {names[0]!r}")
        numbers = np.array([names.index(label) for label in labels])
        async with self._fitting:
            fitted = await _fit(vectors, numbers, inverse_regularization)
        description = Description(
            name=name,
            labels=names,
            fingerprint=self._fingerprint,
            examples=len(labels),
            C=inverse_regularization,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        await asyncio.to_thread(self._store, Head(description, fitted["weights"], fitted["biases"]))
        return description

    def drop(self, name: str) -> None:
        """Remove a classifier. Raises what `get` does."""
        with self._lock:
            self.get(name)
            del self._heads[name]
            gone = self._path / f".{name}.gone"
            (self._path / name).rename(gone)
            _flush(self._path)
            shutil.rmtree(gone)

    def _store(self, head: Head) -> None:
        """Write the next version beside the last one, flush, rename; only then does the last one go."""
        with self._lock:
            folder = self._path / head.description.name
            folder.mkdir(mode=0o700, exist_ok=True)
            former = sorted(folder.glob("[0-9]*"))
            version = folder / f"{int(former[-1].name) + 1 if former else 1:06d}"
            partial = folder / ".partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(mode=0o700)
            tensors = {"weights": head.weights, "biases": head.biases}
            (partial / _HEAD).write_bytes(safetensors.numpy.save(tensors))
            (partial / _DESCRIPTION).write_text(json.dumps(asdict(head.description), indent=2), encoding="utf-8")
            for written in (partial / _HEAD, partial / _DESCRIPTION, partial):
                _flush(written)
            partial.rename(version)
            for changed in (folder, self._path):
                _flush(changed)
            self._heads[head.description.name] = head
            for old in former:
                shutil.rmtree(old)


def check_name(name: str) -> None:
    """Refuse what is no name of a classifier.

    Raises:
        InvalidError: It does not match `[a-z0-9][a-z0-9_-]{0,62}`.
    """
    if not _NAME.fullmatch(name):
        raise InvalidError(f"a classifier's name must match {_NAME.pattern}, got {name!r}")


async def _fit(
    vectors: Float32[np.ndarray, "examples hidden"], labels: np.ndarray, inverse_regularization: float
) -> dict[str, np.ndarray]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "service.fitting",
        repr(inverse_regularization),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        given = safetensors.numpy.save({"vectors": np.ascontiguousarray(vectors), "labels": labels})
        written, complaint = await process.communicate(given)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ModelError(f"the classifier could not be fitted: {complaint.decode(errors='replace')[-500:]}")
    fitted: dict[str, np.ndarray] = safetensors.numpy.load(written)
    if not all(np.isfinite(tensor).all() for tensor in fitted.values()):
        raise ModelError("the classifier's weights are not finite; use a smaller C")
    return fitted


def _read(path: Path) -> Head:
    try:
        description = Description(**json.loads((path / _DESCRIPTION).read_text(encoding="utf-8")))
        tensors = safetensors.numpy.load_file(path / _HEAD)
        return Head(description, tensors["weights"], tensors["biases"])
    except (OSError, ValueError, TypeError, KeyError, safetensors.SafetensorError) as error:
        raise NotReadyError(f"the classifier in {path} is damaged ({error}); remove that directory") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
