"""What a document is, what its id, text, metadata, vector and collection's name may be, and how they are stored."""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Float32

from service.errors import InvalidError

MAX_ID_BYTES = 512
MAX_METADATA_DEPTH = 64
# 4,000 digits: of more than 4,300, Python refuses to read an integer back from JSON.
MAX_INTEGER_BITS = 13_288

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with its id and whatever else was stored beside it."""

    id: str
    """1 to 512 bytes of UTF-8 without control characters and without a step . or ..; unique in its collection."""
    text: str
    """Any Unicode, NUL included, but lone surrogates."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """A JSON object. Integers keep every digit, as many as 4,000."""


@dataclass(frozen=True, slots=True)
class NewDocument:
    """A document on its way in."""

    text: str
    id: str | None = None
    """None lets one be made up."""
    metadata: dict[str, Any] = field(default_factory=dict)


def check_documents(documents: Sequence[Document]) -> list[tuple[str, bytes, str, str]]:
    """Hold documents against the rules, as `Store.upsert_documents` does, without storing them.

    Returns:
        Id, hash of the text, metadata as JSON, and text of each.

    Raises:
        InvalidError: One breaks a rule, or two have the same id. The message names them by their index.
    """
    first: dict[str, int] = {}
    rows = []
    for index, document in enumerate(documents):
        where = f"document {index}"
        check_document_id(document.id, where=f"the id of {where}")
        if (other := first.setdefault(document.id, index)) != index:
            raise InvalidError(f"ids must differ within a call, got {document.id!r} for documents {other} and {index}")
        hashed = text_hash(document.text, where=f"the text of {where}")
        metadata = _encode_metadata(document.metadata, f"the metadata of {where}")
        rows.append((document.id, hashed, metadata, document.text))
    return rows


def check_collection_name(name: str) -> None:
    """Raise InvalidError unless a collection may have this name."""
    if not _NAME.fullmatch(name):
        raise InvalidError(f"names of collections must match {_NAME.pattern}, got {name!r}")


def check_document_id(document_id: str, *, where: str = "the id") -> None:
    """Raise InvalidError unless a document may have this id. The message calls it `where`."""
    size = len(_encode_text(document_id, where))
    if not 1 <= size <= MAX_ID_BYTES or _CONTROL.search(document_id):
        raise InvalidError(
            f"{where} must be 1 to {MAX_ID_BYTES} bytes of UTF-8 without control characters, "
            f"got {size} bytes: {document_id[:80]!r}"
        )
    # Clients resolve such steps before they ask, and a document's address would become its collection's.
    if not {".", ".."}.isdisjoint(document_id.split("/")):
        raise InvalidError(f"{where} must not be . or .., nor hold one between slashes, got {document_id[:80]!r}")


def _encode_text(text: str, where: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(
            f"{where} must be Unicode text, got the lone surrogate U+{ord(text[error.start]):04X} at character "
            f"{error.start}; replace it, for instance by U+FFFD"
        ) from error


def text_hash(text: str, *, where: str) -> bytes:
    """Give the SHA-256 that tells whether a text has changed.

    Raises:
        InvalidError: It has a lone surrogate. The message calls it `where`.
    """
    return hashlib.sha256(_encode_text(text, where)).digest()


def _encode_metadata(metadata: dict[str, Any], where: str) -> str:
    for place, leaf in _leaves(metadata, where):
        if isinstance(leaf, str):
            _encode_text(leaf, place)
        elif isinstance(leaf, int):
            if leaf.bit_length() > MAX_INTEGER_BITS:
                raise InvalidError(f"{place} must have at most 4,000 digits, got {leaf.bit_length()} bits")
        elif isinstance(leaf, float):
            if not math.isfinite(leaf):
                raise InvalidError(f"{place} must be finite, since JSON has no other numbers, got {leaf}")
        elif leaf is not None:
            raise InvalidError(f"{place} must be something that JSON has, got {type(leaf).__name__}")
    return json.dumps(metadata, ensure_ascii=False)


def _leaves(value: object, where: str, depth: int = 1) -> Iterator[tuple[str, object]]:
    """Give every key and every value that holds no others, each with the place it stands at."""
    if isinstance(value, dict | list) and depth > MAX_METADATA_DEPTH:
        raise InvalidError(f"metadata must be nested at most {MAX_METADATA_DEPTH} deep, got more at {where[:200]}")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidError(f"the keys of {where} must be strings, got {key!r}")
            yield f"the key {key!r} of {where}", key
            yield from _leaves(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}[{index}]", depth + 1)
    else:
        yield where, value


def encode_vectors(vectors: Float[np.ndarray, "documents dimensions"], *, rows: int) -> list[bytes]:
    """Give each vector as it is stored, in little-endian float32.

    Raises:
        InvalidError: There are not as many as `rows`, or one is not finite as float32.
    """
    if vectors.ndim != 2 or len(vectors) != rows:
        raise InvalidError(f"vectors must have one row for each of the {rows} documents, got the shape {vectors.shape}")
    with np.errstate(over="ignore"):  # too large for float32 is reported below
        stored = vectors.astype("<f4")
    finite = np.isfinite(stored).all(axis=1)
    if not finite.all():
        raise InvalidError(f"vectors must be finite, and that of document {np.argmin(finite)} is not")
    return [row.tobytes() for row in stored]


def decode_vectors(blobs: Sequence[bytes]) -> Float32[np.ndarray, "rows dimensions"]:
    """Undo `encode_vectors`. The vectors are read-only."""
    return np.frombuffer(b"".join(blobs), dtype="<f4").astype(np.float32, copy=False).reshape(len(blobs), -1)
