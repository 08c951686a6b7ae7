"""Corpora on disk → rows of text, streamed: a file of any size takes the memory of one row."""

import csv
import gzip
import hashlib
import json
import lzma
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

FORMATS = (".txt", ".jsonl", ".tsv", ".csv", ".parquet")
_OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+(?=[\"'“‘(\[]?[A-Z0-9])")
# After these, of 5 signs at most, a full stop ends no sentence.
_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|cf|Fig|No|Vol|al|[A-Z])\.)$")
_NOT_WORD = re.compile(r"(?:[^\w]|_)+")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")


class DataError(ValueError):
    """A corpus cannot be read, or holds rows that the settings refuse."""


class Corpus(BaseModel):
    """One file of text. Its format is told by its name: .txt, .jsonl, .tsv, .csv, .parquet, each also .gz or .xz.

    A .txt holds one paragraph a line, and a blank line between documents. A .tsv is split at tabs, without quoting.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Relative to the data directory."""
    columns: tuple[str, ...] = ()
    """Which columns (by their name in the header, or from "0" on without one) or keys; none for .txt."""
    where: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Take only rows in which these columns have one of these values."""
    header: bool = True
    """Whether a .tsv or .csv begins with the names of its columns."""
    split: Literal["whole", "sentences"] = "whole"
    """Whether each text is one, or is cut at the ends of its sentences."""
    min_chars: PositiveInt = 1
    max_chars: PositiveInt = 100_000
    """Shorter and longer texts are passed over."""
    share: float = Field(1.0, gt=0, le=1)
    """How much to take, picked by a hash of the text, so the same texts each time."""
    part: Literal["all", "train", "heldout"] = "all"
    """Of a file without a split of its own: nine tenths of its rows to train on, or the tenth that `is_heldout`."""
    vectors: str | None = None
    """A .npy with one row per row of the file: what a teacher made of these texts."""

    @property
    def format(self) -> str:
        """The suffix that tells the format.

        Raises:
            DataError: It is none of those that can be read.
        """
        suffixes = [suffix for suffix in Path(self.path).suffixes if suffix not in _OPENERS]
        if not suffixes or suffixes[-1] not in FORMATS:
            raise DataError(f"a corpus must end in {', '.join(FORMATS)}, perhaps with .gz or .xz; got {self.path}")
        return suffixes[-1]


@dataclass
class Tally:
    """What became of the rows of a corpus."""

    read: int = 0
    """Rows of the file, or its lines."""
    bad: Counter[str] = field(default_factory=Counter)
    """Rows that could not be used, by reason."""
    first_bad: str = ""
    contaminated: int = 0
    """Texts that stand in the list of evaluation sentences."""
    duplicates: int = 0
    passed_over: int = 0
    """Too short, too long, or outside the share asked for."""
    kept: int = 0

    def describe(self) -> str:
        """Give one line for people."""
        bad = "; ".join(f"{count} {reason}" for reason, count in self.bad.most_common())
        parts = [f"{self.read:,} rows", f"{self.kept:,} texts kept"]
        parts += [f"{self.duplicates:,} duplicates"] * bool(self.duplicates)
        parts += [f"{self.contaminated:,} contaminated"] * bool(self.contaminated)
        parts += [f"{self.passed_over:,} passed over"] * bool(self.passed_over)
        parts += [f"bad rows: {bad} (first: {self.first_bad})"] * bool(bad)
        return ", ".join(parts)


class Rows:
    """The rows of a corpus: for each its number and the text of each column asked for.

    Args:
        corpus: What to read.
        root: What its path is relative to.
        bad_rows: Whether a row that cannot be used is counted and skipped, or is an error.
        tally: Counts rows and bad rows as they pass.
        valued: Whether the last column holds a label or score, without which a row is bad.
    """

    def __init__(
        self, corpus: Corpus, root: Path, *, bad_rows: Literal["skip", "refuse"], tally: Tally, valued: bool = False
    ) -> None:
        self.corpus = corpus
        self.path = root / corpus.path
        self._columns = (*corpus.columns, *corpus.where)
        self._refuse = bad_rows == "refuse"
        self._tally, self._valued = tally, valued
        if corpus.format == ".txt" and self._columns:
            raise DataError(f"{corpus.path} has no columns, got {list(self._columns)}; name none, or make it a .tsv")
        if corpus.format != ".txt" and not corpus.columns:
            raise DataError(f"columns must be named for {corpus.path}, so that it is clear which hold the text")

    def __iter__(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """Give number and texts of each good row.

        Raises:
            DataError: The file cannot be read, lacks a column, or a row is bad and `bad_rows` is "refuse".
        """
        try:
            for number, row in enumerate(self._raw()):
                self._tally.read += 1
                if (isinstance(row, str) or self._wanted(row)) and (texts := self._check(number, row)):
                    yield number, texts[: max(len(self.corpus.columns), 1)]
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{self.path} cannot be read: {error}; is it whole, and --data right?") from error

    def _raw(self) -> Iterator[tuple[str, ...] | str]:
        """Give the texts of each row, or what is wrong with it."""
        if self.corpus.format == ".parquet":
            yield from self._parquet()
            return
        with open_text(self.path) as file:
            if self.corpus.format == ".txt":
                yield from ((line.rstrip("\r\n"),) for line in file)
            elif self.corpus.format == ".jsonl":
                yield from map(self._json, file)
            else:
                yield from self._table(file)

    def _json(self, line: str) -> tuple[str, ...] | str:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return "not JSON"
        return self._pick(row) if isinstance(row, dict) else "not a JSON object"

    def _pick(self, row: Mapping[str, Any]) -> tuple[str, ...] | str:
        values = [row.get(column) for column in self._columns]
        if any(isinstance(value, list | dict | bytes) or value is None for value in values):
            return "a column missing or not text"
        return tuple(value if isinstance(value, str) else str(value) for value in values)

    def _table(self, file: TextIOWrapper) -> Iterator[tuple[str, ...] | str]:
        rows = self._records(file)
        names = next(rows, []) if self.corpus.header else None
        if isinstance(names, str):
            raise DataError(f"{self.path} must begin with the names of its columns, got what is {names}")
        wanted = []
        for column in self._columns:
            if names is not None and names.count(column) != 1:
                raise DataError(f"{self.path} must have one column {column!r}, got {names}")
            if names is None and not column.isdecimal():
                raise DataError(f"columns of {self.path}, which has no header, must be numbers from 0, got {column!r}")
            wanted.append(names.index(column) if names is not None else int(column))
        for row in rows:
            whole = len(row) == len(names) if names is not None else len(row) > max(wanted)
            if isinstance(row, str):
                yield row
            else:
                yield tuple(row[index] for index in wanted) if whole else "another number of columns"

    def _records(self, file: TextIOWrapper) -> Iterator[list[str] | str]:
        """Give the cells of each row of a table, or what is wrong with it."""
        if self.corpus.format == ".tsv":
            yield from (line.rstrip("\r\n").split("\t") for line in file)
            return
        csv.field_size_limit(2**31 - 1)  # a long document is a long field
        reader = csv.reader(file, strict=True)
        while True:
            try:
                yield next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield f"not CSV ({error})"

    def _parquet(self) -> Iterator[tuple[str, ...] | str]:
        try:
            from pyarrow import ArrowException, parquet  # noqa: PLC0415 - an extra that only this format needs
        except ModuleNotFoundError as error:
            raise DataError("Parquet needs pyarrow: pip install 'nearsense[parquet]'") from error
        try:
            with _OPENERS.get(self.path.suffix, open)(self.path, "rb") as opened:
                file = parquet.ParquetFile(opened)
                names = file.schema_arrow.names
                if missing := [column for column in self._columns if names.count(column) != 1]:
                    raise DataError(f"{self.path} must have one column {missing[0]!r}, got {names}")
                for batch in file.iter_batches(1024, columns=list(dict.fromkeys(self._columns))):
                    yield from map(self._pick, batch.to_pylist())
        except (ArrowException, UnicodeDecodeError) as error:
            raise DataError(f"{self.path} is no whole Parquet file: {error}") from error

    def _wanted(self, texts: tuple[str, ...]) -> bool:
        if self.corpus.format == ".txt" and not texts[0].strip():
            return True  # it parts documents
        given = texts[len(self.corpus.columns) :]
        if self.corpus.part != "all" and is_heldout(texts[0]) != (self.corpus.part == "heldout"):
            return False
        return all(value in values for value, values in zip(given, self.corpus.where.values(), strict=False))

    def _check(self, number: int, row: tuple[str, ...] | str) -> tuple[str, ...] | None:
        if not isinstance(row, str):
            count = len(self.corpus.columns) - self._valued
            if self.corpus.format != ".txt" and not any(text.strip() for text in row[:count]):
                row = "no text"
            elif self._valued and not row[count].strip():
                row = "no label or score"
            elif any(_CONTROL.search(text) for text in row):
                row = "control characters or invalid UTF-8"
            else:
                return row
        where = f"{self.path}, row {number} (the first is 0): {row}"
        if self._refuse:
            raise DataError(f'{where}; mend the row, or set bad_rows = "skip"')
        self._tally.bad[row] += 1
        self._tally.first_bad = self._tally.first_bad or where
        return None


class Decontaminator:
    """Knows the sentences that models are tested on, by the hashes of their normalised text.

    Args:
        path: Sorted little-endian 64-bit hashes, as `text_hash` makes them; None knows nothing.
    """

    def __init__(self, path: Path | None) -> None:
        try:
            content = b"" if path is None else path.read_bytes()
        except OSError as error:
            raise DataError(f"the hashes in {path} cannot be read: {error.strerror}; is --data right?") from error
        hashes = np.frombuffer(content[: len(content) // 8 * 8], dtype="<u8")
        if path is not None and (not content or len(content) % 8 or (hashes[1:] < hashes[:-1]).any()):
            raise DataError(f"{path} must hold sorted hashes of 8 bytes each, got {len(content)} bytes")
        self._set = frozenset(hashes.tolist())

    def hits(self, text: str) -> bool:
        """Tell whether the text, or one of its sentences, is an evaluation sentence."""
        if not self._set:
            return False
        return text_hash(text) in self._set or any(text_hash(sentence) in self._set for sentence in sentences(text))

    def clean(self, text: str) -> str:
        """Give the text without its evaluation sentences."""
        if not self.hits(text):
            return text
        if text_hash(text) in self._set:
            return ""
        return " ".join(sentence for sentence in sentences(text) if text_hash(sentence) not in self._set)


def text_hash(text: str) -> int:
    """Give 64 bits of a text that do not depend on case, punctuation, white space, or Unicode's ways to write it."""
    normalized = _NOT_WORD.sub(" ", unicodedata.normalize("NFKC", text).lower()).strip()
    return int.from_bytes(hashlib.blake2b(normalized.encode(errors="surrogatepass"), digest_size=8).digest(), "little")


def is_heldout(text: str) -> bool:
    """Tell whether a text is of the tenth of its file that is for testing: its hash is a multiple of 10."""
    return text_hash(text) % 10 == 0


def sentences(text: str) -> list[str]:
    """Cut a text at the ends of its sentences, as far as capitals and full stops tell them."""
    cut: list[str] = []
    start = 0
    for end in _SENTENCE_END.finditer(text):
        if not _ABBREVIATION.search(text, max(start, end.start() - 5), end.start()):
            cut.append(text[start : end.end()].strip())
            start = end.end()
    cut.append(text[start:].strip())
    return [sentence for sentence in cut if sentence]


def open_text(path: Path) -> TextIOWrapper:
    """Open a file of text, unpacking it if its name says so."""
    return _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="\n")
