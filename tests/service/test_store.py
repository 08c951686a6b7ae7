"""The store, on a real SQLite in a real directory."""

import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from service.database import DATABASE_FILE
from service.documents import Document
from service.errors import ConflictError, InvalidError, NotFoundError, NotReadyError
from service.store import Store

ROOT = Path(__file__).parents[2]
DIMENSIONS = 5
SURROGATE = "a\ud800b"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path) as opened:
        opened.create_collection("reviews", fingerprint="abc", dimensions=DIMENSIONS)
        yield opened


def vectors_for(documents: list[Document], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((len(documents), DIMENSIONS)).astype(np.float32)


def put(store: Store, *documents: Document, name: str = "reviews") -> list[int]:
    return store.upsert_documents(name, list(documents), vectors=vectors_for(list(documents))).vector_ids


def stored_vectors(store: Store, block: int = 4096) -> dict[int, list[float]]:
    blocks = store.iterate_vectors("reviews", block=block)
    return {key: row for ids, rows in blocks for key, row in zip(ids.tolist(), rows.tolist(), strict=True)}


def start_child(data_dir: Path) -> subprocess.Popen[str]:
    """A process that opens the store, says so, and holds it until it is killed."""
    code = (
        "import sys, time; from pathlib import Path; from service.store import Store\n"
        "store = Store.open(Path(sys.argv[1])); print('open', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(data_dir)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_goes_in_comes_out(store: Store) -> None:
    metadata = {
        "stars": 5,
        "huge": 2**200,
        "small": -(2**64) - 1,
        "digits": 10**4000 - 1,
        "share": 0.1,
        "ok": True,
        "none": None,
        "nested": {"ключ": ["é", {"𝄞": "\x00"}, []]},
        "": "",
    }
    documents = [
        Document("1", "plain", metadata),
        Document("ü/𝄞 %?#", "a\x00b\x00"),
        Document("x" * 512, ""),
        Document("\u2028", "\r\n\ufeff"),
    ]
    put(store, *documents)
    for document in documents:
        assert store.get_document("reviews", document.id) == document
    assert store.count_documents("reviews") == 4
    assert isinstance(store.get_document("reviews", "1").metadata["huge"], int)


def test_everything_is_there_after_reopening(tmp_path: Path) -> None:
    documents = [Document(str(number), f"text {number}", {"n": number}) for number in range(7)]
    with Store.open(tmp_path) as store:
        created = store.create_collection("reviews", fingerprint="abc", dimensions=DIMENSIONS)
        put(store, *documents)
        vectors = stored_vectors(store)
    for _ in range(2):
        with Store.open(tmp_path) as store:
            assert store.list_documents("reviews") == documents
            assert stored_vectors(store) == vectors
            info = store.get_collection("reviews")
            assert (info.id, info.created, info.change) == (created.id, created.created, 1)


def test_an_upsert_replaces_under_a_new_vector_id(store: Store) -> None:
    first = put(store, Document("a", "1"), Document("b", "2"))
    second = store.upsert_documents(
        "reviews", [Document("b", "3"), Document("c", "4")], vectors=np.ones((2, DIMENSIONS))
    )
    assert second.replaced == [first[1]]
    assert second.vector_ids[0] > first[1]
    assert store.documents_by_vector_ids(first + second.vector_ids) == {
        first[0]: Document("a", "1"),
        second.vector_ids[0]: Document("b", "3"),
        second.vector_ids[1]: Document("c", "4"),
    }


def test_vector_ids_never_come_back(tmp_path: Path) -> None:
    seen: set[int] = set()
    for _ in range(3):
        with Store.open(tmp_path) as store:
            for _ in range(2):
                store.create_collection("reviews", fingerprint="abc", dimensions=DIMENSIONS)
                new = put(store, Document("a", "1"), Document("b", "2"))
                assert seen.isdisjoint(new)
                seen.update(new)
                store.delete_documents("reviews", ["b"])
                store.drop_collection("reviews")
    assert len(seen) == 12


def test_each_write_takes_a_higher_change_number(store: Store) -> None:
    put(store, Document("a", "1"), Document("b", "2"))
    put(store, Document("a", "3"))
    assert store.get_collection("reviews").change == 2
    assert store.delete_documents("reviews", ["nobody"]) == []
    assert store.get_collection("reviews").change == 2
    store.delete_documents("reviews", ["a"])
    assert store.get_collection("reviews").change == 3


def test_a_bad_document_keeps_the_whole_call_out(store: Store) -> None:
    put(store, Document("a", "old"))
    with pytest.raises(InvalidError, match="document 2"):
        put(store, Document("a", "new"), Document("b", "new"), Document("c", SURROGATE))
    assert store.list_documents("reviews") == [Document("a", "old")]


def test_a_full_disk_keeps_the_whole_call_out(store: Store) -> None:
    put(store, Document("a", "old"))
    (pages,) = store._database._writer.execute("PRAGMA page_count").fetchone()
    store._database._writer.execute(f"PRAGMA max_page_count = {pages + 5}")
    with pytest.raises(NotReadyError, match=r"nothing was stored.*full"):
        put(store, Document("a", "new"), Document("b", "x" * 100_000))
    assert store.list_documents("reviews") == [Document("a", "old")]
    store._database._writer.execute("PRAGMA max_page_count = 100000")
    put(store, Document("b", "x" * 100_000))
    assert store.count_documents("reviews") == 2


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (Document("", "t"), "the id of document 0 must be 1 to 512 bytes"),
        (Document("é" * 257, "t"), "without control characters, got 514 bytes"),
        (Document("a\x00", "t"), "without control characters"),
        (Document("a\n", "t"), "without control characters"),
        (Document("a\x85", "t"), "without control characters"),
        (
            Document(SURROGATE, "t"),
            "the id of document 0 must be Unicode text, got the lone surrogate U+D800 at character 1",
        ),
        (
            Document("a", SURROGATE),
            "the text of document 0 must be Unicode text, got the lone surrogate U+D800 at character 1",
        ),
        (Document("a", "t", {"k": SURROGATE}), "the metadata of document 0['k'] must be Unicode"),
        (Document("a", "t", {SURROGATE: 1}), "the key 'a\\ud800b' of the metadata of document 0 must be Unicode"),
        (Document("a", "t", {"k": [0, {"m": SURROGATE}]}), "document 0['k'][1]['m'] must be Unicode"),
        (Document("a", "t", {"k": [{SURROGATE: 1}]}), "of the metadata of document 0['k'][0] must be Unicode"),
        (Document("a", "t", {"k": [float("nan")]}), "document 0['k'][0] must be finite"),
        (Document("a", "t", {"k": float("-inf")}), "document 0['k'] must be finite"),
        (Document("a", "t", {"k": 10**4001}), "document 0['k'] must have at most 4,000 digits"),
        (Document("a", "t", {"k": {1: 2}}), "the keys of the metadata of document 0['k'] must be strings, got 1"),
        (Document("a", "t", {"k": b"raw"}), "document 0['k'] must be something that JSON has, got bytes"),
        (Document("a", "t", {"k": (1, 2)}), "must be something that JSON has, got tuple"),
    ],
)
def test_refuses_a_document_and_says_where(store: Store, document: Document, message: str) -> None:
    with pytest.raises(InvalidError, match=re.escape(message)) as refused:
        put(store, document)
    str(refused.value).encode()  # or it could not be sent
    assert store.count_documents("reviews") == 0


