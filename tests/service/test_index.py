"""The index against a brute force over plain numbers. Small integers, so that every score is exact in float32."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import InvalidError
from service.index import VectorIndex, as_vector, as_vectors

DIMENSIONS = 5

Vectors = dict[int, list[int]]

small_vectors = st.lists(st.integers(-2, 2), min_size=DIMENSIONS, max_size=DIMENSIONS)


def brute_force(vectors: Vectors, query: list[int], k: int) -> list[tuple[int, float]]:
    scored = [(key, float(np.dot(vector, query))) for key, vector in vectors.items()]
    return sorted(scored, key=lambda hit: (-hit[1], hit[0]))[:k]


def found(index: VectorIndex, query: object, **options: object) -> list[tuple[int, float]]:
    hits = index.search(query, **options)
    return list(zip(hits.vector_ids.tolist(), hits.scores.tolist(), strict=True))


def index_of(vectors: Vectors) -> VectorIndex:
    index = VectorIndex(DIMENSIONS)
    if vectors:
        index.update(ids=list(vectors), vectors=list(vectors.values()))
    return index


def random_vectors(count: int, seed: int = 0) -> Vectors:
    rows = np.random.default_rng(seed).integers(-2, 3, size=(count, DIMENSIONS))
    return dict(enumerate(rows.tolist(), start=3))


@settings(deadline=None, max_examples=150)
@given(
    writes=st.lists(
        st.tuples(st.lists(small_vectors, max_size=7), st.sets(st.integers(0, 40), max_size=7)), max_size=9
    ),
    query=small_vectors,
    k=st.integers(1, 45),
    allowed=st.none() | st.sets(st.integers(0, 60), max_size=30),
)
def test_agrees_with_brute_force_after_any_writes(
    writes: list[tuple[list[list[int]], set[int]]], query: list[int], k: int, allowed: set[int] | None
) -> None:
    index, expected, free = VectorIndex(DIMENSIONS), {}, 0
    for rows, removed in writes:
        new = dict(enumerate(rows, start=free))
        free += len(new)
        expected = {key: vector for key, vector in expected.items() if key not in removed} | new
        index.update(removed=list(removed), ids=list(new), vectors=rows or None)
        assert len(index) == len(expected)
    matching = {key: vector for key, vector in expected.items() if allowed is None or key in allowed}
    restricted = None if allowed is None else np.array(list(allowed), dtype=np.int64)
    assert found(index, query, k=k, allowed=restricted) == brute_force(matching, query, k)


def test_agrees_with_double_precision_on_unit_vectors() -> None:
    rows = np.random.default_rng(0).standard_normal((1009, 131))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    index = VectorIndex(131)
    index.update(ids=np.arange(1009), vectors=rows)
    for query in rows[:11]:
        exact = rows @ query
        hits = index.search(query, k=17)
        assert hits.vector_ids.tolist() == np.argsort(-exact)[:17].tolist()
        assert np.abs(hits.scores - exact[hits.vector_ids]).max() < 1e-6


@pytest.mark.parametrize("k", [1, 10, 99, 100, 101, 500, 2999, 3000])
def test_equal_scores_come_by_ascending_id(k: int) -> None:
    """FAISS keeps another set of candidates from k = 100 on, and cuts through equal scores anywhere."""
    index = index_of({key: [1, 0, 0, 0, 0] for key in range(3000)})
    assert index.search([1, 0, 0, 0, 0], k=k).vector_ids.tolist() == list(range(k))
    index.update(removed=range(0, 3000, 7))
    assert index.search([1, 0, 0, 0, 0], k=k).vector_ids.tolist() == [key for key in range(3000) if key % 7][:k]


def test_asking_for_more_than_there_is_gives_all_there_is() -> None:
    vectors = random_vectors(7)
    assert found(index_of(vectors), [1, 0, 2, 0, 1], k=10**12) == brute_force(vectors, [1, 0, 2, 0, 1], 7)


def test_an_empty_index_finds_nothing() -> None:
    index = index_of({})
    assert found(index, [1, 0, 0, 0, 0], k=3) == []
    index.update(ids=[3], vectors=[[1, 0, 0, 0, 0]])
    index.update(removed=[3])
    assert found(index, [1, 0, 0, 0, 0], k=3) == []
    assert len(index) == 0


@pytest.mark.parametrize("matching", [0, 1, 6, 7, 8])
def test_a_restricted_search_gives_as_many_as_match(matching: int) -> None:
    vectors = random_vectors(211)
    allowed = np.random.default_rng(1).permutation(list(vectors))[:matching]
    expected = brute_force({key: vectors[key] for key in allowed.tolist()}, [1, -1, 0, 2, 0], 7)
    for ids in (allowed, np.concatenate([allowed, allowed, [10**6, -1]]).astype(np.int64)):
        assert found(index_of(vectors), [1, -1, 0, 2, 0], k=7, allowed=ids) == expected


@pytest.mark.parametrize("k", [0, -1])
def test_refuses_to_search_for_less_than_one(k: int) -> None:
    with pytest.raises(InvalidError, match="k must be at least 1"):
        index_of({}).search([1, 0, 0, 0, 0], k=k)


WIDE = np.arange(70.0).reshape(7, 10)


@pytest.mark.parametrize(
    "values",
    [
        WIDE[:, ::2],
        WIDE[:5].T[:7, :5],
        np.asfortranarray(WIDE[:, :5]),
        WIDE[:, :5].astype(np.float16),
        WIDE[:, :5].astype(np.int32),
        WIDE[:, :5].astype(">f4"),
        WIDE[:, :5].tolist(),
        np.empty((0, 5)),
    ],
    ids=["slice", "transposed", "fortran", "float16", "int32", "big-endian", "list", "no rows"],
)
def test_converts_what_means_vectors(values: object) -> None:
    vectors = as_vectors(values, 5)
    assert vectors.dtype == np.float32
    assert vectors.dtype.isnative
    assert vectors.flags.c_contiguous
    assert np.array_equal(vectors, np.asarray(values))
    index = VectorIndex(5)
    index.update(ids=range(len(vectors)), vectors=values)
    if len(vectors):
        assert index.search(np.asarray(values)[3], k=1).scores[0] == (vectors[3] * vectors).sum(axis=1).max()


@pytest.mark.parametrize(
    "values",
    [
        np.zeros(5),
        np.zeros((2, 3)),
        np.zeros((1, 2, 5)),
        np.float32(3),
        [],
        [[1, 2, 3, 4, 5], [1, 2]],
        [[1, 2, 3, 4, "5"]],
        [[1, 2, 3, 4, None]],
        np.zeros((1, 5), dtype=complex),
        np.zeros((1, 5), dtype=bool),
        [[1, 2, 3, 4, np.nan]],
        [[1, 2, 3, -np.inf, 5]],
        [[1, 2, 3, 4, 1e39]],
        [[1, 2, 3, 4, 1e16]],
    ],
)
def test_refuses_what_does_not_mean_vectors(values: object) -> None:
    index = index_of({3: [1, 0, 0, 0, 0]})
    with pytest.raises(InvalidError, match="vectors"):
        index.update(ids=[4], vectors=values)
    assert found(index, [1, 0, 0, 0, 0], k=2) == [(3, 1.0)]


@pytest.mark.parametrize(
    "value", [np.zeros((1, 5)), np.zeros(3), [], np.float32(1), [1, 2, 3, 4, np.nan], [[1], 2, 3, 4, 5]]
)
def test_refuses_what_does_not_mean_one_vector(value: object) -> None:
    with pytest.raises(InvalidError, match="vector"):
        index_of({3: [1, 0, 0, 0, 0]}).search(value, k=1)


def test_a_read_only_vector_will_do() -> None:
    query = np.frombuffer(np.array([1, 0, 0, 0, 0], dtype=np.float32).tobytes(), dtype=np.float32)
    assert as_vector(query, 5) is not None
    assert found(index_of({3: [1, 0, 0, 0, 0]}), query, k=1) == [(3, 1.0)]


def test_names_the_row_that_is_not_finite() -> None:
    with pytest.raises(InvalidError, match="row 2 is not"):
        as_vectors([[0, 0], [1, 1], [np.nan, 1], [np.inf, 1]], 2)


@pytest.mark.parametrize("ids", [[2], [7], [9, 9], [10, 9], np.array([[8, 9]])])
def test_refuses_ids_that_do_not_ascend_and_changes_nothing(ids: object) -> None:
    vectors = {3: [1, 0, 0, 0, 0], 7: [0, 1, 0, 0, 0]}
    index = index_of(vectors)
    with pytest.raises(InvalidError, match="ids"):
        index.update(removed=[3], ids=ids, vectors=np.ones((len(ids), DIMENSIONS)))
    assert found(index, [2, 1, 0, 0, 0], k=3) == [(3, 2.0), (7, 1.0)]


def test_ids_may_be_integers_of_any_width() -> None:
    index = VectorIndex(DIMENSIONS)
    index.update(ids=np.array([3, 7], dtype=np.int32), vectors=[[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    index.update(removed=np.array([3], dtype=np.uint8))
    assert found(index, [1, 1, 0, 0, 0], k=2, allowed=np.array([7, 8], dtype=np.int16)) == [(7, 1.0)]


def test_the_id_of_a_removed_vector_is_never_taken_again() -> None:
    index = index_of({3: [1, 0, 0, 0, 0]})
    index.update(removed=[3])
    with pytest.raises(InvalidError, match="above 3"):
        index.update(ids=[3], vectors=[[1, 0, 0, 0, 0]])


def test_refuses_ids_without_their_vectors() -> None:
    with pytest.raises(InvalidError, match="2 ids, got 0"):
        VectorIndex(DIMENSIONS).update(ids=[1, 2])


def test_keeps_its_own_copy_of_the_vectors() -> None:
    rows = np.ones((2, DIMENSIONS), dtype=np.float32)
    index = VectorIndex(DIMENSIONS)
    index.update(ids=[1, 2], vectors=rows)
    rows[:] = 0
    assert found(index, [1, 0, 0, 0, 0], k=2) == [(1, 1.0), (2, 1.0)]


def test_memory_follows_the_vectors_that_are_left() -> None:
    index = index_of(random_vectors(1000))
    for key in range(2000, 5000):
        index.update(removed=[key - 1], ids=[key], vectors=[[1, 0, 0, 0, 0]])
    assert index._state.vectors.nbytes < 4 * 1001 * DIMENSIONS * 4
    index.update(removed=range(4900))
    assert len(index) == 1
    assert index._state.vectors.nbytes < 100 * DIMENSIONS * 4


def test_no_search_sees_half_of_a_write() -> None:
    """7 documents, all replaced at once by the next generation: a search must find 7 of one generation."""
    stop, generations = threading.Event(), 0
    index = VectorIndex(DIMENSIONS)
    index.update(ids=range(7), vectors=np.zeros((7, DIMENSIONS)))

    def read() -> int:
        searches = 0
        while not stop.is_set():
            hits = index.search([1, 0, 0, 0, 0], k=20)
            assert len(set(hits.scores.tolist())) == 1
            assert hits.vector_ids.tolist() == list(range(hits.vector_ids[0], hits.vector_ids[0] + 7))
            searches += 1
        return searches

    with ThreadPoolExecutor(8) as pool:
        readers = [pool.submit(read) for _ in range(8)]
        timer = threading.Timer(1, stop.set)
        timer.start()
        while not stop.is_set():
            generations += 1
            first = 7 * generations
            index.update(
                removed=range(first - 7, first),
                ids=range(first, first + 7),
                vectors=np.full((7, DIMENSIONS), generations % 1000),
            )
        timer.join()
        assert all(reader.result() > 5 for reader in readers)
    assert generations > 50


@pytest.mark.parametrize("make", [as_vectors, as_vector])
def test_copies_nothing_that_is_right_already(make: Callable) -> None:
    right = np.ones((3, 5), dtype=np.float32) if make is as_vectors else np.ones(5, dtype=np.float32)
    assert np.shares_memory(make(right, 5), right)
