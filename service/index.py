"""FAISS behind ids: exact search by inner product, which writes neither disturb nor delay.

FAISS allows no write while it searches, and shifts its own ids when it deletes. So the vectors are kept here, in states
that never change: a search works on the state that it found, a write makes the next state and puts it in place at once.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import numpy.typing as npt
from jaxtyping import Bool, Float32, Int64

from service.errors import InvalidError

# The largest component, so that no sum of products leaves float32.
MAX_COMPONENT = 1e15
# Removed rows stay where they are, skipped, until they are more than this share.
MAX_DEAD_SHARE = 0.25

# Along one axis.
Ids = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Hits:
    """The nearest vectors, best first; equal scores by ascending id."""

    vector_ids: Int64[np.ndarray, " hits"]
    scores: Float32[np.ndarray, " hits"]
    """Inner products with the query: cosines, if both have length 1."""


def as_vectors(values: npt.ArrayLike, dimensions: int) -> Float32[np.ndarray, "rows {dimensions}"]:
    """Make what a caller calls vectors into what FAISS reads without looking: C-contiguous, finite float32.

    Slices, transposed arrays, lists, integers and floats of any width are converted; what is right already is not
    copied.

    Raises:
        InvalidError: Not two axes, another width, not real numbers, or a component is not finite or beyond 1e15. The
            message names the row.
    """
    array = _real_numbers(values)
    if array.ndim != 2 or array.shape[1] != dimensions:
        raise InvalidError(f"vectors must have the shape (rows, {dimensions}), got {array.shape}")
    with np.errstate(over="ignore"):  # reported below
        vectors = np.ascontiguousarray(array, dtype=np.float32)
    fine = (np.abs(vectors) <= MAX_COMPONENT).all(axis=1)  # NaN is not
    if not fine.all():
        raise InvalidError(f"vectors must be finite and within ±{MAX_COMPONENT:g}, and row {np.argmin(fine)} is not")
    return vectors


def as_vector(values: npt.ArrayLike, dimensions: int) -> Float32[np.ndarray, " {dimensions}"]:
    """Do for one vector, of one axis, what `as_vectors` does for many."""
    array = _real_numbers(values)
    if array.ndim != 1:
        raise InvalidError(f"a vector must have the shape ({dimensions},), got {array.shape}")
    return as_vectors(array[np.newaxis], dimensions).reshape(-1)


def _real_numbers(values: npt.ArrayLike) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidError(f"vectors must all have one length: {error}") from error
    if array.dtype.kind not in "fiu":
        raise InvalidError(f"vectors must hold real numbers, got {array.dtype}")
    return array


def _as_ids(ids: Ids) -> Int64[np.ndarray, " ids"]:
    array = np.asarray(ids)
    if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
        raise InvalidError(f"ids must be integers along one axis, got {array.dtype} of the shape {array.shape}")
    return array.astype(np.int64).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """Rows in the order of their ids. Those from `size` on are free, and the only ones ever written to."""

    vectors: Float32[np.ndarray, "capacity dimensions"]
    ids: Int64[np.ndarray, " capacity"]
    alive: Bool[np.ndarray, " size"]
    count: int
    """Rows that are alive."""
    last_id: int
    """The highest that ever was; higher ones follow."""

    @classmethod
    def empty(cls, dimensions: int, *, capacity: int) -> "_State":
        vectors = np.empty((capacity, dimensions), dtype=np.float32)
        return cls(vectors, np.empty(capacity, dtype=np.int64), np.empty(0, dtype=np.bool_), count=0, last_id=-1)

    @property
    def size(self) -> int:
        return len(self.alive)

    def rows_of(self, ids: Int64[np.ndarray, " ids"]) -> Bool[np.ndarray, " size"]:
        """Mark the rows that are alive and have one of these ids."""
        rows = np.searchsorted(self.ids[: self.size], ids)
        rows = rows[rows < self.size]
        marked = np.zeros(self.size, dtype=np.bool_)
        marked[rows] = np.isin(self.ids[rows], ids)
        marked &= self.alive
        return marked

    def without(self, ids: Int64[np.ndarray, " ids"]) -> "_State":
        if not len(ids):
            return self
        alive = self.alive & ~self.rows_of(ids)
        return _State(self.vectors, self.ids, alive, int(np.count_nonzero(alive)), self.last_id)

    def moved(self, *, room: int) -> "_State":
        """Copy the living rows to where there is room for others."""
        kept = np.flatnonzero(self.alive)
        moved = _State.empty(self.vectors.shape[1], capacity=max(64, 2 * (len(kept) + room)))
        # Any mode but "raise" writes to `out` without a second copy of everything.
        np.take(self.vectors, kept, axis=0, out=moved.vectors[: len(kept)], mode="clip")
        moved.ids[: len(kept)] = self.ids[kept]
        alive = np.ones(len(kept), dtype=np.bool_)
        return _State(moved.vectors, moved.ids, alive, len(kept), self.last_id)

    def with_rows(self, ids: Int64[np.ndarray, " ids"], vectors: Float32[np.ndarray, "ids dimensions"]) -> "_State":
        if not len(ids):
            return self
        end = self.size + len(ids)
        self.vectors[self.size : end] = vectors
        self.ids[self.size : end] = ids
        alive = np.concatenate([self.alive, np.ones(len(ids), dtype=np.bool_)])
        return _State(self.vectors, self.ids, alive, self.count + len(ids), int(ids[-1]))

    def nearest(
        self, query: Float32[np.ndarray, " dimensions"], k: int, among: Bool[np.ndarray, " size"]
    ) -> tuple[Float32[np.ndarray, " k"], Int64[np.ndarray, " k"]]:
        """Give scores and rows of the `k` best of the marked rows, of which there must be as many."""
        scores, rows = np.empty(k, dtype=np.float32), np.empty(k, dtype=np.int64)
        bits = np.packbits(among, bitorder="little")
        selector = None if among.all() else faiss.IDSelectorBitmap(len(bits), faiss.swig_ptr(bits))
        # Set for each calling thread, which is how OpenMP counts: one query is slower on two threads than on one.
        faiss.omp_set_num_threads(1)
        asked, stored, best, at = (faiss.swig_ptr(array) for array in (query, self.vectors, scores, rows))
        faiss.knn_inner_product(asked, stored, len(query), 1, self.size, k, best, at, selector)
        return scores, rows


class VectorIndex:
    """Vectors by id, all in memory. Any number of threads may search and write at the same time.

    Args:
        dimensions: Length of each vector.
        capacity: How many vectors to set address space aside for; more only cost a copy now and then.
    """

    kind = "exact"

    def __init__(self, dimensions: int, *, capacity: int = 0) -> None:
        self.dimensions = dimensions
        self._state = _State.empty(dimensions, capacity=capacity)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._state.count

    def update(self, *, removed: Ids = (), ids: Ids = (), vectors: npt.ArrayLike | None = None) -> None:
        """Remove and add in one step: every search sees all of it or nothing. After an error nothing has changed.

        Args:
            removed: Which to take out; those not there are passed over.
            ids: Of the new vectors: ascending, and higher than any that this index ever had.
            vectors: One row an id; needed with `ids` alone. They are copied.

        Raises:
            InvalidError: `ids` do not ascend, or `vectors` are not one row an id that `as_vectors` accepts.
        """
        gone, new = _as_ids(removed), _as_ids(ids)
        matrix = as_vectors(np.empty((0, self.dimensions)) if vectors is None else vectors, self.dimensions)
        if len(matrix) != len(new):
            raise InvalidError(f"there must be one vector for each of the {len(new)} ids, got {len(matrix)}")
        with self._lock:
            state = self._state.without(gone)
            if (np.diff(new, prepend=state.last_id) <= 0).any():
                raise InvalidError(f"ids must ascend from above {state.last_id}, the highest so far, got {new[:5]} ...")
            dead = state.size - state.count
            if dead > MAX_DEAD_SHARE * state.size or state.size + len(new) > len(state.ids):
                state = state.moved(room=len(new))
            self._state = state.with_rows(new, matrix)

    def search(self, vector: npt.ArrayLike, *, k: int, allowed: Ids | None = None) -> Hits:
        """Give the `k` vectors with the highest inner product, or as many as there are.

        Args:
            vector: What they should be near to.
            k: At least 1.
            allowed: Only these ids are looked at; None means all. Those not there are passed over.

        Raises:
            InvalidError: `k` is below 1, or `as_vector` does not accept `vector`.
        """
        if k < 1:
            raise InvalidError(f"k must be at least 1, got {k}")
        query = as_vector(vector, self.dimensions)
        state = self._state
        among = state.alive if allowed is None else state.rows_of(_as_ids(allowed))
        matching = int(np.count_nonzero(among))
        wanted = min(k, matching)
        if not wanted:
            return Hits(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
        # FAISS cuts through equal scores anywhere: fetch until the last one kept is better than the last one fetched.
        fetched = min(wanted + 1, matching)
        scores, rows = state.nearest(query, fetched, among)
        while fetched < matching and scores[-1] == scores[wanted - 1]:
            fetched = min(8 * fetched, matching)
            scores, rows = state.nearest(query, fetched, among)
        best = np.lexsort((rows, -scores))[:wanted]
        return Hits(state.ids[rows[best]], scores[best])