def test_metadata_may_be_deep_but_not_bottomless(store: Store) -> None:
    deep: dict = {}
    for _ in range(63):
        deep = {"k": deep}
    put(store, Document("a", "t", deep))
    assert store.get_document("reviews", "a").metadata == deep
    for _ in range(10_000):
        deep = {"k": deep}
    with pytest.raises(InvalidError, match="nested at most 64 deep"):
        put(store, Document("a", "t", deep))


def test_refuses_the_same_id_twice_in_one_call(store: Store) -> None:
    with pytest.raises(InvalidError, match="'b' for documents 1 and 3"):
        put(store, Document("a", ""), Document("b", ""), Document("c", ""), Document("b", ""))


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        (np.ones((2, DIMENSIONS)), "one row for each of the 1 documents"),
        (np.ones((1, 7)), "5 dimensions in the collection 'reviews', got 7"),
        (np.full((1, DIMENSIONS), np.nan), "finite, and that of document 0"),
        (np.full((1, DIMENSIONS), 1e39), "finite, and that of document 0"),
    ],
)
def test_refuses_vectors_that_an_index_could_not_hold(store: Store, vectors: np.ndarray, message: str) -> None:
    with pytest.raises(InvalidError, match=message):
        store.upsert_documents("reviews", [Document("a", "t")], vectors=vectors)
    assert store.count_documents("reviews") == 0


@pytest.mark.parametrize("name", ["", "A", "-a", "_a", "a b", "a/b", "é", "a\n", "a" * 64, SURROGATE])
def test_refuses_a_name_everywhere(store: Store, name: str) -> None:
    with pytest.raises(InvalidError, match="must match"):
        store.create_collection(name, fingerprint="abc", dimensions=5)
    with pytest.raises(InvalidError, match="must match"):
        store.get_collection(name)


def test_names_are_unique_and_may_be_long(store: Store) -> None:
    longest = "0" + "_-" * 31
    assert store.create_collection(longest, fingerprint="abc", dimensions=5).name == longest
    with pytest.raises(ConflictError, match="exists already"):
        store.create_collection("reviews", fingerprint="abc", dimensions=5)
    assert [info.name for info in store.list_collections()] == [longest, "reviews"]


