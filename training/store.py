"""Tokenised texts on disk, read through memory maps: a corpus may be larger than memory."""

import json
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from encoder.model_dir import ModelSpec
from encoder.tokenizer import TextTokenizer
from training.config import Data
from training.data import DataError
from training.source import Item, Source

logger = logging.getLogger(__name__)

_TEXTS_AT_ONCE = 4096
T = TypeVar("T")


class TokenStore:
    """Token ids of many texts, one after another.

    Args:
        path: A directory that `write_store` made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sides: int = json.loads((path / "store.json").read_text())["sides"]
        """Texts of an item: 2 for pairs."""
        self.ids = np.load(path / "ids.npy", mmap_mode="r")
        """Of all texts."""
        self.ends = np.load(path / "ends.npy")
        """Where each text ends in `ids`, exclusive."""

    def __len__(self) -> int:
        return len(self.ends) // self.sides

    def text(self, item: int, side: int = 0) -> np.ndarray:
        """Give the token ids of one text, special tokens included."""
        index = item * self.sides + side
        return self.ids[self.ends[index - 1] if index else 0 : self.ends[index]]

    def lengths(self) -> np.ndarray:
        """Give the tokens of each item's longest text."""
        return np.diff(self.ends, prepend=0).reshape(-1, self.sides).max(axis=1)

    def column(self, name: str) -> np.ndarray:
        """Give what else is stored, a row an item: "vectors", "values"."""
        return np.load(self.path / f"{name}.npy", mmap_mode="r")


class ArrayWriter:
    """Appends rows to a .npy whose length is not known yet. It is there when the `with` block ends without an error."""

    def __init__(self, path: Path, dtype: np.dtype | str, *shape: int) -> None:
        self._path, self._dtype, self._shape = path, np.dtype(dtype), shape
        self._rows = 0
        self._raw = path.with_suffix(".raw")
        self._file = self._raw.open("wb")

    def append(self, rows: np.ndarray) -> None:
        """Add rows."""
        if rows.shape[1:] != self._shape:
            raise ValueError(f"rows must have the shape {self._shape}, got {rows.shape[1:]}. This is a bug.")
        self._file.write(np.ascontiguousarray(rows, dtype=self._dtype).tobytes())
        self._rows += len(rows)

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is not None:
            self._raw.unlink()
            return
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": (self._rows, *self._shape)}
        with self._path.open("wb") as file, self._raw.open("rb") as rows:
            np.lib.format.write_array_header_1_0(file, header)
            shutil.copyfileobj(rows, file)
        self._raw.unlink()


def write_store(
    path: Path,
    items: Iterable[Item],
    spec: ModelSpec,
    *,
    sides: int = 1,
    cut: bool = True,
    hooks: Sequence[Callable[[Sequence[Item]], None]] = (),
) -> TokenStore:
    """Tokenise items into the directory `path`, some thousands at a time.

    Args:
        path: Without `store.json` in it, it is not finished.
        items: What to tokenise.
        spec: Its tokenizer and maximum length.
        sides: Texts of an item.
        cut: Whether texts are cut to the maximum length.
        hooks: Called with each group of items, in order, before these are forgotten.

    Raises:
        DataError: There is no item.
    """
    (path / "store.json").unlink(missing_ok=True)
    tokenizer = TextTokenizer(spec)
    dtype = np.dtype("<u2" if spec.config.vocab_size <= 2**16 else "<u4")
    end = truncated = 0
    with ArrayWriter(path / "ids.npy", dtype) as ids, ArrayWriter(path / "ends.npy", "<i8") as ends:
        for group in _groups(items, _TEXTS_AT_ONCE if cut else 64):
            encoded = tokenizer.encode([text for item in group for text in item.texts], cut=cut)
            truncated += sum(text.truncated for text in encoded)
            ids.append(np.fromiter((token for text in encoded for token in text.input_ids), dtype=dtype))
            lengths = np.array([len(text.input_ids) for text in encoded])
            ends.append(end + lengths.cumsum())
            end += int(lengths.sum())
            for hook in hooks:
                hook(group)
    if not end:
        raise DataError("the corpora must hold at least one text that the settings keep, got none")
    if truncated:
        logger.info("%d of %d texts are cut to %d tokens", truncated, len(np.load(path / "ends.npy")), spec.max_length)
    (path / "store.json").write_text(json.dumps({"sides": sides}))
    return TokenStore(path)


def report(source: Source, data: Data, *, what: str) -> None:
    """Log what became of each corpus, and raise an alarm where many texts were duplicates."""
    for corpus, tally in zip(source.corpora, source.tallies, strict=True):
        logger.info("%s: %s: %s", what, corpus.path, tally.describe())
        seen = tally.kept + tally.duplicates
        if seen and tally.duplicates / seen > data.most_duplicates:
            logger.warning(
                "ALARM: %d of %d texts of %s are duplicates, more than the share %g of data.most_duplicates; "
                "is the file what you think it is?",
                tally.duplicates,
                seen,
                corpus.path,
                data.most_duplicates,
            )


def _groups(items: Iterable[T], size: int) -> Iterable[list[T]]:
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group
