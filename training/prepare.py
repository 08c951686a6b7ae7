"""Corpora → token stores, with a teacher's vectors beside them if asked; made once and kept."""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from encoder.files import whole_directory
from encoder.model_dir import ModelSpec
from training.config import Data, Objective
from training.data import Corpus, DataError
from training.distributed import World
from training.source import Item, Source
from training.store import TokenStore, report, write_store
from training.teacher import TeacherVectors, teacher_dir

logger = logging.getLogger(__name__)

_HELD_OUT = "heldout"


def prepare_documents(
    corpora: Sequence[Corpus], data: Data, root: Path, out: Path, spec: ModelSpec, *, heldout: float, world: World
) -> tuple[TokenStore, TokenStore]:
    """Tokenise whole documents, and keep some apart.

    Args:
        corpora: What to read.
        data: How.
        root: What their paths are relative to.
        out: Where prepared corpora are kept.
        spec: Of the model to be trained.
        heldout: Share of the documents in the second store, each 1 / share-th.
        world: Its leader does the work, the others wait.

    Raises:
        DataError: There are too few documents to keep any apart.
    """

    def fill(path: Path) -> None:
        source = Source(corpora, root, data)
        (path / _HELD_OUT).mkdir()
        apart: list[Item] = []
        every = round(1 / heldout)

        def training() -> Iterable[Item]:
            for number, document in enumerate(_some(source.documents(), source)):
                if number % every == every - 1:
                    apart.append(document)
                else:
                    yield document

        write_store(path, training(), spec, cut=False)
        if not apart:
            got = ", ".join(
                f"{tally.kept} in {corpus.path}" for corpus, tally in zip(corpora, source.tallies, strict=True)
            )
            raise DataError(
                f"the corpora must hold at least {every} documents, so that one can be held out, got {got}; add text"
            )
        write_store(path / _HELD_OUT, apart, spec, cut=False)
        report(source, data, what="pretraining")

    path = _prepared(out, _key(corpora, data, root, spec, heldout=heldout), fill, world)
    return TokenStore(path), TokenStore(path / _HELD_OUT)


def prepare_items(
    objective: Objective, data: Data, root: Path, out: Path, spec: ModelSpec, *, sides: int, valued: bool, world: World
) -> TokenStore:
    """Tokenise the texts of an objective, with their values and their teacher's vectors as further columns.

    Arguments as in `prepare_documents`.
    """
    teacher = getattr(objective, "teacher", None)
    wants_vectors = objective.kind == "distill"  # type: ignore[attr-defined]

    def fill(path: Path) -> None:
        source = Source(objective.corpora, root, data, sides=sides, valued=valued)
        vectors: TeacherVectors | None = None
        with ExitStack() as stack:
            hooks: list[Callable[[Sequence[Item]], None]] = []
            if wants_vectors:
                vectors = TeacherVectors(path / "vectors.npy", objective.corpora, root, teacher)
                hooks.append(stack.enter_context(vectors))
            values: list[str] = []
            if valued:
                hooks.append(lambda group: values.extend(item.value for item in group))
            write_store(path, _some(source, source), spec, sides=sides, hooks=hooks)
        if vectors is not None:
            vectors.check_rows(source.tallies)
        if valued:
            np.save(path / "values.npy", np.array(values))
        report(source, data, what=objective.kind)  # type: ignore[attr-defined]

    extra = {"sides": sides, "valued": valued, "teacher": teacher and str(teacher_dir(teacher, root))}
    key = _key(objective.corpora, data, root, spec, **extra)
    return TokenStore(_prepared(out, key, fill, world))


def _some(items: Iterable[Item], source: Source) -> Iterator[Item]:
    """Give the items of a source, and refuse corpora of which nothing is left."""
    yield from items
    if not any(tally.kept for tally in source.tallies):
        told = "; ".join(
            f"{corpus.path}: {tally.describe()}" for corpus, tally in zip(source.corpora, source.tallies, strict=True)
        )
        raise DataError(f"the corpora must hold at least one text that the settings keep, got none ({told})")


def _key(corpora: Sequence[Corpus], data: Data, root: Path, spec: ModelSpec, **extra: Any) -> str:
    """Name all that decides what a store holds; files by size and time, since they may be larger than memory."""
    files = [root / corpus.path for corpus in corpora] + [root / c.vectors for c in corpora if c.vectors]
    files += [root / data.decontaminate] if data.decontaminate else []
    try:
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    except OSError as error:
        raise DataError(
            f"{error.filename} cannot be read ({error.strerror}); is --data the right directory?"
        ) from error
    described = {
        "corpora": [corpus.model_dump() for corpus in corpora],
        "data": data.model_dump(),
        "files": stats,
        "tokenizer": spec.tokenizer_json,
        "max_length": spec.max_length,
        **extra,
    }
    return hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=8).hexdigest()


def _prepared(out: Path, key: str, fill: Callable[[Path], None], world: World) -> Path:
    """Give the directory of a prepared corpus, filled first by the leader if it is not there."""
    final = out / key
    if world.leads and not final.exists():
        for dropped in out.glob(f".{key}.*"):  # by a process that was killed meanwhile
            shutil.rmtree(dropped)
        with whole_directory(final) as partial:
            fill(partial)
    world.wait()
    return final
