"""Prepared corpora: what is read is what was written, whole or not at all; a teacher's vectors stand at their texts."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from encoder import EncoderConfig, ModelSpec, SentenceEncoder, TextTokenizer
from encoder.checkpoint import save
from encoder.model import Encoder
from training.config import Classes, Data, Distill, Masked, Objective, Pairs, RunError
from training.data import Corpus, DataError
from training.distributed import World
from training.prepare import prepare_documents, prepare_items
from training.source import Item
from training.store import ArrayWriter, TokenStore, write_store

ALONE = World(0, 1, torch.device("cpu"))
TEXTS = ("the pizza", "it tasted good", "", "pizzas", "the bank of the river lent money and it eats pizza a b")
# Of tests/conftest.py's vocabulary: [CLS] is 2, [SEP] is 3, and "the" is 5; at most 11 tokens, special ones included.
IDS = ([2, 5, 6, 3], [2, 12, 13, 14, 3], [2, 3], [2, 6, 23, 3], [2, 5, 17, 9, 5, 18, 19, 20, 11, 12, 3])


def items(texts: Sequence[str], sides: int = 1) -> list[Item]:
    return [
        Item(tuple(texts[start : start + sides]), "", 0, start // sides)
        for start in range(0, len(texts) - sides + 1, sides)
    ]


def sentences(count: int) -> list[str]:
    """Different texts of the vocabulary: their numbers in base 13."""
    words = ["the", "pizza", "came", "out", "of", "oven", "and", "it", "tasted", "good", "squatch", "eats", "bank"]
    return [" ".join(words[number // 13**place % 13] for place in range(4)) for number in range(count)]


# --------------------------------------------------------------------------------------------------------- token stores


def test_a_store_holds_the_tokens_of_each_text(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    write_store(tmp_path, items(TEXTS), tiny_spec)
    store = TokenStore(tmp_path)
    assert len(store) == 5
    assert [store.text(item).tolist() for item in range(5)] == list(IDS)
    assert store.lengths().tolist() == [4, 5, 2, 4, 11]
    assert store.ends.tolist() == [4, 9, 11, 15, 26]
    assert store.ids.tolist() == [token for text in IDS for token in text]


def test_the_two_texts_of_a_pair_stand_together(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    store = write_store(tmp_path, items(TEXTS[:4], sides=2), tiny_spec, sides=2)
    assert len(store) == len(TokenStore(tmp_path)) == 2
    assert [[store.text(item, side).tolist() for side in (0, 1)] for item in (0, 1)] == [list(IDS[:2]), list(IDS[2:4])]
    assert store.lengths().tolist() == [5, 4]


@pytest.mark.parametrize("sides", [1, 2, 3])
def test_many_texts_round_trip_to_the_bit(sides: int, tmp_path: Path, tiny_spec: ModelSpec) -> None:
    """More than are tokenised at once."""
    texts = sentences(6 * 2053)
    write_store(tmp_path, items(texts, sides), tiny_spec, sides=sides)
    store = TokenStore(tmp_path)
    expected = [text.input_ids for text in TextTokenizer(tiny_spec).encode(texts)]
    assert len(store) == 6 * 2053 // sides
    assert [store.text(item, side).tolist() for item in range(len(store)) for side in range(sides)] == expected


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_every_id_of_a_vocabulary_fits(vocab_size: int, dtype: str, tmp_path: Path, tiny_spec: ModelSpec) -> None:
    config = EncoderConfig(**{**vars(tiny_spec.config), "vocab_size": vocab_size})
    tokenizer = tiny_spec.tokenizer_json.replace('"pizza":6', f'"pizza":{vocab_size - 1}')
    store = write_store(tmp_path, items(TEXTS[:1]), replace(tiny_spec, config=config, tokenizer_json=tokenizer))
    assert store.ids.dtype == dtype
    assert store.text(0).tolist() == [2, 5, vocab_size - 1, 3]


def test_documents_are_not_cut(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    store = write_store(tmp_path, items(["the pizza " * 50]), tiny_spec, cut=False)
    assert store.text(0).tolist() == [2, *[5, 6] * 50, 3]


def test_no_text_is_no_store(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    with pytest.raises(DataError, match="must hold at least one text that the settings keep, got none"):
        write_store(tmp_path, [], tiny_spec)
    with pytest.raises(FileNotFoundError):
        TokenStore(tmp_path)


def test_items_are_drawn_as_they_are_tokenised(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    """No more than a group is in memory, and further columns see each group before the next is read."""
    drawn = 0
    seen: list[tuple[int, int]] = []

    def source() -> Iterator[Item]:
        nonlocal drawn
        for drawn, text in enumerate(sentences(10_000), start=1):
            yield Item((text,), "", 0, drawn)

    def hook(group: Sequence[Item]) -> None:
        seen.append((drawn, group[0].row))

    write_store(tmp_path, source(), tiny_spec, hooks=[hook])
    assert seen == [(4096, 1), (8192, 4097), (10_000, 8193)]


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_write_leaves_no_store(again: bool, tmp_path: Path, tiny_spec: ModelSpec) -> None:
    """Also where there was one before."""
    if again:
        write_store(tmp_path, items(TEXTS), tiny_spec)

    def source() -> Iterator[Item]:
        yield from items(sentences(5000))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path, source(), tiny_spec)
    with pytest.raises(FileNotFoundError):
        TokenStore(tmp_path)
    write_store(tmp_path, items(TEXTS), tiny_spec)
    assert TokenStore(tmp_path).text(4).tolist() == IDS[4]


def test_a_killed_write_leaves_no_store(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    save(tmp_path / "model", tiny_spec, Encoder(tiny_spec.config))
    (tmp_path / "store").mkdir()
    code = f"""
        import os, signal
        from pathlib import Path
        from encoder.model_dir import read_spec
        from training.source import Item
        from training.store import write_store
        def source():
            for row in range(5000):
                yield Item(("the pizza",), "", 0, row)
            print("killed", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        root = Path({str(tmp_path)!r})
        write_store(root / "store", source(), read_spec(root / "model"))
    """
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "killed\n"), done.stderr
    with pytest.raises(FileNotFoundError):
        TokenStore(tmp_path / "store")


@pytest.mark.parametrize("shape", [(), (3,), (2, 5)])
@pytest.mark.parametrize("dtype", ["<u2", "<i8", "<f2"])
def test_rows_are_appended_to_the_bit(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    parts = [np.random.default_rng(count).normal(0, 100, (count, *shape)).astype(dtype) for count in (7, 0, 1, 11)]
    with ArrayWriter(tmp_path / "rows.npy", dtype, *shape) as writer:
        for part in parts:
            writer.append(part)
    loaded = np.load(tmp_path / "rows.npy")
    assert loaded.dtype == dtype
    np.testing.assert_array_equal(loaded, np.concatenate(parts), strict=True)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_rows_that_end_in_an_error_leave_no_file(tmp_path: Path) -> None:
    def write() -> None:
        with ArrayWriter(tmp_path / "rows.npy", "<i8") as writer:
            writer.append(np.arange(7))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []


def test_rows_of_another_length_are_refused(tmp_path: Path) -> None:
    """Or those behind would be shifted unseen."""
    with ArrayWriter(tmp_path / "rows.npy", "<f2", 3) as writer:
        writer.append(np.ones((2, 3)))
        with pytest.raises(ValueError, match=r"rows must have the shape \(3,\), got \(5,\)"):
            writer.append(np.ones((2, 5)))
    assert np.load(tmp_path / "rows.npy").shape == (2, 3)


# ----------------------------------------------------------------------------------------------------- prepared corpora


@pytest.fixture
def prepare(tmp_path: Path, tiny_spec: ModelSpec) -> Callable[..., TokenStore]:
    def prepare(objective: Objective, data: Data | None = None, *, sides: int = 1, valued: bool = False) -> TokenStore:
        out = tmp_path / "prepared"
        return prepare_items(
            objective, data or Data(), tmp_path, out, tiny_spec, sides=sides, valued=valued, world=ALONE
        )

    return prepare


def write_table(path: Path, rows: Sequence[Sequence[str]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in rows))


def test_labels_stand_at_their_texts(tmp_path: Path, prepare: Callable[..., TokenStore]) -> None:
    write_table(tmp_path / "a.tsv", [("t", "l"), ("the pizza", "food"), ("THE pizza", "food"), ("bank", "money")])
    corpus = Corpus(path="a.tsv", columns=("t", "l"))
    store = prepare(Classes(kind="classes", corpora=(corpus,)), valued=True)
    assert [store.text(item).tolist() for item in range(2)] == [[2, 5, 6, 3], [2, 17, 3]]
    assert store.column("values").tolist() == ["food", "money"]


def test_a_prepared_corpus_is_made_once_and_anew_when_anything_changes(
    tmp_path: Path, prepare: Callable[..., TokenStore]
) -> None:
    (tmp_path / "a.txt").write_text("the pizza\nthe bank\n")
    objective = Masked(kind="masked", corpora=(Corpus(path="a.txt"),))
    first = prepare(objective)
    made = (first.path / "ids.npy").stat().st_ino
    assert prepare(objective).path == first.path
    assert (first.path / "ids.npy").stat().st_ino == made
    others = [prepare(objective, Data(deduplicate=False))]
    others += [prepare(Masked(kind="masked", corpora=(Corpus(path="a.txt", max_chars=8),)))]
    (tmp_path / "a.txt").write_text("the pizza\nthe river\n")
    others += [prepare(objective)]
    assert others[-1].text(1).tolist() == [2, 5, 18, 3]
    assert len({store.path for store in (first, *others)}) == 4
    assert sorted((tmp_path / "prepared").iterdir()) == sorted(store.path for store in (first, *others))


def test_a_corpus_that_is_refused_leaves_nothing_that_looks_prepared(
    tmp_path: Path, prepare: Callable[..., TokenStore]
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(sentences(6000)) + "\nb\x00ad\n")
    objective = Masked(kind="masked", corpora=(Corpus(path="a.txt"),))
    with pytest.raises(DataError, match=r"a\.txt, row 6000 .*control characters.*mend the row"):
        prepare(objective, Data(bad_rows="refuse"))
    assert all(path.name.startswith(".") for path in (tmp_path / "prepared").iterdir())
    (tmp_path / "a.txt").write_text("\n".join(sentences(6000)))
    assert len(prepare(objective, Data(bad_rows="refuse"))) == 6000


def test_corpora_of_which_nothing_is_left_tell_what_became_of_them(
    tmp_path: Path, prepare: Callable[..., TokenStore], tiny_spec: ModelSpec
) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text("b\x00d\nthe pizza\nthe bank\n")
    corpora = (Corpus(path="a.txt"), Corpus(path="b.txt", max_chars=8, min_chars=9))
    told = r"got none \(a.txt: 0 rows, 0 texts kept; b.txt: 3 rows, 0 texts kept, 2 passed over, bad rows: 1 control .*"
    with pytest.raises(DataError, match=told + r"b\.txt, row 0"):
        prepare(Masked(kind="masked", corpora=corpora))
    with pytest.raises(
        DataError, match=r"got none \(a.txt: 0 rows, 0 texts kept; b.txt: 3 rows, 0 texts kept, 1 passed"
    ):
        prepare_documents(corpora, Data(), tmp_path, tmp_path / "prepared", tiny_spec, heldout=0.1, world=ALONE)


@pytest.mark.parametrize("gone", ["a.txt", "decontam.u64", "vectors.npy"])
def test_a_missing_file_is_named_at_once(gone: str, tmp_path: Path, prepare: Callable[..., TokenStore]) -> None:
    (tmp_path / "a.txt").write_text("the pizza\n")
    np.array([5], dtype="<u8").tofile(tmp_path / "decontam.u64")
    np.save(tmp_path / "vectors.npy", np.ones((1, 3), dtype=np.float32))
    (tmp_path / gone).unlink()
    objective = Distill(kind="distill", corpora=(Corpus(path="a.txt", vectors="vectors.npy"),))
    with pytest.raises(DataError, match=rf"{gone} cannot be read \(No such file or directory\); is --data the right"):
        prepare(objective, Data(decontaminate="decontam.u64"))


def test_pairs_keep_their_sides(tmp_path: Path, prepare: Callable[..., TokenStore]) -> None:
    write_table(tmp_path / "a.tsv", [("q", "a"), ("the pizza", "good"), ("bank", "money")])
    store = prepare(Pairs(kind="pairs", corpora=(Corpus(path="a.tsv", columns=("a", "q")),)), sides=2)
    assert [[store.text(item, side).tolist() for side in (0, 1)] for item in (0, 1)] == [
        [[2, 14, 3], [2, 5, 6, 3]],
        [[2, 20, 3], [2, 17, 3]],
    ]


def test_each_tenth_document_is_held_out_whole(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    documents = [f"{text}\n{text} pizza money" for text in sentences(40)]
    (tmp_path / "a.txt").write_text("\n\n".join(documents))
    arguments = (Data(), tmp_path, tmp_path / "prepared", tiny_spec)
    training, heldout = prepare_documents([Corpus(path="a.txt")], *arguments, heldout=0.1, world=ALONE)
    expected = [text.input_ids for text in TextTokenizer(tiny_spec).encode(documents, cut=False)]
    assert [heldout.text(number).tolist() for number in range(len(heldout))] == expected[9::10]
    kept = [text for number, text in enumerate(expected) if number % 10 != 9]
    assert [training.text(number).tolist() for number in range(len(training))] == kept
    assert min(map(len, expected)) == 12 > tiny_spec.max_length  # none was cut


def test_too_few_documents_to_hold_one_out_are_refused(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(sentences(9)))
    arguments = (Data(), tmp_path, tmp_path / "prepared", tiny_spec)
    with pytest.raises(
        DataError, match=r"at least 10 documents, so that one can be held out, got 9 in a\.txt; add text"
    ):
        prepare_documents([Corpus(path="a.txt")], *arguments, heldout=0.1, world=ALONE)


# ---------------------------------------------------------------------------------------------------- teachers' vectors

ROWS = ["the pizza came out", "b\x00ad", "bank river", "THE pizza: came out!", "it tasted good", "", "money lent"]
KEPT = [0, 2, 4, 6]


@pytest.fixture
def teacher(tmp_path: Path, tiny_spec: ModelSpec) -> SentenceEncoder:
    torch.manual_seed(5)
    save(tmp_path / "teacher", tiny_spec, Encoder(tiny_spec.config))
    return SentenceEncoder.load(tmp_path / "teacher", precision="bfloat16")


def distill(*, teacher: str | None = None, vectors: str | None = None) -> Distill:
    return Distill(kind="distill", teacher=teacher, corpora=(Corpus(path="a.txt", vectors=vectors),))


def test_a_file_of_vectors_is_as_good_as_its_teacher(
    tmp_path: Path, prepare: Callable[..., TokenStore], teacher: SentenceEncoder
) -> None:
    """Though some rows are bad or duplicates, and the file's vectors are not of length 1."""
    (tmp_path / "a.txt").write_text("\n".join(ROWS))
    vectors = teacher.encode([row.replace("\x00", "") for row in ROWS])
    np.save(tmp_path / "vectors.npy", vectors * np.arange(1, 8, dtype=np.float32)[:, None])
    made = prepare(distill(teacher="teacher"))
    read = prepare(distill(vectors="vectors.npy"))
    assert made.path != read.path
    assert len(made) == len(read) == 4
    assert made.column("vectors").dtype == read.column("vectors").dtype == np.float16
    np.testing.assert_allclose(made.column("vectors"), vectors[KEPT], atol=1e-2, rtol=0)
    np.testing.assert_allclose(read.column("vectors"), made.column("vectors"), atol=1e-2, rtol=0)
    np.testing.assert_allclose(read.column("vectors"), vectors[KEPT], atol=2**-11, rtol=0)
    cosines = vectors[KEPT] @ vectors[KEPT].T
    assert (cosines[~np.eye(4, dtype=bool)] < 0.98).all()  # so a vector at another's text would have been seen


@pytest.mark.parametrize("count", [6, 8, 4])
def test_a_file_with_another_number_of_vectors_is_refused(
    count: int, tmp_path: Path, prepare: Callable[..., TokenStore]
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(ROWS))
    np.save(tmp_path / "vectors.npy", np.ones((count, 3), dtype=np.float32))
    with pytest.raises(
        DataError, match=rf"vectors\.npy must have a row for each .*rows? of a\.txt, got {count}; make it"
    ):
        prepare(distill(vectors="vectors.npy"))
    assert all(path.name.startswith(".") for path in (tmp_path / "prepared").iterdir())


@pytest.mark.parametrize("value", [0, np.nan, np.inf])
def test_a_vector_that_has_no_direction_is_named(
    value: float, tmp_path: Path, prepare: Callable[..., TokenStore]
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(ROWS))
    vectors = np.ones((7, 3), dtype=np.float32)
    vectors[4] = value
    np.save(tmp_path / "vectors.npy", vectors)
    with pytest.raises(DataError, match=r"finite and not all 0, got length \S+ in row 4 .* of vectors\.npy"):
        prepare(distill(vectors="vectors.npy"))


@pytest.mark.parametrize(
    ("array", "rule"),
    [
        (np.ones(7), "must hold a vector of floats a row, got float64 of shape"),
        (np.ones((7, 3, 2)), "must hold a vector of floats a row, got float64 of shape"),
        (np.ones((7, 3), dtype=np.int64), "must hold a vector of floats a row, got int64 of shape"),
        (np.array([[None]]), "must be a whole .npy of numbers"),
        (b"", "must be a whole .npy of numbers"),
        (b"\x93NUMPY\x01\x00", "must be a whole .npy of numbers"),
        (b"no array at all", "must be a whole .npy of numbers"),
    ],
)
def test_what_is_no_file_of_vectors_is_refused(
    array: np.ndarray | bytes, rule: str, tmp_path: Path, prepare: Callable[..., TokenStore]
) -> None:
    (tmp_path / "a.txt").write_text("\n".join(ROWS))
    if isinstance(array, bytes):
        (tmp_path / "vectors.npy").write_bytes(array)
    else:
        np.save(tmp_path / "vectors.npy", array)
    with pytest.raises(DataError, match=rf"vectors\.npy {rule}"):
        prepare(distill(vectors="vectors.npy"))


def test_vectors_of_two_sizes_are_refused(tmp_path: Path, prepare: Callable[..., TokenStore]) -> None:
    corpora = []
    for name, size in (("a", 3), ("b", 5)):
        (tmp_path / f"{name}.txt").write_text("the pizza\n")
        np.save(tmp_path / f"{name}.npy", np.ones((1, size), dtype=np.float32))
        corpora.append(Corpus(path=f"{name}.txt", vectors=f"{name}.npy"))
    with pytest.raises(DataError, match=r"vectors of all corpora must be of one size, got \[3, 5\]"):
        prepare(Distill(kind="distill", corpora=tuple(corpora)))


@pytest.mark.parametrize("settings", [{"split": "sentences"}, {"path": "a.tsv", "columns": ("t", "u")}])
def test_a_row_with_many_texts_has_no_vector(
    settings: dict[str, Any], tmp_path: Path, prepare: Callable[..., TokenStore]
) -> None:
    (tmp_path / "a.txt").write_text("The pizza. The bank.\n")
    (tmp_path / "a.tsv").write_text("t\tu\npizza\tbank\n")
    np.save(tmp_path / "vectors.npy", np.ones((1, 3), dtype=np.float32))
    corpus = Corpus(**{"path": "a.txt", "vectors": "vectors.npy", **settings})
    with pytest.raises(RunError, match=r"each row of a\.t.. must be one text, since vectors\.npy has one vector a row"):
        prepare(Distill(kind="distill", corpora=(corpus,)))


def test_without_teacher_and_vectors_nothing_can_be_learned(tmp_path: Path, prepare: Callable[..., TokenStore]) -> None:
    (tmp_path / "a.txt").write_text("the pizza\n")
    with pytest.raises(
        RunError, match=r"a teacher must be named, or a file of vectors for each corpus; a\.txt has none"
    ):
        prepare(distill())
