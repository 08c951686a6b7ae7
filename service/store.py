"""SQLite is the truth: collections, their documents, and the vectors that every index is rebuilt from.

What a method wrote is on the disk when it returns, whole or not at all. Any number of threads may share a store: reads
run side by side, each on one state of the database; writes take turns. One process at a time uses a data directory.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Float32, Int64

from service.database import Database, now
from service.documents import (
    Document,
    check_collection_name,
    check_document_id,
    check_documents,
    decode_vectors,
    encode_vectors,
    text_hash,
)
from service.errors import ConflictError, InvalidError, NotFoundError

_SELECT_COLLECTIONS = "SELECT collection_id, name, fingerprint, dimensions, created, change FROM collections"
_SELECT_DOCUMENTS = "SELECT document_id, text, metadata FROM documents"


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """A collection as it is stored."""

    id: int
    """Never reused: a collection dropped and made again has another."""
    name: str
    fingerprint: str
    """Of the model that all its vectors come from."""
    dimensions: int
    created: str
    """ISO 8601, UTC."""
    change: int
    """Number of the last write to its documents; each write takes a higher one."""


@dataclass(frozen=True, slots=True)
class Upserted:
    """What a write of documents did to the vectors."""

    vector_ids: list[int]
    """New, ascending, in the order of the documents."""
    replaced: list[int]
    """Those of the documents' former versions, which are gone and never come back."""


def _collection(db: sqlite3.Connection, name: str) -> CollectionInfo:
    check_collection_name(name)
    for row in db.execute(f"{_SELECT_COLLECTIONS} WHERE name = ?", (name,)):
        return CollectionInfo(*row)
    raise NotFoundError(f"there is no collection {name!r}; create it, or add documents to it")


def _next_change(db: sqlite3.Connection, collection_id: int) -> int:
    db.execute("UPDATE collections SET change = change + 1 WHERE collection_id = ?", (collection_id,))
    query = "SELECT change FROM collections WHERE collection_id = ?"
    return int(db.execute(query, (collection_id,)).fetchone()[0])


def _delete(db: sqlite3.Connection, collection_id: int, document_ids: Sequence[str]) -> list[int]:
    which = "FROM documents WHERE collection_id = ? AND document_id IN (SELECT value FROM json_each(?))"
    values = (collection_id, json.dumps(list(document_ids)))
    vector_ids = [vector_id for (vector_id,) in db.execute(f"SELECT vector_id {which} ORDER BY vector_id", values)]
    if vector_ids:
        db.execute(f"DELETE {which}", values)
    return vector_ids


def _document(document_id: str, text: str, metadata: str) -> Document:
    return Document(document_id, text, json.loads(metadata))