def test_what_is_missing_is_named(store: Store) -> None:
    for call in (store.get_collection, store.drop_collection, store.count_documents, store.list_documents):
        with pytest.raises(NotFoundError, match="no collection 'nobody'"):
            call("nobody")
    with pytest.raises(NotFoundError, match="'reviews' has no document with the id 'nobody'"):
        store.get_document("reviews", "nobody")
    for call in (store.get_document, lambda name, key: store.delete_documents(name, [key])):
        with pytest.raises(InvalidError, match="surrogate"):
            call("reviews", SURROGATE)


def test_pages_of_documents_cover_each_once_in_order(store: Store) -> None:
    ids = ["a", "b", "B", "10", "9", "é", "z", "𝄞", "\uffff"]
    put(store, *(Document(key, key) for key in ids))
    listed: list[str] = []
    while page := store.list_documents("reviews", limit=2, after=listed[-1] if listed else None):
        listed += [document.id for document in page]
    assert listed == sorted(ids, key=str.encode)
    assert [document.id for document in store.list_documents("reviews", after="c")] == ["z", "é", "\uffff", "𝄞"]
    with pytest.raises(InvalidError, match="limit must be at least 1"):
        store.list_documents("reviews", limit=0)


def test_a_collection_sees_nothing_of_another(store: Store) -> None:
    store.create_collection("other", fingerprint="abc", dimensions=DIMENSIONS)
    put(store, Document("a", "ours"))
    put(store, Document("a", "theirs"), Document("b", "theirs"), name="other")
    store.delete_documents("other", ["a"])
    assert store.list_documents("reviews") == [Document("a", "ours")]
    store.drop_collection("other")
    assert list(stored_vectors(store)) == [1]


@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_iterates_over_every_vector_in_blocks(store: Store, block: int) -> None:
    documents = [Document(str(number), "") for number in range(7)]
    vectors = vectors_for(documents)
    ids = store.upsert_documents("reviews", documents, vectors=vectors).vector_ids
    replaced = store.upsert_documents("reviews", documents[:2], vectors=vectors[5:])
    expected = dict(zip(ids, vectors.tolist(), strict=True)) | dict(
        zip(replaced.vector_ids, vectors[5:].tolist(), strict=True)
    )
    found = stored_vectors(store, block)
    assert found == {key: row for key, row in expected.items() if key not in replaced.replaced}
    assert list(found) == sorted(found)


def test_iterating_shows_one_state_while_others_write(store: Store) -> None:
    put(store, *(Document(str(number), "") for number in range(7)))
    blocks = store.iterate_vectors("reviews", block=2)
    seen = next(blocks)[0].tolist()
    put(store, Document("0", "new"), Document("x", "new"))
    store.delete_documents("reviews", ["5"])
    assert seen + [key for ids, _ in blocks for key in ids.tolist()] == [1, 2, 3, 4, 5, 6, 7]


def test_all_that_one_call_reads_belongs_to_one_state(store: Store) -> None:
    count = "SELECT count(*) FROM documents"
    with store._database.reading() as reader:
        assert reader.execute(count).fetchone() == (0,)
        put(store, Document("a", "t"))
        assert reader.execute(count).fetchone() == (0,)
    assert store.count_documents("reviews") == 1


def test_gives_the_vectors_of_unchanged_texts_alone(store: Store) -> None:
    documents = [Document("a", "same"), Document("b", "old"), Document("c", "")]
    vectors = vectors_for(documents)
    store.upsert_documents("reviews", documents, vectors=vectors)
    found = store.unchanged_vectors("reviews", {"a": "same", "b": "new", "c": "", "d": "same"})
    assert set(found) == {"a", "c"}
    assert np.array_equal(found["a"], vectors[0])
    assert np.array_equal(found["c"], vectors[2])


def test_more_ids_than_sqlite_takes_parameters(store: Store) -> None:
    documents = [Document(f"{number}𝄞", "t") for number in range(33_000)]
    ids = put(store, *documents)
    assert len(store.documents_by_vector_ids(np.array(ids))) == 33_000
    assert store.delete_documents("reviews", [document.id for document in documents]) == ids


def test_every_connection_waits_for_the_disk(store: Store) -> None:
    with store._database.reading() as reader:
        for connection in (store._database._writer, reader):
            assert connection.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
            assert connection.execute("PRAGMA foreign_keys").fetchone() == (1,)
            assert connection.execute("PRAGMA secure_delete").fetchone() == (1,)
            assert connection.execute("PRAGMA busy_timeout").fetchone() == (5000,)
        with pytest.raises(NotReadyError, match="readonly"), store._database.reading() as other:
            other.execute("DELETE FROM documents")


