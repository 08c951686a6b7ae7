"""Classifiers: logistic regressions on embeddings, taught over the API and kept in the data directory.

A directory each, in it one per version, as `encoder.classifier` writes them. The highest version is the one that
serves. Heads that came with the model stand beside them.
"""

import asyncio
import shutil
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from jaxtyping import Float32

from encoder import ModelDirectoryError
from encoder.classifier import HEAD_NAME, ClassifierHead, read_head, write_head
from encoder.files import flush
from service.errors import ConflictError, InvalidError, ModelError, NotFoundError, NotReadyError


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What a client may know of a classifier."""

    name: str
    labels: list[str]
    fingerprint: str
    """Of the model whose embeddings it reads."""
    shipped: bool
    """Whether it came with the model."""
    temperature: float
    """What its logits are divided by."""
    details: dict[str, Any]
    """How it was made."""


class Classifiers:
    """All classifiers of a data directory, for one model. Any number of threads may share it.

    Args:
        path: Their directory; made if it is missing.
        fingerprint: Of the model that all vectors given to this object come from.
        shipped: The heads that came with the model; one that is taught takes the place of its namesake.

    Raises:
        NotReadyError: A classifier is damaged.
    """

    def __init__(self, path: Path, *, fingerprint: str, shipped: Mapping[str, ClassifierHead]) -> None:
        self._path = path
        self._fingerprint = fingerprint
        self._shipped = shipped
        self._lock = threading.Lock()
        self._fitting = asyncio.Semaphore(1)
        path.mkdir(mode=0o700, exist_ok=True)
        for dropped in (*path.glob(".*/"), *path.glob("*/.*/")):  # by a process that was killed meanwhile
            shutil.rmtree(dropped)
        folders = [folder for folder in path.glob("*/") if any(folder.glob("[0-9]*"))]
        self._taught = {folder.name: _read(max(folder.glob("[0-9]*"))) for folder in folders}

    def list(self) -> list[Description]:
        """Tell what classifiers there are, by name, those of other models included."""
        return [self.describe(name) for name in sorted({*self._shipped, *self._taught})]

    def describe(self, name: str) -> Description:
        """Tell what a classifier is. Raises what `get` does."""
        return _describe(name, self.get(name), shipped=name not in self._taught)

    def get(self, name: str) -> ClassifierHead:
        """Give a classifier.

        Raises:
            InvalidError: The name does not match `[a-z0-9][a-z0-9_-]{0,62}`.
            NotFoundError: There is none of that name.
        """
        check_name(name)
        head = self._taught.get(name) or self._shipped.get(name)
        if head is None:
            raise NotFoundError(f"there is no classifier {name}; teach one with PUT /classifiers/{name}")
        return head

    def ready(self, name: str) -> ClassifierHead:
        """Give a classifier that reads this model's embeddings.

        Raises:
            ConflictError: It was taught on another model's. And what `get` raises.
        """
        head = self.get(name)
        if head.fingerprint != self._fingerprint:
            raise ConflictError(
                f"classifier {name} was taught on model {head.fingerprint}, and {self._fingerprint} is "
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
            NotReadyError: It could not be stored.
        """
        check_name(name)
        names = sorted(set(labels))
        if len(names) < 2:
            raise InvalidError(f"the examples must have at least two labels, got only {names[0]!r}")
        numbers = np.array([names.index(label) for label in labels])
        async with self._fitting:
            fitted = await _fit(vectors, numbers, inverse_regularization)
        head = ClassifierHead(
            labels=tuple(names),
            weights=fitted["weights"],
            biases=fitted["biases"],
            fingerprint=self._fingerprint,
            details={
                "examples": len(labels),
                "C": inverse_regularization,
                "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            },
        )
        try:
            await asyncio.to_thread(self._store, name, head)
        except OSError as error:
            raise NotReadyError(
                f"the classifier could not be stored and the former one still serves ({error.strerror}); see whether "
                "the disk is full"
            ) from error
        return _describe(name, head, shipped=False)

    def drop(self, name: str) -> None:
        """Remove a classifier that was taught; a namesake that came with the model serves again.

        Raises:
            ConflictError: It came with the model. And what `get` raises.
        """
        with self._lock:
            self.get(name)
            if name not in self._taught:
                raise ConflictError(f"classifier {name} came with the model and cannot be dropped; teach another of it")
            del self._taught[name]
            gone = self._path / f".{name}.gone"
            (self._path / name).rename(gone)
            flush(self._path)
            shutil.rmtree(gone)

    def _store(self, name: str, head: ClassifierHead) -> None:
        """Write the next version beside the last one; only when it is on disk does the last one go."""
        with self._lock:
            folder = self._path / name
            folder.mkdir(mode=0o700, exist_ok=True)
            former = sorted(folder.glob("[0-9]*"))
            write_head(folder / f"{int(former[-1].name) + 1 if former else 1:06d}", head)
            flush(self._path)
            self._taught[name] = head
            for old in former:
                shutil.rmtree(old)


def check_name(name: str) -> None:
    """Refuse what is no name of a classifier.

    Raises:
        InvalidError: It does not match `[a-z0-9][a-z0-9_-]{0,62}`.
    """
    if not HEAD_NAME.fullmatch(name):
        raise InvalidError(f"a classifier's name must match {HEAD_NAME.pattern}, got {name!r}")


def _describe(name: str, head: ClassifierHead, *, shipped: bool) -> Description:
    return Description(
        name=name,
        labels=list(head.labels),
        fingerprint=head.fingerprint,
        shipped=shipped,
        temperature=head.temperature,
        details=dict(head.details),
    )


async def _fit(
    vectors: Float32[np.ndarray, "examples hidden"], labels: np.ndarray, inverse_regularization: float
) -> dict[str, np.ndarray]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",  # or a module of the same name in the working directory would be run
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


def _read(path: Path) -> ClassifierHead:
    try:
        return read_head(path)
    except ModelDirectoryError as error:
        raise NotReadyError(str(error)) from error
