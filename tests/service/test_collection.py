"""Store and index together: after anything that may happen they agree, and nothing acknowledged is lost."""

import logging
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.collection import CollectionDescription, Collections, SearchResult
from service.documents import Document, NewDocument
from service.errors import ConflictError, InvalidError, NotFoundError, ServiceError
from service.index import VectorIndex
from service.store import Store

ROOT = Path(__file__).parents[2]
DIMENSIONS = 5
UNIT = np.eye(DIMENSIONS, dtype=np.float32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        yield opened


@pytest.fixture
def collections(store: Store) -> Collections:
    return Collections(store, fingerprint="ours", dimensions=DIMENSIONS)


def put(collections: Collections, texts: dict[str, str], vectors: object, name: str = "reviews") -> list[str]:
    return collections.add(name, [NewDocument(text, id=key) for key, text in texts.items()], vectors)


def found(
    collections: Collections, vector: object, name: str = "reviews", **options: object
) -> list[tuple[str, float]]:
    return [(result.id, result.score) for result in collections.search(name, vector, **options)]


def test_finds_what_was_added(collections: Collections) -> None:
    collections.add(
        "reviews", [NewDocument("good", id="g", metadata={"stars": 5}), NewDocument("bad", id="b")], UNIT[:2]
    )
    assert collections.search("reviews", [0.5, 0.75, 0, 0, 0]) == [
        SearchResult("b", "bad", {}, 0.75),
        SearchResult("g", "good", {"stars": 5}, 0.5),
    ]
    assert collections.describe("reviews") == CollectionDescription("reviews", 2, "ours", DIMENSIONS, "exact")
    assert collections.get("reviews", "g") == Document("g", "good", {"stars": 5})
    assert [document.id for document in collections.list_documents("reviews", limit=1, after="b")] == ["g"]


def test_makes_up_ids_that_are_missing(collections: Collections) -> None:
    ids = collections.add("reviews", [NewDocument("1"), NewDocument("2", id="two"), NewDocument("3")], UNIT[:3])
    assert ids[1] == "two"
    assert len(set(ids)) == 3
    assert [collections.get("reviews", key).text for key in ids] == ["1", "2", "3"]
    with pytest.raises(InvalidError, match="1 to 512 bytes"):
        collections.add("reviews", [NewDocument("empty is not missing", id="")], UNIT[:1])


def test_refuses_the_same_id_twice_in_one_call(collections: Collections) -> None:
    with pytest.raises(InvalidError, match="'a' for documents 0 and 2"):
        collections.add("reviews", [NewDocument(text, id=key) for text, key in ("1a", "2b", "3a")], UNIT[:3])


@pytest.mark.parametrize(
    ("name", "document", "vectors"),
    [
        ("reviews", NewDocument("\ud800"), UNIT[:1]),
        ("reviews", NewDocument("t", metadata={"k": float("nan")}), UNIT[:1]),
        ("reviews", NewDocument("t"), UNIT[:2]),
        ("reviews", NewDocument("t"), UNIT[0]),
        ("reviews", NewDocument("t"), np.ones((1, 7))),
        ("reviews", NewDocument("t"), np.full((1, DIMENSIONS), np.nan)),
        ("No Name", NewDocument("t"), UNIT[:1]),
    ],
)
def test_a_refused_call_leaves_no_collection_behind(
    collections: Collections, name: str, document: NewDocument, vectors: np.ndarray
) -> None:
    with pytest.raises(InvalidError):
        collections.add(name, [document], vectors)
    assert collections.describe_all() == []


@pytest.mark.parametrize(
    "options", [{"k": 0}, {"min_score": float("nan")}, {"vector": [1, 2]}, {"vector": UNIT}, {"name": "No Name"}]
)
def test_refuses_a_senseless_search(collections: Collections, options: dict) -> None:
    put(collections, {"a": "1"}, UNIT[:1])
    for _ in range(2):  # before the index is built, and after
        with pytest.raises(InvalidError):
            collections.search(**({"name": "reviews", "vector": UNIT[0]} | options))
        collections.search("reviews", UNIT[0])


def test_leaves_out_what_scores_too_low(collections: Collections) -> None:
    put(collections, {"a": "1", "b": "2", "c": "3"}, [[1, 0, 0, 0, 0], [0.5, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    assert found(collections, UNIT[0], min_score=0.5) == [("a", 1.0), ("b", 0.5)]
    assert found(collections, UNIT[0], min_score=2.0) == []
    assert len(found(collections, UNIT[0], min_score=-1.0)) == 3


def test_an_unknown_collection_is_not_found(collections: Collections) -> None:
    calls: list[Callable] = [
        lambda: collections.describe("nobody"),
        lambda: collections.drop("nobody"),
        lambda: collections.search("nobody", UNIT[0]),
        lambda: collections.delete("nobody", ["a"]),
        lambda: collections.get("nobody", "a"),
        lambda: collections.list_documents("nobody"),
    ]
    for call in calls:
        with pytest.raises(NotFoundError, match="nobody"):
            call()
    assert collections.unchanged_vectors("nobody", {"a": "1"}) == {}


def test_creating_twice_keeps_what_is_there(collections: Collections) -> None:
    collections.create("reviews")
    put(collections, {"a": "1"}, UNIT[:1])
    assert collections.create("reviews").count == 1
    assert [description.name for description in collections.describe_all()] == ["reviews"]
    assert found(collections, UNIT[0]) == [("a", 1.0)]


@pytest.mark.parametrize("dimensions", [DIMENSIONS, 7])
def test_a_collection_of_another_model_can_be_read_but_not_mixed(store: Store, dimensions: int) -> None:
    theirs = Collections(store, fingerprint="theirs", dimensions=dimensions)
    put(theirs, {"a": "1", "b": "2"}, np.eye(dimensions)[:2])
    ours = Collections(store, fingerprint="ours", dimensions=DIMENSIONS)
    ours.warm_up()
    calls: list[Callable] = [
        lambda: put(ours, {"c": "3"}, UNIT[:1]),
        lambda: ours.check("reviews", [NewDocument("3", id="c")]),
        lambda: ours.search("reviews", UNIT[0]),
        lambda: ours.require("reviews"),
        lambda: ours.vector("reviews", "a"),
        lambda: ours.create("reviews"),
        lambda: ours.unchanged_vectors("reviews", {"a": "1"}),
    ]
    for call in calls:
        with pytest.raises(ConflictError, match=r"theirs.*ours.*serve the former model, or drop the collection"):
            call()
    assert ours.get("reviews", "a").text == "1"
    assert ours.describe("reviews").fingerprint == "theirs"
    assert ours.delete("reviews", ["a"]) == 1
    assert [document.id for document in ours.list_documents("reviews")] == ["b"]
    ours.drop("reviews")
    put(ours, {"c": "3"}, UNIT[:1])
    assert found(ours, UNIT[0]) == [("c", 1.0)]


def test_only_unchanged_texts_have_a_vector_already(collections: Collections) -> None:
    put(collections, {"a": "same", "b": "old"}, UNIT[:2])
    known = collections.unchanged_vectors("reviews", {"a": "same", "b": "new", "c": "same"})
    assert list(known) == ["a"]
    assert np.array_equal(known["a"], UNIT[0])


@pytest.mark.parametrize(
    ("name", "documents", "message"),
    [
        ("No Name", [NewDocument("t")], "names of collections must match"),
        ("new", [NewDocument("t", id="")], "the id of document 0 must be 1 to 512 bytes"),
        ("new", [NewDocument("t"), NewDocument("t", id="a\n")], "the id of document 1 must be"),
        ("new", [NewDocument(text, id=key) for text, key in ("1a", "2b", "3a")], "'a' for documents 0 and 2"),
        ("new", [NewDocument("\ud800")], "the text of document 0 must be Unicode"),
        ("new", [NewDocument("t", metadata={"k": float("nan")})], "the metadata of document 0"),
    ],
)
def test_a_check_refuses_what_adding_would(
    collections: Collections, name: str, documents: list[NewDocument], message: str
) -> None:
    calls: list[Callable] = [
        lambda: collections.check(name, documents),
        lambda: collections.add(name, documents, UNIT[: len(documents)]),
    ]
    for call in calls:
        with pytest.raises(InvalidError, match=message):
            call()
    assert collections.describe_all() == []


def test_a_check_writes_nothing(collections: Collections) -> None:
    documents = [NewDocument("new", id="a"), NewDocument("no id")]
    collections.check("reviews", documents)  # no collection of this name exists, so adding would create it
    assert collections.describe_all() == []
    put(collections, {"a": "old"}, UNIT[:1])
    collections.check("reviews", documents)
    assert collections.list_documents("reviews") == [Document("a", "old")]


def test_a_collection_is_required_to_exist(collections: Collections) -> None:
    with pytest.raises(NotFoundError, match="no collection 'reviews'"):
        collections.require("reviews")
    with pytest.raises(InvalidError, match="names of collections must match"):
        collections.require("No Name")
    collections.create("reviews")
    collections.require("reviews")
    collections.drop("reviews")
    with pytest.raises(NotFoundError, match="no collection 'reviews'"):
        collections.require("reviews")


def test_the_vector_of_a_document_is_the_one_that_was_added(store: Store, collections: Collections) -> None:
    vectors = np.random.default_rng(0).standard_normal((3, DIMENSIONS)).astype(np.float32)
    put(collections, {"a": "same text", "b": "same text", "c": ""}, vectors)
    for opened in (collections, Collections(store, fingerprint="ours", dimensions=DIMENSIONS)):
        for key, vector in zip("abc", vectors, strict=True):
            assert np.array_equal(opened.vector("reviews", key), vector)
    put(collections, {"a": "same text"}, UNIT[:1])
    assert np.array_equal(collections.vector("reviews", "a"), UNIT[0])


def test_what_is_not_stored_has_no_vector(collections: Collections) -> None:
    with pytest.raises(NotFoundError, match="no collection 'reviews'"):
        collections.vector("reviews", "a")
    put(collections, {"a": "1"}, UNIT[:1])
    with pytest.raises(NotFoundError, match="no document with the id 'b'"):
        collections.vector("reviews", "b")
    with pytest.raises(InvalidError, match="1 to 512 bytes"):
        collections.vector("reviews", "")
    collections.delete("reviews", ["a"])
    with pytest.raises(NotFoundError, match="no document with the id 'a'"):
        collections.vector("reviews", "a")


class WrittenBetween(Collections):
    """As if other threads were quick: each of these writes falls right behind a reading of a document."""

    writes: list[Callable[[], object]]

    def get(self, name: str, document_id: str) -> Document:
        document = super().get(name, document_id)
        if self.writes:
            self.writes.pop(0)()
        return document


def test_a_document_replaced_meanwhile_has_its_new_vector(store: Store) -> None:
    collections = WrittenBetween(store, fingerprint="ours", dimensions=DIMENSIONS)
    put(collections, {"a": "1"}, UNIT[:1])
    collections.writes = [
        lambda: put(collections, {"a": "2"}, UNIT[1:2]),
        lambda: put(collections, {"a": "3"}, UNIT[2:3]),
    ]
    assert np.array_equal(collections.vector("reviews", "a"), UNIT[2])
    assert collections.writes == []


@pytest.mark.parametrize("gone", ["document", "collection"])
def test_what_goes_away_meanwhile_has_no_vector(store: Store, gone: str) -> None:
    collections = WrittenBetween(store, fingerprint="ours", dimensions=DIMENSIONS)
    put(collections, {"a": "1"}, UNIT[:1])
    delete = (
        (lambda: collections.delete("reviews", ["a"])) if gone == "document" else lambda: collections.drop("reviews")
    )
    collections.writes = [delete]
    with pytest.raises(NotFoundError, match=f"no {gone}"):
        collections.vector("reviews", "a")


def test_a_dropped_collection_never_comes_back(store: Store, collections: Collections) -> None:
    put(collections, {"a": "old", "b": "old"}, UNIT[:2])
    assert len(found(collections, UNIT[0])) == 2
    collections.drop("reviews")
    with pytest.raises(NotFoundError):
        collections.search("reviews", UNIT[0])
    put(collections, {"b": "new"}, UNIT[:1])
    for opened in (collections, Collections(store, fingerprint="ours", dimensions=DIMENSIONS)):
        assert [result.text for result in opened.search("reviews", UNIT[0])] == ["new"]
    with pytest.raises(NotFoundError):
        collections.get("reviews", "a")


def test_a_search_skips_what_is_deleted_between_index_and_rows(store: Store, collections: Collections) -> None:
    """The store alone is written to, as in the moment between a commit and the index that follows it."""
    put(collections, {"a": "1", "b": "2", "c": "3"}, [[4, 0, 0, 0, 0], [3, 0, 0, 0, 0], [2, 0, 0, 0, 0]])
    assert found(collections, UNIT[0], k=2) == [("a", 4.0), ("b", 3.0)]
    entry = collections._entries["reviews"]
    with ThreadPoolExecutor(1) as pool:
        with entry.lock:
            removed = store.delete_documents("reviews", ["a"])
            search = pool.submit(found, collections, UNIT[0], k=2)
            time.sleep(0.05)
            assert not search.done()
            assert entry.index is not None
            entry.index.update(removed=removed)
        assert search.result(timeout=5) == [("b", 3.0), ("c", 2.0)]


def test_a_write_that_waited_for_a_drop_goes_to_the_new_collection(store: Store, collections: Collections) -> None:
    put(collections, {"a": "old"}, UNIT[:1])
    entry = collections._entries["reviews"]
    with ThreadPoolExecutor(1) as pool:
        with entry.lock:
            write = pool.submit(put, collections, {"b": "new"}, UNIT[:1])
            time.sleep(0.05)
            store.drop_collection("reviews")  # as `drop` does, which would wait for this lock
            entry.dropped = True
            del collections._entries["reviews"]
            put(collections, {"c": "new"}, UNIT[:1])
            assert found(collections, UNIT[0]) == [("c", 1.0)]
        write.result(timeout=5)
    assert found(collections, UNIT[0]) == [("c", 1.0), ("b", 1.0)]


class OutOfMemory(VectorIndex):
    def update(self, **_: object) -> None:
        raise MemoryError


def test_an_index_that_fails_is_built_again(collections: Collections, caplog: pytest.LogCaptureFixture) -> None:
    put(collections, {"a": "1", "b": "2"}, UNIT[:2])
    collections.warm_up()
    writes: list[Callable] = [
        lambda: put(collections, {"a": "new", "c": "3"}, UNIT[2:4]),
        lambda: collections.delete("reviews", ["b"]),
    ]
    for write in writes:
        collections._entries["reviews"].index = OutOfMemory(DIMENSIONS)
        with caplog.at_level(logging.ERROR):
            write()
        assert "will be built again" in caplog.text
        caplog.clear()
        assert collections._entries["reviews"].index is None
    assert sorted(found(collections, UNIT[2])) == [("a", 1.0), ("c", 0.0)]
    assert collections._entries["reviews"].index is not None


@dataclass
class Model:
    """What the collections must look like: id → (order of writing, text, metadata, vector), by collection."""

    collections: dict[str, dict[str, tuple[int, str, dict, list[int]]]] = field(default_factory=dict)
    writes: int = 0

    def add(self, name: str, documents: list[NewDocument], vectors: list[list[int]]) -> None:
        stored = self.collections.setdefault(name, {})
        for document, vector in zip(documents, vectors, strict=True):
            self.writes += 1
            assert document.id is not None
            stored[document.id] = (self.writes, document.text, document.metadata, vector)

    def search(self, name: str, query: list[int], k: int) -> list[SearchResult]:
        scored = [
            (-float(np.dot(vector, query)), order, SearchResult(key, text, metadata, float(np.dot(vector, query))))
            for key, (order, text, metadata, vector) in self.collections[name].items()
        ]
        return [result for *_, result in sorted(scored, key=lambda entry: entry[:2])[:k]]


names = st.sampled_from(["a", "b"])
ids = st.sampled_from(["1", "2", "3", "ü", "𝄞 %"])
# Small integers: every score is exact in float32, and many are equal.
small_vectors = st.lists(st.integers(-2, 2), min_size=DIMENSIONS, max_size=DIMENSIONS)
rows = st.tuples(
    ids, st.text(max_size=5), st.dictionaries(st.text(max_size=2), st.integers(), max_size=2), small_vectors
)
operations = st.one_of(
    st.tuples(st.just("add"), names, st.lists(rows, min_size=1, max_size=5, unique_by=lambda row: row[0])),
    st.tuples(st.just("add"), names, st.lists(rows, min_size=1, max_size=5, unique_by=lambda row: row[0])),
    st.tuples(st.just("delete"), names, st.lists(ids, max_size=3)),
    st.tuples(st.just("search"), names, st.tuples(small_vectors, st.integers(1, 7))),
    st.tuples(st.just("drop"), names, st.none()),
    st.tuples(st.just("restart"), names, st.none()),
)


def apply(operation: str, name: str, detail: object, collections: Collections, model: Model) -> None:
    if operation == "add":
        documents = [NewDocument(text, id=key, metadata=metadata) for key, text, metadata, _ in detail]
        collections.add(name, documents, [vector for *_, vector in detail])
        model.add(name, documents, [vector for *_, vector in detail])
    elif name not in model.collections:
        with pytest.raises(NotFoundError):
            collections.search(name, [0] * DIMENSIONS)
    elif operation == "delete":
        there = [key for key in set(detail) if model.collections[name].pop(key, None)]
        assert collections.delete(name, detail) == len(there)
    elif operation == "search":
        query, k = detail
        assert collections.search(name, query, k=k) == model.search(name, query, k)
    elif operation == "drop":
        collections.drop(name)
        del model.collections[name]


def check(collections: Collections, model: Model) -> None:
    assert {description.name: description.count for description in collections.describe_all()} == {
        name: len(stored) for name, stored in model.collections.items()
    }
    for name, stored in model.collections.items():
        assert collections.list_documents(name) == [
            Document(key, text, metadata)
            for key, (_, text, metadata, _) in sorted(stored.items(), key=lambda entry: entry[0].encode())
        ]
        for query in ([1, 0, 2, -1, 0], [0] * DIMENSIONS):
            assert collections.search(name, query, k=7) == model.search(name, query, 7)


@settings(deadline=None, max_examples=200)
@given(st.lists(operations, max_size=25))
def test_agrees_with_brute_force_after_anything(steps: list[tuple[str, str, object]]) -> None:
    with TemporaryDirectory() as data_dir:
        model, store = Model(), Store.open(Path(data_dir))
        collections = Collections(store, fingerprint="ours", dimensions=DIMENSIONS)
        try:
            for operation, name, detail in [*steps, ("restart", "a", None)]:
                if operation == "restart":
                    check(collections, model)
                    store.close()
                    store = Store.open(Path(data_dir))
                    collections = Collections(store, fingerprint="ours", dimensions=DIMENSIONS)
                else:
                    apply(operation, name, detail, collections, model)
            check(collections, model)
        finally:
            store.close()


def test_one_writer_and_eight_readers(collections: Collections) -> None:
    """Each text states its vector, so that every result can be checked; some documents are replaced all the time.

    The 7 nearest, k0 to k6, are always there, so no search may miss one, however often they are replaced meanwhile.
    """
    near = {f"k{number}": "9" for number in range(7)}
    far = {f"f{number}": "1" for number in range(23)}
    put(collections, near | far, [[int(text), 0, 0, 0, 0] for text in (near | far).values()])
    stop = threading.Event()
    source = random.Random(0)

    def read() -> int:
        searches = 0
        while not stop.is_set():
            k = 7 + searches % 11
            results = collections.search("reviews", UNIT[0], k=k)
            assert len(results) == k
            assert {result.id for result in results[:7]} == set(near)
            assert len({result.id for result in results}) == k
            assert all(result.score == float(result.text) for result in results)
            assert [result.score for result in results] == sorted((result.score for result in results), reverse=True)
            searches += 1
        return searches

    def write() -> int:
        writes = 0
        while not stop.is_set():
            chosen = source.sample(sorted(near), 3)
            texts = {key: str(source.randrange(5, 10)) for key in chosen}
            texts |= {f"f{source.randrange(40)}": str(source.randrange(-4, 4)) for _ in range(5)}
            put(collections, texts, [[int(text), 0, 0, 0, 0] for text in texts.values()])
            collections.delete("reviews", [f"f{number}" for number in source.sample(range(23, 40), 5)])
            writes += 2
        return writes

    with ThreadPoolExecutor(9) as pool:
        tasks = [pool.submit(read) for _ in range(8)] + [pool.submit(write)]
        time.sleep(2)
        stop.set()
        assert min(task.result() for task in tasks) > 10


def test_a_collection_dropped_and_made_again_under_load(collections: Collections) -> None:
    """Writers, readers and droppers of one name: errors only of the expected kind, and all agree in the end."""
    stop = threading.Event()

    def repeat(call: Callable[[int], object]) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                call(number)
            except NotFoundError:
                continue

    def read(_: int) -> None:
        results = collections.search("reviews", UNIT[0], k=100)
        assert len({result.id for result in results}) == len(results)

    calls: list[Callable[[int], object]] = [
        lambda number: put(collections, {str(number % 13): "1"}, UNIT[:1]),
        lambda number: put(collections, {str(number % 11): "2"}, UNIT[:1]),
        lambda number: collections.delete("reviews", [str(number % 7)]),
        lambda number: collections.drop("reviews") if number % 5 == 0 else time.sleep(0.003),
        read,
        read,
    ]
    with ThreadPoolExecutor(len(calls)) as pool:
        tasks = [pool.submit(repeat, call) for call in calls]
        time.sleep(1)
        stop.set()
        for task in tasks:
            task.result()
    put(collections, {"last": "3"}, UNIT[:1])
    in_store = {document.id: document.text for document in collections.list_documents("reviews")}
    assert {result.id: result.text for result in collections.search("reviews", UNIT[0], k=100)} == in_store


def test_indexes_are_built_once_however_many_ask(store: Store, collections: Collections) -> None:
    put(collections, {str(number): "t" for number in range(2000)}, np.ones((2000, DIMENSIONS)))
    fresh = Collections(store, fingerprint="ours", dimensions=DIMENSIONS)
    barrier = threading.Barrier(8)

    def ask(thread: int) -> object:
        barrier.wait()
        if thread % 2:
            put(fresh, {f"new {thread}": "t"}, 2 * np.ones((1, DIMENSIONS)))
        assert len(fresh.search("reviews", UNIT[0], k=3000)) >= 2000
        return fresh._entries["reviews"].index

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1
    assert {result.id for result in fresh.search("reviews", UNIT[0], k=4)} == {
        f"new {thread}" for thread in (1, 3, 5, 7)
    }


CHILD = """
import sys
from pathlib import Path
from service.collection import Collections
from service.documents import NewDocument
from service.store import Store

first = int(sys.argv[2])
with Store.open(Path(sys.argv[1])) as store:
    collections = Collections(store, fingerprint="ours", dimensions=5)
    for batch in range(first, first + 10**6):
        documents = [NewDocument(f"text {batch}", id=f"{batch}-{part}") for part in range(3)]
        documents.append(NewDocument(f"{batch}", id="latest"))
        collections.add("reviews", documents, [[1, batch, 0, 0, 0]] * 3 + [[0, 0, 0, 0, 1]])
        if batch % 5 == 0:
            collections.delete("reviews", [f"{batch}-1"])
            print("deleted", batch, flush=True)
        print("added", batch, flush=True)
"""


def write_until_killed(data_dir: Path, *, first: int, wait: bool, after_s: float) -> tuple[set[int], set[int]]:
    """Give the batches whose adding, and whose deleting, a real process had acknowledged when it was killed.

    Without `wait` it may be killed while it starts; otherwise only after the first acknowledgement.
    """
    command = [sys.executable, "-c", CHILD, str(data_dir), str(first)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        said = child.stdout.readline() if wait else ""
        time.sleep(after_s)
        child.kill()
        said += child.stdout.read()
    words = said.rpartition("\n")[0].split()  # the last line may have been cut off
    batches = list(zip(words[::2], map(int, words[1::2]), strict=True))
    return {batch for what, batch in batches if what == "added"}, {
        batch for what, batch in batches if what == "deleted"
    }


@pytest.mark.parametrize("lives", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path, lives: int) -> None:
    source = random.Random(lives)
    added: set[int] = set()
    deleted: set[int] = set()
    for life in range(lives):
        wait = life % 2 == 1
        new, gone = write_until_killed(
            tmp_path, first=1_000_000 * life, wait=wait, after_s=source.uniform(0, 0.3 if wait else 0.8)
        )
        assert new | gone or not wait
        added |= new | gone
        deleted |= gone
        with Store.open(tmp_path) as store:
            collections = Collections(store, fingerprint="ours", dimensions=DIMENSIONS)
            collections.create("reviews")
            stored = {document.id: document.text for document in collections.list_documents("reviews", limit=10**6)}
            results = collections.search("reviews", UNIT[0], k=10**6)
        assert {result.id: result.text for result in results} == stored
        assert int(stored.pop("latest", -1)) >= max(added, default=-1)
        batches = {int(key.split("-")[0]) for key in stored}
        assert batches >= added
        for batch in batches:  # one that was not acknowledged may be there too, but whole
            parts = {key for key in (f"{batch}-{part}" for part in range(3)) if key in stored}
            may_be_deleted = {f"{batch}-1"} if batch % 5 == 0 else set()
            assert parts | may_be_deleted == {f"{batch}-{part}" for part in range(3)}
            assert batch not in deleted or f"{batch}-1" not in parts


def test_every_error_has_a_status_of_its_own() -> None:
    kinds = ServiceError.__subclasses__()
    assert len({kind.status for kind in kinds}) == len({kind.error_type for kind in kinds}) == len(kinds)
