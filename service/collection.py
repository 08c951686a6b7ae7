"""Collections: documents in the store, their vectors in an index, and the two always in step.

The only module that moves both. A write is committed to the store first; the index follows, and wherever it cannot, it
is thrown away and built again from the store.
"""

import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from jaxtyping import Float32

from service.documents import Document, NewDocument, check_documents
from service.errors import ConflictError, InvalidError, NotFoundError
from service.index import Hits, Ids, VectorIndex, as_vectors
from service.store import CollectionInfo, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CollectionDescription:
    """What a client may know of a collection."""

    name: str
    count: int
    fingerprint: str
    """Of the model that its vectors come from."""
    dimensions: int
    index: str


@dataclass(frozen=True, slots=True)
class SearchResult:
    """A document that was found."""

    id: str
    text: str
    metadata: dict[str, Any]
    score: float
    """Inner product of its vector with the query's."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A collection in use."""

    info: CollectionInfo
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by a write from before its commit until the index has followed: under it, store and index are the same."""
    index: VectorIndex | None = None
    """None until it is needed, and again when it may be damaged. Only replaced under the lock; searches need none."""
    dropped: bool = False


class Collections:
    """All collections of a store, for one model. Any number of threads may share it.

    Indexes are built when first needed, or by `warm_up`. Collections of other models can be listed, read, deleted from
    and dropped; adding to them and searching in them is refused, as vectors of two models have nothing in common.

    Args:
        store: Written to by nobody else. Closing it is left to whoever opened it.
        fingerprint: Of the model that all vectors given to this object come from.
        dimensions: Length of its vectors.
    """

    def __init__(self, store: Store, *, fingerprint: str, dimensions: int) -> None:
        self._store = store
        self._fingerprint = fingerprint
        self._dimensions = dimensions
        self._entries: dict[str, _Entry] = {}
        self._entries_lock = threading.Lock()

    def warm_up(self) -> None:
        """Build the index of every collection of this model now, so that no search has to wait for one."""
        for info in self._store.list_collections():
            with suppress(NotFoundError, ConflictError), self._locked(info.name) as entry:
                self._built(entry)

    def create(self, name: str) -> CollectionDescription:
        """Make an empty collection; one that exists already, for the same model, is left as it is.

        Raises:
            InvalidError: The name does not match `[a-z0-9][a-z0-9_-]{0,62}`.
            ConflictError: It exists for another model.
        """
        self._create(name)
        self.require(name)
        return self.describe(name)

    def describe(self, name: str) -> CollectionDescription:
        """Tell what a collection is. Raises what `Store.get_collection` does."""
        info, count = self._store.get_collection(name), self._store.count_documents(name)
        return CollectionDescription(name, count, info.fingerprint, info.dimensions, index=VectorIndex.kind)

    def describe_all(self) -> list[CollectionDescription]:
        """Tell what collections there are, by name, those of other models included."""
        found = []
        for info in self._store.list_collections():
            with suppress(NotFoundError):  # dropped meanwhile
                found.append(self.describe(info.name))
        return found

    def drop(self, name: str) -> None:
        """Remove a collection and all its documents. Raises what `describe` does."""
        with self._locked(name) as entry:
            self._store.drop_collection(name)
            entry.dropped, entry.index = True, None
            with self._entries_lock:
                del self._entries[name]

    def check(self, name: str, documents: Sequence[NewDocument]) -> None:
        """Refuse what `add` would refuse, before anybody has made vectors of it. Raises what `add` does."""
        check_documents([_with_id(new) for new in documents])
        with suppress(NotFoundError):
            self.require(name)

    def require(self, name: str) -> None:
        """Refuse a collection that cannot be searched. Raises what `search` does."""
        self._require_ours(self._entry(name).info)

    def vector(self, name: str, document_id: str) -> Float32[np.ndarray, " dimensions"]:
        """Give the vector of a document. Raises what `get` does, and ConflictError as `search` does."""
        while True:
            text = self.get(name, document_id).text
            vectors = self.unchanged_vectors(name, {document_id: text})
            if document_id in vectors:  # else it was replaced between the two
                return vectors[document_id]

    def add(self, name: str, documents: Sequence[NewDocument], vectors: npt.ArrayLike) -> list[str]:
        """Add documents, all or none, to a collection that is created if need be. When this returns they are on disk.

        A document whose id is taken replaces the former one. Gives the id of each, in order.

        Args:
            name: As in `[a-z0-9][a-z0-9_-]{0,62}`.
            documents: No two with the same id.
            vectors: One row a document, of length 1, from the model that this object is for.

        Raises:
            InvalidError: A name, document or vector breaks its rule. The message names the index; nothing was stored.
            ConflictError: The collection belongs to another model.
            NotReadyError: The disk is full or failed; nothing was stored.
        """
        matrix = as_vectors(vectors, self._dimensions)
        if len(matrix) != len(documents):
            raise InvalidError(
                f"there must be one vector for each of the {len(documents)} documents, got {len(matrix)}"
            )
        rows = [_with_id(new) for new in documents]
        if name not in self._entries:  # it may have to be created, which a call that is refused must not do
            check_documents(rows)
        with self._locked(name, create=True) as entry:
            self._require_ours(entry.info)
            upserted = self._store.upsert_documents(name, rows, vectors=matrix)
            self._follow(entry, removed=upserted.replaced, ids=upserted.vector_ids, vectors=matrix)
        return [row.id for row in rows]

    def delete(self, name: str, document_ids: Sequence[str]) -> int:
        """Delete documents and tell how many there were. Ids that no document has are passed over.

        `Store.purge` then removes what is left of them on the disk. Raises what `Store.delete_documents` does.
        """
        with self._locked(name) as entry:
            removed = self._store.delete_documents(name, document_ids)
            self._follow(entry, removed=removed)
        return len(removed)

    def get(self, name: str, document_id: str) -> Document:
        """Look a document up. Raises what `Store.get_document` does."""
        return self._store.get_document(name, document_id)

    def list_documents(self, name: str, *, limit: int = 100, after: str | None = None) -> list[Document]:
        """Give a page of documents by ascending id. Arguments and errors are those of `Store.list_documents`."""
        return self._store.list_documents(name, limit=limit, after=after)

    def unchanged_vectors(self, name: str, texts: Mapping[str, str]) -> dict[str, Float32[np.ndarray, " dimensions"]]:
        """Give the vectors of documents that still have the text given for their id: only the others need embedding.

        There are none, and no error, if the collection does not exist yet. Otherwise raises what `add` does.
        """
        with suppress(NotFoundError):
            self.require(name)
            return self._store.unchanged_vectors(name, texts)
        return {}

    def search(
        self, name: str, vector: npt.ArrayLike, *, k: int = 10, min_score: float | None = None
    ) -> list[SearchResult]:
        """Give the `k` documents nearest to a vector, best first, or as many as there are.

        Of equal scores the document written earlier comes first. What `add` and `delete` have returned from is seen.

        Args:
            name: An existing collection.
            vector: Of length 1, from the model that this object is for.
            k: At least 1.
            min_score: Leave out what is below; None keeps all.

        Raises:
            InvalidError: The name, `vector`, `k` or `min_score` breaks its rule.
            NotFoundError: There is no such collection.
            ConflictError: The collection belongs to another model.
        """
        if min_score is not None and math.isnan(min_score):
            raise InvalidError("min_score must be a number, got NaN")
        index = self._entry(name).index
        hits, documents = (None, {}) if index is None else self._look(index, vector, k)
        if hits is None or len(documents) < len(hits.vector_ids):
            # No index yet; or a write came between index and store. Under the lock none can.
            with self._locked(name) as entry:
                hits, documents = self._look(self._built(entry), vector, k)
        return [
            SearchResult(document.id, document.text, document.metadata, score)
            for vector_id, score in zip(hits.vector_ids.tolist(), hits.scores.tolist(), strict=True)
            if (document := documents.get(vector_id)) and (min_score is None or score >= min_score)
        ]

    def _look(self, index: VectorIndex, vector: npt.ArrayLike, k: int) -> tuple[Hits, dict[int, Document]]:
        hits = index.search(vector, k=k)
        return hits, self._store.documents_by_vector_ids(hits.vector_ids)

    def _follow(
        self,
        entry: _Entry,
        *,
        removed: Ids,
        ids: Ids = (),
        vectors: Float32[np.ndarray, "ids dimensions"] | None = None,
    ) -> None:
        """Do to the index what the store has committed."""
        if entry.index is None:
            return
        try:
            entry.index.update(removed=removed, ids=ids, vectors=vectors)
        except Exception:
            # What is stored must not be reported as failed: repeating the call would store it twice.
            entry.index = None
            logger.exception("the index of %r could not follow a write and will be built again", entry.info.name)

    def _built(self, entry: _Entry) -> VectorIndex:
        """Give the index, built from the store if need be. The entry's lock must be held."""
        self._require_ours(entry.info)
        if entry.index is None:
            name = entry.info.name
            # A quarter more, or the first write to a large collection would copy it all.
            index = VectorIndex(self._dimensions, capacity=self._store.count_documents(name) * 5 // 4)
            for ids, vectors in self._store.iterate_vectors(name):
                index.update(ids=ids, vectors=vectors)
            entry.index = index
        return entry.index

    def _create(self, name: str) -> None:
        with suppress(ConflictError):  # it is there, which is all that is wanted
            self._store.create_collection(name, fingerprint=self._fingerprint, dimensions=self._dimensions)

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            with self._entries_lock:
                entry = self._entries.get(name)
                if entry is None:
                    entry = self._entries[name] = _Entry(self._store.get_collection(name))
        return entry

    @contextmanager
    def _locked(self, name: str, *, create: bool = False) -> Iterator[_Entry]:
        """Hold a collection still: as long as this lasts, nobody else writes to it or drops it."""
        while True:
            try:
                entry = self._entry(name)
            except NotFoundError:
                if not create:
                    raise
                self._create(name)
                continue
            with entry.lock:
                if not entry.dropped:  # else the name may belong to a new collection by now: look again
                    yield entry
                    return

    def _require_ours(self, info: CollectionInfo) -> None:
        if (info.fingerprint, info.dimensions) != (self._fingerprint, self._dimensions):
            raise ConflictError(
                f"the collection {info.name!r} was made by the model {info.fingerprint} ({info.dimensions} dimensions) "
                f"and this service runs {self._fingerprint} ({self._dimensions} dimensions); serve the former model, "
                "or drop the collection and add its documents again"
            )


def _with_id(new: NewDocument) -> Document:
    return Document(uuid4().hex if new.id is None else new.id, new.text, new.metadata)
