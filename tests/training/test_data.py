"""Files of text of every kind, whole and broken: which rows come out, and what is said of the others."""

import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import time
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data import Corpus, DataError, Decontaminator, Rows, Tally, is_heldout, sentences, text_hash

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
COLUMNS = ("id", "text", "label")
TABLE = [
    ("0", "Größe, “quoted”", "a"),
    ("1", 'He said "no, thanks"', "b"),
    ("2", "  spaces stay  ", "a"),
    ("3", "日本語 🍕", "c"),
    ("4", "a back\\slash", "a"),
]


def written(path: Path, content: bytes | str) -> Path:
    raw = content.encode() if isinstance(content, str) else content
    path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](raw))
    return path


def as_csv(rows: Sequence[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def as_tsv(rows: Sequence[Sequence[str]]) -> str:
    return "".join("\t".join(row) + "\n" for row in rows)


def as_jsonl(rows: Sequence[Sequence[Any]]) -> str:
    return "".join(json.dumps(dict(zip(COLUMNS, row, strict=True))) + "\n" for row in rows)


def as_parquet(rows: Sequence[Sequence[Any]], **options: Any) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    sink = io.BytesIO()
    columns = {name: list(cells) for name, cells in zip(COLUMNS, zip(*rows, strict=True), strict=True)}
    parquet.write_table(pyarrow.table(columns), sink, **options)
    return sink.getvalue()


FORMATS: dict[str, Callable[[Sequence[Sequence[str]]], bytes | str]] = {
    ".tsv": lambda rows: as_tsv([COLUMNS, *rows]),
    ".csv": lambda rows: as_csv([COLUMNS, *rows]),
    ".jsonl": as_jsonl,
    ".parquet": as_parquet,
}


def read(
    path: Path, *columns: str, bad_rows: Literal["skip", "refuse"] = "refuse", valued: bool = False, **settings: Any
) -> tuple[list[tuple[int, tuple[str, ...]]], Tally]:
    tally = Tally()
    corpus = Corpus(path=path.name, columns=columns, **settings)
    return list(Rows(corpus, path.parent, bad_rows=bad_rows, tally=tally, valued=valued)), tally


# -------------------------------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("suffix", FORMATS)
def test_each_format_gives_the_columns_asked_for_in_that_order(suffix: str, packed: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"rows{suffix}{packed}", FORMATS[suffix](TABLE))
    rows, tally = read(path, "label", "text")
    assert rows == [(number, (label, text)) for number, (_, text, label) in enumerate(TABLE)]
    assert (tally.read, tally.bad, tally.first_bad) == (5, {}, "")


@pytest.mark.parametrize("packed", PACK)
def test_a_txt_gives_its_lines_blank_ones_too(packed: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"notes.txt{packed}", "One.\n\n  two\twords \nthree, without an end")
    rows, tally = read(path)
    assert rows == [(0, ("One.",)), (1, ("",)), (2, ("  two\twords ",)), (3, ("three, without an end",))]
    assert tally.read == 4


def test_only_the_line_feed_ends_a_line(tmp_path: Path) -> None:
    """Not the other ends that str.splitlines knows, or the rows of a .tsv would fall apart."""
    text = "one\u2028still one\u0085still one\rstill one"
    assert read(written(tmp_path / "a.txt", f"{text}\n"))[0] == [(0, (text,))]
    assert read(written(tmp_path / "a.tsv", f"text\n{text}\n"), "text")[0] == [(0, (text,))]


@pytest.mark.parametrize("suffix", [".txt", ".tsv", ".csv", ".jsonl"])
def test_files_of_windows_are_read_as_well(suffix: str, tmp_path: Path) -> None:
    """With a byte order mark in front and a carriage return before each line feed."""
    table = [("0", "first", "a"), ("1", "second", "b")]
    content = "first\nsecond\n" if suffix == ".txt" else str(FORMATS[suffix](table))
    path = written(tmp_path / f"rows{suffix}", "\ufeff" + content.replace("\n", "\r\n"))
    rows, _ = read(path) if suffix == ".txt" else read(path, "text", "label", "id")
    expected = [("first",), ("second",)] if suffix == ".txt" else [("first", "a", "0"), ("second", "b", "1")]
    assert [row for _, row in rows] == expected


def test_a_tsv_knows_no_quotes_and_a_csv_does(tmp_path: Path) -> None:
    tsv = written(tmp_path / "a.tsv", 'text\tlabel\n"one\ttwo"\n')
    assert read(tsv, "text", "label")[0] == [(0, ('"one', 'two"'))]
    table = written(tmp_path / "a.csv", 'text,label\n"one, ""two""\nand a line",x\n')
    assert read(table, "text", "label")[0] == [(0, ('one, "two"\nand a line', "x"))]


@pytest.mark.parametrize("suffix", [".tsv", ".csv"])
def test_without_a_header_columns_are_numbers_from_0_and_the_first_line_is_a_row(suffix: str, tmp_path: Path) -> None:
    form = as_tsv if suffix == ".tsv" else as_csv
    path = written(tmp_path / f"rows{suffix}", form(TABLE))
    rows, _ = read(path, "1", header=False, where={"2": ["a"]})
    assert rows == [(0, ("Größe, “quoted”",)), (2, ("  spaces stay  ",)), (4, ("a back\\slash",))]
    with pytest.raises(DataError, match=rf"{path.name}.*no header.*numbers from 0, got 'text'"):
        read(path, "text", header=False)


@pytest.mark.parametrize("suffix", FORMATS)
def test_where_takes_rows_by_the_values_of_other_columns(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"rows{suffix}", FORMATS[suffix](TABLE))
    rows, tally = read(path, "id", where={"label": ["a", "c"], "id": ["0", "1", "3"]})
    assert rows == [(0, ("0",)), (3, ("3",))]
    assert tally.read == 5
    assert read(path, "label", where={"label": ["c"]})[0] == [(3, ("c",))]


def test_rows_that_are_not_asked_for_are_not_judged(tmp_path: Path) -> None:
    """Test rows often have no label."""
    path = written(tmp_path / "a.tsv", "split\ttext\tlabel\ntrain\tone\ta\ntest\ttwo\t\n")
    assert read(path, "text", "label", where={"split": ["train"]}, valued=True)[0] == [(0, ("one", "a"))]
    with pytest.raises(DataError, match=r"row 1 .*no label or score"):
        read(path, "text", "label", valued=True)


def test_numbers_and_truth_values_are_their_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": 1.5, "label": 3}\n{"text": true, "label": "x"}\n')
    assert [row for _, row in read(path, "text", "label")[0]] == [("1.5", "3"), ("True", "x")]


def test_a_parquet_is_read_a_group_of_rows_after_the_other(tmp_path: Path) -> None:
    table = [(str(number), f"text {number}", "ab"[number % 2]) for number in range(2503)]
    path = written(tmp_path / "rows.parquet.gz", as_parquet(table, row_group_size=501))
    rows, tally = read(path, "text", "id")
    assert rows == [(number, (f"text {number}", str(number))) for number in range(2503)]
    assert tally.read == 2503


# ------------------------------------------------------------------------------------------------------------- bad rows

BAD: dict[str, tuple[str, bytes | str]] = {
    "not JSON": (".jsonl", '{"text": "good"}\n{"text": "bad"\n{"text": "good too"}\n'),
    "not JSON, a number of 5000 digits": (".jsonl", '{"text": "good"}\n' + "1" * 5000 + '\n{"text": "good too"}\n'),
    "not JSON, nested beyond bounds": (".jsonl", '{"text": "good"}\n' + "[" * 10**5 + '\n{"text": "good too"}\n'),
    "not a JSON object": (".jsonl", '{"text": "good"}\n["bad"]\n{"text": "good too"}\n'),
    "a column missing or not text": (".jsonl", '{"text": "good"}\n{"title": "bad"}\n{"text": "good too"}\n'),
    "a column missing or not text: null": (".jsonl", '{"text": "good"}\n{"text": null}\n{"text": "good too"}\n'),
    "a column missing or not text: list": (".jsonl", '{"text": "good"}\n{"text": ["bad"]}\n{"text": "good too"}\n'),
    "no text": (".jsonl", '{"text": "good"}\n{"text": " \\n"}\n{"text": "good too"}\n'),
    "another number of columns": (".tsv", "text\tlabel\ngood\ta\nbad\ngood too\tb\n"),
    "another number of columns: more": (".tsv", "text\tlabel\ngood\ta\nb\ta\td\ngood too\tb\n"),
    "another number of columns: blank line": (".csv", "text,label\ngood,a\n\ngood too,b\n"),
    "not CSV (',' expected after '\"')": (".csv", 'text,label\ngood,a\n"b"ad,a\ngood too,b\n'),
    "control characters or invalid UTF-8": (".txt", "good\nb\x00ad\ngood too\n"),
    "control characters or invalid UTF-8: latin-1": (".txt", b"good\nGr\xf6\xdfe\ngood too\n"),
    "control characters or invalid UTF-8: cut": (".txt", b"good\n\xf0\x9f\x8d\ngood too\n"),
    "control characters or invalid UTF-8: CSV": (".csv", "text,label\ngood,a\n\x00,a\ngood too,b\n"),
    "control characters or invalid UTF-8: half a character": (
        ".jsonl",
        '{"text": "good"}\n{"text": "\\ud800"}\n{"text": "good too"}\n',
    ),
    "control characters or invalid UTF-8: second column": (".tsv", "label\ttext\na\tgood\n\x1b\tbad\nb\tgood too\n"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_row_is_counted_with_its_place_or_refused(reason: str, tmp_path: Path) -> None:
    suffix, content = BAD[reason]
    if not reason.startswith("not CSV"):
        reason = re.split("[:,]", reason)[0]  # what follows tells this case from another
    path = written(tmp_path / f"rows{suffix}", content)
    columns = {".txt": [], ".tsv": ["text", "label"], ".csv": ["text", "label"], ".jsonl": ["text"]}[suffix]
    rows, tally = read(path, *columns, bad_rows="skip")
    assert [(number, row[0]) for number, row in rows] == [(0, "good"), (2, "good too")]
    assert tally.read == 3
    assert tally.bad == {reason: 1}
    assert tally.first_bad == f"{path}, row 1 (the first is 0): {reason}"
    assert f"3 rows, 0 texts kept, bad rows: 1 {reason} (first: {path}, row 1" in tally.describe()
    with pytest.raises(DataError) as refused:
        read(path, *columns)
    assert str(refused.value) == f'{tally.first_bad}; mend the row, or set bad_rows = "skip"'


def test_bad_rows_are_counted_by_reason_and_the_first_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"text": "good"}\n\n[]\nnull\n{"text": ""}\n{"text": "more"}\n')
    rows, tally = read(path, "text", bad_rows="skip")
    assert rows == [(0, ("good",)), (5, ("more",))]
    assert tally.bad == {"not JSON": 1, "not a JSON object": 2, "no text": 1}
    assert tally.first_bad.endswith("a.jsonl, row 1 (the first is 0): not JSON")


def test_bytes_in_a_parquet_are_no_text(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = written(tmp_path / "a.parquet", as_parquet([("0", b"bad", "a"), ("1", b"bad", "b")]))
    rows, tally = read(path, "text", bad_rows="skip")
    assert rows == []
    assert tally.bad == {"a column missing or not text": 2}


def test_a_quote_that_is_never_closed_is_a_bad_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'text,label\ngood,a\n"bad,a\nlost,b\n')
    rows, tally = read(path, "text", bad_rows="skip")
    assert rows == [(0, ("good",))]
    assert tally.bad == {"not CSV (unexpected end of data)": 1}


@pytest.mark.parametrize("suffix", [".tsv", ".csv"])
def test_a_label_that_is_missing_is_not_a_label(suffix: str, tmp_path: Path) -> None:
    form = as_tsv if suffix == ".tsv" else as_csv
    path = written(tmp_path / f"a{suffix}", form([("text", "label"), ("one", "a"), ("two", " "), (" ", "a")]))
    rows, tally = read(path, "text", "label", bad_rows="skip", valued=True)
    assert rows == [(0, ("one", "a"))]
    assert tally.bad == {"no label or score": 1, "no text": 1}


# ---------------------------------------------------------------------------------------------------- files and columns


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_missing_column_is_named_with_those_there_are(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"rows{suffix}", FORMATS[suffix](TABLE))
    with pytest.raises(DataError, match=r"txet|a column missing") as refused:
        read(path, "txet")
    assert str(path) in str(refused.value)
    if suffix != ".jsonl":  # whose rows have each their own keys
        assert "must have one column 'txet', got ['id', 'text', 'label']" in str(refused.value)


@pytest.mark.parametrize("suffix", [".tsv", ".csv"])
def test_a_column_that_is_there_twice_is_refused(suffix: str, tmp_path: Path) -> None:
    form = as_tsv if suffix == ".tsv" else as_csv
    path = written(tmp_path / f"rows{suffix}", form([("text", "text", "label"), ("one", "two", "a")]))
    with pytest.raises(DataError, match="must have one column 'text', got"):
        read(path, "text")
    assert read(path, "label")[0] == [(0, ("a",))]


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".tsv.gz"])
def test_an_empty_table_lacks_its_columns(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"rows{suffix}", b"")
    with pytest.raises(DataError, match=r"must have one column 'text', got \[\]"):
        read(path, "text")


@pytest.mark.parametrize("name", ["rows.txt", "rows.jsonl", "rows.txt.gz", "rows.jsonl.xz"])
def test_an_empty_file_has_no_rows(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / name, b"")
    rows, tally = read(path, *["text"] * ("jsonl" in name))
    assert rows == []
    assert tally == Tally()


def test_a_header_that_is_no_csv_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv must begin with the names of its columns, got what is not CSV"):
        read(written(tmp_path / "a.csv", '"te"xt,label\none,a\n'), "text")


@pytest.mark.parametrize("name", ["gone.txt", "gone.tsv", "gone.csv.gz", "gone.jsonl.xz", "gone.parquet"])
def test_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{name} cannot be read: .*No such file.*--data"):
        read(tmp_path / name, *["text"] * (".txt" not in name))


def test_a_directory_is_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(DataError, match=r"a\.txt cannot be read: .*directory"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize(
    "name", ["notes", "notes.md", "notes.txt.bz2", "notes.gz", "notes.TXT", "notes.txt.old", "notes.json"]
)
def test_an_unknown_suffix_is_refused_with_those_that_are_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refused:
        read(written(tmp_path / name, "text"), "text")
    assert str(refused.value) == (
        f"a corpus must end in .txt, .jsonl, .tsv, .csv, .parquet, perhaps with .gz or .xz; got {name}"
    )


@pytest.mark.parametrize("suffix", FORMATS)
def test_columns_must_be_named(suffix: str, tmp_path: Path) -> None:
    path = written(tmp_path / f"rows{suffix}", FORMATS[suffix](TABLE))
    with pytest.raises(DataError, match=f"columns must be named for rows{suffix}"):
        read(path)


@pytest.mark.parametrize("settings", [{"columns": ["text"]}, {"where": {"label": ["a"]}}])
def test_a_txt_has_no_columns(settings: dict[str, Any], tmp_path: Path) -> None:
    corpus = Corpus(path="notes.txt", **settings)
    with pytest.raises(DataError, match=r"notes\.txt has no columns, got \['(text|label)'\]; name none"):
        Rows(corpus, tmp_path, bad_rows="skip", tally=Tally())


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "not packed": lambda packed: b"just text" + packed,
    "cut": lambda packed: packed[: len(packed) // 2],
    "one byte is another": lambda packed: packed[:50] + bytes([packed[50] ^ 0xFF]) + packed[51:],
    "its end is another": lambda packed: packed[:-6] + bytes([packed[-6] ^ 0xFF]) + packed[-5:],
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("packed", [".gz", ".xz"])
@pytest.mark.parametrize("suffix", [".txt", ".csv", ".parquet"])
def test_a_damaged_archive_is_named(suffix: str, packed: str, damage: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(5000).hex()
    table = FORMATS[suffix]([("0", noise, "a")]) if suffix != ".txt" else noise
    path = written(tmp_path / f"rows{suffix}{packed}", table)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(DataError) as refused:
        read(path, *["text"] * (suffix != ".txt"), bad_rows="skip")
    assert str(refused.value).startswith(f"{path} ")


@pytest.mark.parametrize("damage", ["not packed", "cut"])
def test_a_damaged_parquet_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(DAMAGE[damage](as_parquet(TABLE)))
    with pytest.raises(DataError, match=r"rows\.parquet (is no whole Parquet file|cannot be read): "):
        read(path, "text")


# ------------------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("suffix", [".tsv.gz", ".jsonl"])
def test_a_corpus_of_50_megabytes_is_never_in_memory(suffix: str, tmp_path: Path) -> None:
    line = "words and words " * 1600  # 25.6 kB
    content = as_jsonl([("0", line, "a")] * 2048) if suffix == ".jsonl" else "text\n" + f"{line}\n" * 2048
    path = written(tmp_path / f"large{suffix}", content)
    rows = Rows(Corpus(path=path.name, columns=("text",)), tmp_path, bad_rows="refuse", tally=Tally())
    tracemalloc.start()
    try:
        characters = sum(len(texts[0]) for _, texts in rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert characters == 2048 * 25_600 > 50e6
    assert peak < 2e6


def test_rows_come_one_by_one(tmp_path: Path) -> None:
    """Of a file that breaks off in the middle, everything before comes out first."""
    text = "".join(f"line {number} {hashlib.sha256(b'%d' % number).hexdigest()}\n" for number in range(20_000))
    path = written(tmp_path / "a.txt.gz", text)
    path.write_bytes(path.read_bytes()[:-100_000])
    tally = Tally()
    rows = iter(Rows(Corpus(path="a.txt.gz"), tmp_path, bad_rows="refuse", tally=tally))
    assert [next(rows)[0] for _ in range(1000)] == list(range(1000))
    assert tally.read == 1000
    with pytest.raises(DataError, match=r"a\.txt\.gz cannot be read"):
        list(rows)
    assert 10_000 < tally.read < 20_000


# ----------------------------------------------------------------------------------------------------- hashes and parts


def digest(normalized: str) -> int:
    return int.from_bytes(hashlib.blake2b(normalized.encode(), digest_size=8).digest(), "little")


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("Pizza is great.", "pizza is great"),
        ("  pizza\tIS -- great!?\n", "pizza is great"),
        ("snake_case and 3.5", "snake case and 3 5"),
        ("ﬁne ＡＢＣ ²", "fine abc 2"),
        ("Ünïcode GRÖSSE", "ünïcode grösse"),
        ("Cafe\u0301", "café"),
        ("...", ""),
        ("", ""),
        ("日本語。", "日本語"),
    ],
)
def test_the_hash_is_that_of_the_normalised_text(text: str, normalized: str) -> None:
    assert text_hash(text) == digest(normalized)


def test_hashes_are_the_same_for_ever() -> None:
    """Lists of evaluation sentences hold them, so these may never change. Computed with the coreutils: b2sum -l 64."""
    assert text_hash("Pizza is great!") == int.from_bytes(bytes.fromhex("df2df8b36fc6427f"), "little")
    assert text_hash("!?") == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little")


@given(st.text(max_size=50))
def test_case_punctuation_and_space_do_not_change_the_hash(text: str) -> None:
    assert text_hash(f" {text}!\n") == text_hash(text) == text_hash(text.replace(" ", " - "))


@pytest.mark.parametrize("suffix", [".txt", ".tsv", ".jsonl", ".parquet"])
def test_train_and_heldout_are_nine_tenths_and_a_tenth_without_a_common_row(suffix: str, tmp_path: Path) -> None:
    table = [(str(number), f"This is text {number}", "a") for number in range(2000)]
    content = "".join(f"{text}\n" for _, text, _ in table) if suffix == ".txt" else FORMATS[suffix](table)
    path = written(tmp_path / f"rows{suffix}", content)
    columns = [] if suffix == ".txt" else ["text"]
    parts = {part: dict(read(path, *columns, part=part)[0]) for part in ("all", "train", "heldout")}
    assert parts["train"].keys().isdisjoint(parts["heldout"])
    assert parts["train"] | parts["heldout"] == parts["all"]
    assert parts["heldout"] == {row: texts for row, texts in parts["all"].items() if digest(texts[0].lower()) % 10 == 0}
    assert 150 < len(parts["heldout"]) < 250
    assert parts["heldout"] == dict(read(path, *columns, part="heldout")[0])


def test_the_same_text_in_other_letters_is_in_the_same_part() -> None:
    texts = [f"text number {number}" for number in range(300)]
    assert [is_heldout(text) for text in texts] == [is_heldout(f"{text.upper()}!") for text in texts]
    assert {is_heldout(text) for text in texts} == {True, False}


@pytest.mark.parametrize("part", ["train", "heldout"])
def test_blank_lines_part_documents_in_either_part(part: str, tmp_path: Path) -> None:
    path = written(tmp_path / "a.txt", "\n\n".join(f"line {number}" for number in range(100)))
    rows, _ = read(path, part=part)
    assert [number for number, texts in rows if not texts[0]] == list(range(1, 199, 2))


# ------------------------------------------------------------------------------------------------- evaluation sentences


def list_of(path: Path, *texts: str) -> Path:
    np.array(sorted(text_hash(text) for text in texts), dtype="<u8").tofile(path)
    return path


def test_evaluation_sentences_are_known_alone_and_within_a_text(tmp_path: Path) -> None:
    known = Decontaminator(list_of(tmp_path / "decontam.u64", "A man plays a guitar.", "One. Two.", "Short"))
    assert known.hits("A man plays a guitar.")
    assert known.hits("a MAN plays -- a guitar")
    assert known.hits("It rains. A man plays a guitar! He sings.")
    assert known.hits("One. Two.")
    assert not known.hits("One. Two. Three.")  # neither the text nor a sentence of it
    assert not known.hits("A man plays a guitar and sings.")
    assert not known.hits("")


def test_a_text_is_cleaned_of_evaluation_sentences(tmp_path: Path) -> None:
    known = Decontaminator(list_of(tmp_path / "decontam.u64", "A man plays a guitar.", "One. Two."))
    assert known.clean("It rains.  A man plays a guitar! He sings.") == "It rains. He sings."
    assert known.clean("It rains.  He sings.") == "It rains.  He sings."
    assert known.clean("a man plays a guitar") == ""
    assert known.clean("One. Two.") == ""
    assert known.clean("A man plays a guitar. A man plays a guitar.") == ""


def test_without_a_list_nothing_is_known() -> None:
    known = Decontaminator(None)
    assert not known.hits("")
    assert known.clean("A man. Plays.") == "A man. Plays."


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"", "must hold sorted hashes of 8 bytes each, got 0 bytes"),
        (b"12345678123", "must hold sorted hashes of 8 bytes each, got 11 bytes"),
        (np.array([2, 1], dtype="<u8").tobytes(), "must hold sorted hashes of 8 bytes each, got 16 bytes"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_list_that_is_none_is_refused(content: bytes | None, rule: str, tmp_path: Path) -> None:
    """Or everything that is measured might have been trained on."""
    path = tmp_path / "decontam.u64"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"decontam.u64 {rule}"):
        Decontaminator(path)


# ------------------------------------------------------------------------------------------------------------ sentences


@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Mr. Li met Dr. A. Jones, e.g. Here. He left.", ["Mr. Li met Dr. A. Jones, e.g. Here.", "He left."]),
        ("Prof. Who? See Fig. 3.", ["Prof. Who?", "See Fig. 3."]),
        ('He said "Stop." She left.', ['He said "Stop."', "She left."]),
        ("(All of it.) “Really?” Yes.", ["(All of it.)", "“Really?”", "Yes."]),
        ("It costs 3.5 euros. 20 of them.", ["It costs 3.5 euros.", "20 of them."]),
        ("no capital. follows", ["no capital. follows"]),
        ("See Dr.\n\nNext", ["See Dr.\n\nNext"]),
        ("  One.  \n Two.  ", ["One.", "Two."]),
        ("", []),
        (" \n ", []),
    ],
)
def test_texts_are_cut_at_the_ends_of_sentences(text: str, cut: list[str]) -> None:
    assert sentences(text) == cut


@given(st.text(alphabet="Ab.!? \n\"'(Dr", max_size=60))
def test_cutting_loses_nothing_but_white_space(text: str) -> None:
    cut = sentences(text)
    assert "".join("".join(cut).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in cut)
    places = [0]
    for sentence in cut:
        places.append(text.index(sentence, places[-1]) + len(sentence))
    assert all(first < second for first, second in pairwise(places))


def test_a_text_of_abbreviations_is_cut_in_time() -> None:
    """The search for an abbreviation must not begin anew at the text's beginning: that took a minute."""
    began = time.process_time()
    assert sentences("A. " * 30_000) == [("A. " * 30_000).strip()]
    assert time.process_time() - began < 10