class Store:
    """The database of one data directory; made by `open`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, data_dir: Path) -> "Store":
        """Open the database, made or brought up to date where necessary, and lock the directory for this process.

        The lock goes when the process ends, however it ends. A forked child shares it, so start children by spawning.

        Args:
            data_dir: On a local disk; created if it is missing, readable by this user alone.

        Raises:
            ConflictError: Another store has the directory open, or a newer release has written the database.
            NotReadyError: The database is damaged or cannot be opened.
        """
        return cls(Database.open(data_dir))

    def close(self) -> None:
        """Finish the write in progress, then close the database and release the directory. Twice is harmless.

        Later calls raise NotReadyError.
        """
        self._database.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create_collection(self, name: str, *, fingerprint: str, dimensions: int) -> CollectionInfo:
        """Make an empty collection, for vectors of the model that has this fingerprint.

        Raises:
            InvalidError: The name does not match `[a-z0-9][a-z0-9_-]{0,62}`, or `dimensions` is below 1.
            ConflictError: The name is taken.
        """
        check_collection_name(name)
        if dimensions < 1:
            raise InvalidError(f"dimensions must be at least 1, got {dimensions}")
        with self._database.writing() as db:
            if db.execute("SELECT 1 FROM collections WHERE name = ?", (name,)).fetchone():
                raise ConflictError(f"the collection {name!r} exists already; drop it first or choose another name")
            insert = "INSERT INTO collections (name, fingerprint, dimensions, created) VALUES (?, ?, ?, ?)"
            db.execute(insert, (name, fingerprint, dimensions, now()))
            return _collection(db, name)

    def get_collection(self, name: str) -> CollectionInfo:
        """Look a collection up.

        Raises:
            InvalidError: No collection can have this name.
            NotFoundError: None has it.
        """
        with self._database.reading() as db:
            return _collection(db, name)

    def list_collections(self) -> list[CollectionInfo]:
        """Give all collections, by name."""
        with self._database.reading() as db:
            return [CollectionInfo(*row) for row in db.execute(f"{_SELECT_COLLECTIONS} ORDER BY name")]

    def drop_collection(self, name: str) -> None:
        """Remove a collection and its documents; copies remain until `purge`. Raises what `get_collection` does."""
        with self._database.writing() as db:
            db.execute("DELETE FROM collections WHERE collection_id = ?", (_collection(db, name).id,))

    def count_documents(self, name: str) -> int:
        """Count a collection's documents. Raises what `get_collection` does."""
        with self._database.reading() as db:
            query = "SELECT count(*) FROM documents WHERE collection_id = ?"
            return int(db.execute(query, (_collection(db, name).id,)).fetchone()[0])

    def upsert_documents(
        self, name: str, documents: Sequence[Document], *, vectors: Float[np.ndarray, "documents dimensions"]
    ) -> Upserted:
        """Add documents, all or none; one whose id is taken replaces the former version, under a new vector id.

        No two may have the same id. Vectors must be finite, one row a document; they are stored as float32.

        Raises:
            InvalidError: A document or the vectors break a rule. The message names the document by its index.
            NotFoundError: There is no such collection.
            NotReadyError: The disk is full or failed; nothing was stored.
        """
        rows = check_documents(documents)
        blobs = encode_vectors(vectors, rows=len(documents))
        with self._database.writing() as db:
            collection = _collection(db, name)
            if blobs and len(blobs[0]) != 4 * collection.dimensions:
                wanted = f"{collection.dimensions} dimensions in the collection {name!r}"
                raise InvalidError(f"vectors must have {wanted}, got {vectors.shape[1]}")
            change = _next_change(db, collection.id)
            replaced = _delete(db, collection.id, [document.id for document in documents])
            head = (collection.id, change, now())
            db.executemany(
                "INSERT INTO documents (collection_id, change, updated, document_id, text_hash, metadata, text, vector)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(*head, *row, blob) for row, blob in zip(rows, blobs, strict=True)],
            )
            new = "SELECT vector_id FROM documents WHERE collection_id = ? AND change = ? ORDER BY vector_id"
            return Upserted([vector_id for (vector_id,) in db.execute(new, (collection.id, change))], replaced)

    def delete_documents(self, name: str, document_ids: Sequence[str]) -> list[int]:
        """Delete documents and give the vector ids they had, ascending. Ids that no document has are passed over.

        Their bytes are overwritten, yet copies remain on the disk: see `purge`.

        Raises:
            InvalidError: No document can have such an id.
            NotFoundError: There is no such collection.
        """
        for index, document_id in enumerate(document_ids):
            check_document_id(document_id, where=f"id {index}")
        with self._database.writing() as db:
            collection = _collection(db, name)
            deleted = _delete(db, collection.id, document_ids)
            if deleted:
                _next_change(db, collection.id)
            return deleted

    def get_document(self, name: str, document_id: str) -> Document:
        """Look a document up by its id.

        Raises:
            InvalidError: No document can have this id.
            NotFoundError: There is no such collection, or no such document in it.
        """
        check_document_id(document_id)
        with self._database.reading() as db:
            query = f"{_SELECT_DOCUMENTS} WHERE collection_id = ? AND document_id = ?"
            for row in db.execute(query, (_collection(db, name).id, document_id)):
                return _document(*row)
        raise NotFoundError(f"the collection {name!r} has no document with the id {document_id!r}")

    def list_documents(self, name: str, *, limit: int = 100, after: str | None = None) -> list[Document]:
        """Give a page of documents by ascending id, as UTF-8 sorts. Fewer than `limit` means there are no more.

        The page starts behind the id `after`, whether or not a document has it.

        Raises:
            InvalidError: No collection can have this name, or no document the id; or `limit` is below 1.
            NotFoundError: There is no such collection.
        """
        if limit < 1:
            raise InvalidError(f"limit must be at least 1, got {limit}")
        if after is not None:
            check_document_id(after, where="after")
        query = f"{_SELECT_DOCUMENTS} WHERE collection_id = ? AND document_id > ? ORDER BY document_id LIMIT ?"
        with self._database.reading() as db:
            rows = db.execute(query, (_collection(db, name).id, after or "", min(limit, 2**62))).fetchall()
        return [_document(*row) for row in rows]

    def documents_by_vector_ids(self, vector_ids: Sequence[int] | Int64[np.ndarray, " ids"]) -> dict[int, Document]:
        """Give the documents that have these vectors now. Those replaced, deleted or dropped since are left out."""
        query = (
            "SELECT vector_id, document_id, text, metadata FROM documents "
            "WHERE vector_id IN (SELECT value FROM json_each(?))"
        )
        with self._database.reading() as db:
            rows = db.execute(query, (json.dumps([int(vector_id) for vector_id in vector_ids]),)).fetchall()
        return {row[0]: _document(*row[1:]) for row in rows}

    def unchanged_vectors(self, name: str, texts: Mapping[str, str]) -> dict[str, Float32[np.ndarray, " dimensions"]]:
        """Give the stored vectors, read-only, of those documents alone that still have the text given for their id.

        Whether they come from the model in use is for the caller to check, by the collection's fingerprint.

        Raises:
            InvalidError: A name, id or text breaks its rule.
            NotFoundError: There is no such collection.
        """
        hashes = {key: text_hash(text, where=f"the text of {key!r}") for key, text in texts.items()}
        for document_id in texts:
            check_document_id(document_id)
        query = (
            "SELECT document_id, text_hash, vector FROM documents "
            "WHERE collection_id = ? AND document_id IN (SELECT value FROM json_each(?))"
        )
        with self._database.reading() as db:
            rows = db.execute(query, (_collection(db, name).id, json.dumps(list(texts)))).fetchall()
        return {row[0]: decode_vectors([row[2]])[0] for row in rows if row[1] == hashes[row[0]]}

    def iterate_vectors(
        self, name: str, *, block: int = 4096
    ) -> Iterator[tuple[Int64[np.ndarray, " block"], Float32[np.ndarray, "block dimensions"]]]:
        """Give all vectors with their ids, ascending, in blocks: what an index is rebuilt from.

        All blocks show the collection as it was at the first, which raises what `get_collection` does. Run it to its
        end or close it: until then the log cannot shrink.
        """
        query = "SELECT vector_id, vector FROM documents WHERE collection_id = ? ORDER BY change, vector_id"
        with self._database.reading() as db:
            cursor = db.execute(query, (_collection(db, name).id,))
            while rows := cursor.fetchmany(block):
                yield np.array([row[0] for row in rows], dtype=np.int64), decode_vectors([row[1] for row in rows])

    def purge(self) -> None:
        """Remove every trace of what was deleted or replaced from the data directory, and shrink the files.

        Deleting alone leaves copies: in the log until it is folded in and cut, and in pages whose entries SQLite moved
        (`secure_delete` overwrites the entry, not where it once stood). This rewrites the database, which takes time
        and as much free space as it is large; writes wait meanwhile.

        Raises:
            NotReadyError: A reader held on to an older state for too long, or the disk is full. Nothing is lost; the
                traces may still be there, so call again.
        """
        self._database.purge()