def test_a_database_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    with sqlite3.connect(tmp_path / DATABASE_FILE) as database:
        applied = database.execute("SELECT name FROM migrations").fetchall()
        assert applied == [("m001_collections_and_documents",)]
        database.execute("INSERT INTO migrations VALUES ('m999_from_the_future', '2099')")
    database.close()
    with pytest.raises(ConflictError, match=r"newer release \(it has m999_from_the_future\); upgrade"):
        Store.open(tmp_path)
    with sqlite3.connect(tmp_path / DATABASE_FILE) as database:
        database.execute("DELETE FROM migrations WHERE name LIKE 'm999%'")
    database.close()
    Store.open(tmp_path).close()


def test_a_damaged_database_is_refused_and_the_directory_released(tmp_path: Path) -> None:
    (tmp_path / DATABASE_FILE).write_bytes(b"no database at all" * 1000)
    with pytest.raises(NotReadyError, match="not a database"):
        Store.open(tmp_path)
    (tmp_path / DATABASE_FILE).unlink()
    Store.open(tmp_path).close()


def test_a_second_store_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    with Store.open(tmp_path), pytest.raises(ConflictError, match="one process at a time"):
        Store.open(tmp_path)
    Store.open(tmp_path).close()


def test_a_second_process_is_refused_and_a_killed_one_blocks_nobody(tmp_path: Path) -> None:
    with start_child(tmp_path) as child:
        assert child.stdout
        assert child.stdout.readline() == "open\n"
        with pytest.raises(ConflictError, match=f"{re.escape(str(tmp_path))}.*process {child.pid} "):
            Store.open(tmp_path)
        child.send_signal(signal.SIGKILL)
        child.wait()
        with Store.open(tmp_path) as store:
            store.create_collection("reviews", fingerprint="abc", dimensions=3)
            with start_child(tmp_path) as refused:
                _, errors = refused.communicate(timeout=30)
            assert refused.returncode == 1
            assert "ConflictError" in errors


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.close()
    store.close()
    for call in (store.list_collections, store.purge, lambda: store.drop_collection("a")):
        with pytest.raises(NotReadyError, match="closed"):
            call()


def test_only_the_owner_can_read_a_new_directory(tmp_path: Path) -> None:
    Store.open(tmp_path / "deep" / "data").close()
    assert (tmp_path / "deep" / "data").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("seed", [2, 3, 5])
def test_a_purge_leaves_nothing_of_what_was_deleted(tmp_path: Path, seed: int) -> None:
    """Many writes of all sizes, so that SQLite moves entries between pages and leaves copies behind."""
    source = random.Random(seed)
    live: dict[str, str] = {}
    gone: list[str] = []
    with Store.open(tmp_path) as store:
        store.create_collection("reviews", fingerprint="abc", dimensions=DIMENSIONS)
        for _ in range(60):
            new = {f"id{source.random()}": f"text{source.random()}" for _ in range(20)}
            put(
                store,
                *(Document(key, text + "x" * source.randrange(3000), {text: [text]}) for key, text in new.items()),
            )
            live |= new
            dead = source.sample(sorted(live), 15)
            gone += [word for key in dead for word in (key, live.pop(key))]
            if source.random() < 0.5:
                store.delete_documents("reviews", dead)
            else:  # the former text goes with an upsert, the id stays for now
                put(store, *(Document(key, "new") for key in dead))
                store.delete_documents("reviews", dead)
        store.purge()
        on_disk = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert [word for word in gone if word.encode() in on_disk] == []
        assert all(key.encode() in on_disk and text.encode() in on_disk for key, text in live.items())
        size = sum(file.stat().st_size for file in tmp_path.iterdir())
        store.drop_collection("reviews")
        store.purge()
        on_disk = b"".join(file.read_bytes() for file in tmp_path.iterdir())
        assert [key for key in live if key.encode() in on_disk] == []
        assert sum(file.stat().st_size for file in tmp_path.iterdir()) < size / 5


def test_threads_read_and_write_side_by_side(store: Store) -> None:
    stop = threading.Event()

    def read() -> int:
        reads = 0
        while not stop.is_set():
            texts = {document.text for document in store.list_documents("reviews")}
            assert len(texts) <= 1  # all seven are written together
            reads += 1
        return reads

    def write(thread: int) -> None:
        for number in range(20):
            put(store, *(Document(str(key), f"{thread}/{number}") for key in range(7)))

    with ThreadPoolExecutor(12) as pool:
        readers = [pool.submit(read) for _ in range(8)]
        for writer in [pool.submit(write, thread) for thread in range(4)]:
            writer.result()
        stop.set()
        assert min(reader.result() for reader in readers) > 0
    assert store.get_collection("reviews").change == 80
    assert store.count_documents("reviews") == 7
