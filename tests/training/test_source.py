"""Corpora as the texts that are trained on: cut, cleaned, each once, and counted."""

import json
import logging
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.config import Data, RunError
from training.data import Corpus, DataError, text_hash
from training.source import Item, Source
from training.store import report


def write(path: Path, *lines: str) -> Corpus:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return Corpus(path=path.name)


def table(path: Path, *rows: Sequence[str], **settings: Any) -> Corpus:
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return Corpus(path=path.name, **{"columns": tuple(rows[0]), **settings})


def texts(source: Source) -> list[tuple[str, ...]]:
    return [item.texts for item in source]


def decontamination(path: Path, *known: str) -> str:
    np.array(sorted(text_hash(text) for text in known), dtype="<u8").tofile(path)
    return path.name


# ------------------------------------------------------------------------------------------------------ texts and pairs


def test_each_column_of_a_row_is_a_text_by_itself(tmp_path: Path) -> None:
    first = write(tmp_path / "a.txt", "One.", "", "Two. Three.")
    second = table(tmp_path / "b.tsv", ("title", "body"), ("Four", "Five"), ("Six", " "), ("", "Seven"))
    source = Source([first, second], tmp_path, Data())
    assert list(source) == [
        Item(("One.",), "", 0, 0),
        Item(("Two. Three.",), "", 0, 2),
        Item(("Four",), "", 1, 0),
        Item(("Five",), "", 1, 0),
        Item(("Six",), "", 1, 1),
        Item(("Seven",), "", 1, 2),
    ]
    assert [(tally.read, tally.kept) for tally in source.tallies] == [(3, 2), (3, 4)]


def test_pairs_and_their_scores_stay_together(tmp_path: Path) -> None:
    rows = [("a", "score", "b"), ("One", "0.5", "Two"), ("Three", "1", " "), ("Four", "0", "Five")]
    corpus = table(tmp_path / "a.tsv", *rows, columns=("b", "a", "score"))
    source = Source([corpus], tmp_path, Data(), sides=2, valued=True)
    assert list(source) == [Item(("Two", "One"), "0.5", 0, 0), Item(("Five", "Four"), "0", 0, 2)]
    assert (source.tallies[0].read, source.tallies[0].kept, source.tallies[0].passed_over) == (3, 2, 1)


def test_a_row_without_a_label_is_bad(tmp_path: Path) -> None:
    corpus = table(tmp_path / "a.tsv", ("text", "label"), ("One", "a"), ("Two", ""), ("Three", "b"))
    source = Source([corpus], tmp_path, Data(), valued=True)
    assert [(item.texts, item.value, item.row) for item in source] == [(("One",), "a", 0), (("Three",), "b", 2)]
    assert source.tallies[0].bad == {"no label or score": 1}
    with pytest.raises(DataError, match=r"a\.tsv, row 1 .*no label or score"):
        list(Source([corpus], tmp_path, Data(bad_rows="refuse"), valued=True))


@pytest.mark.parametrize(
    ("columns", "sides", "valued", "rule"),
    [
        (("a",), 2, False, "2 texts"),
        (("a", "b", "c"), 2, False, "2 texts"),
        (("a", "b"), 2, True, "2 texts and a label or score"),
        (("a",), 1, True, "1 text and a label or score"),
        (("a", "b", "c"), 1, True, "1 text and a label or score"),
    ],
)
def test_a_wrong_number_of_columns_is_refused_before_anything_is_read(
    columns: tuple[str, ...], sides: int, valued: bool, rule: str, tmp_path: Path
) -> None:
    corpora = [Corpus(path="good.tsv", columns=("x", "y", "z")[: sides + valued])]
    corpora.append(Corpus(path="rows.tsv", columns=columns))
    with pytest.raises(RunError) as refused:
        Source(corpora, tmp_path, Data(), sides=sides, valued=valued)
    assert str(refused.value) == f"columns of rows.tsv must be {rule}, got {list(columns)}"


@pytest.mark.parametrize(
    ("corpus", "rule"),
    [
        (Corpus(path="notes.doc"), "must end in .*got notes.doc"),
        (Corpus(path="rows.tsv"), "columns must be named for rows.tsv"),
        (Corpus(path="notes.txt", columns=("text",)), "notes.txt has no columns"),
    ],
)
def test_the_last_corpus_is_refused_before_the_first_is_read(corpus: Corpus, rule: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rule):
        Source([Corpus(path="good.txt"), corpus], tmp_path, Data())


def test_pairs_are_not_cut_into_sentences(tmp_path: Path) -> None:
    corpus = Corpus(path="a.tsv", columns=("a", "b"), split="sentences")
    with pytest.raises(RunError, match=r'split of a\.tsv must be "whole", since its texts are pairs'):
        Source([corpus], tmp_path, Data(), sides=2)


# -------------------------------------------------------------------------------------------------- cut and passed over


def test_texts_are_cut_into_sentences_each_with_the_rows_label(tmp_path: Path) -> None:
    rows = [("text", "label"), ("One. Two!  Three", "a"), ("Four.", "b")]
    corpus = table(tmp_path / "a.tsv", *rows, split="sentences")
    items = list(Source([corpus], tmp_path, Data(), valued=True))
    assert [(item.texts[0], item.value, item.row) for item in items] == [
        ("One.", "a", 0),
        ("Two!", "a", 0),
        ("Three", "a", 0),
        ("Four.", "b", 1),
    ]


def test_shorter_and_longer_texts_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", *("abcdefgh"[:size] for size in range(1, 9)))
    corpus = Corpus(path="a.txt", min_chars=3, max_chars=5)
    source = Source([corpus], tmp_path, Data())
    assert texts(source) == [("abc",), ("abcd",), ("abcde",)]
    assert source.tallies[0].passed_over == 5


def test_the_bounds_hold_for_sentences_and_for_both_of_a_pair(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "A long sentence here. No. Another sentence there.")
    cut = Corpus(path="a.txt", min_chars=5, split="sentences")
    assert texts(Source([cut], tmp_path, Data())) == [("A long sentence here.",), ("No. Another sentence there.",)]
    rows = [("a", "b"), ("long", "x"), ("y", "long"), ("long", "long too"), ("long", "too long!")]
    pairs = table(tmp_path / "b.tsv", *rows, min_chars=2, max_chars=8)
    assert texts(Source([pairs], tmp_path, Data(), sides=2)) == [("long", "long too")]


def test_a_share_is_the_same_texts_each_time_and_grows_with_it(tmp_path: Path) -> None:
    lines = [f"this is the text {number}" for number in range(2000)]
    write(tmp_path / "a.txt", *lines)
    write(tmp_path / "b.txt", *(line.upper() for line in reversed(lines)))

    def kept(name: str, share: float) -> set[str]:
        source = Source([Corpus(path=name, share=share)], tmp_path, Data())
        found = {text.lower() for (text,) in texts(source)}
        assert source.tallies[0].passed_over == 2000 - len(found)
        return found

    third = kept("a.txt", 0.3)
    assert 0.27 < len(third) / 2000 < 0.33
    assert third == kept("a.txt", 0.3) == kept("b.txt", 0.3)
    assert third < kept("a.txt", 0.6) < set(lines)
    assert third == {line for line in lines if text_hash(line) % 2**32 < 0.3 * 2**32}
    assert kept("a.txt", 1) == set(lines)


def test_train_and_heldout_are_disjoint_also_after_cutting(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", *(f"Text {number} begins. Text {number} ends." for number in range(500)))
    parts = {
        part: set(texts(Source([Corpus(path="a.txt", part=part, split="sentences")], tmp_path, Data())))
        for part in ("all", "train", "heldout")
    }
    assert len(parts["all"]) == 1000
    assert parts["train"] | parts["heldout"] == parts["all"]
    assert not parts["train"] & parts["heldout"]
    assert 40 < len(parts["heldout"]) < 160


# ----------------------------------------------------------------------------------------------------------- duplicates


def test_a_text_is_kept_once_whatever_its_case_and_punctuation_and_file(tmp_path: Path) -> None:
    first = write(tmp_path / "a.txt", "Pizza is great.", "pizza -- is GREAT", "Pizza is good.")
    second = write(tmp_path / "b.txt", "Pizza is great", "Pizza is bad.")
    source = Source([first, second], tmp_path, Data())
    assert texts(source) == [("Pizza is great.",), ("Pizza is good.",), ("Pizza is bad.",)]
    assert [(tally.kept, tally.duplicates) for tally in source.tallies] == [(2, 1), (1, 1)]


def test_duplicates_stay_if_they_are_wanted(tmp_path: Path) -> None:
    source = Source([write(tmp_path / "a.txt", "One.", "One.", "one")], tmp_path, Data(deduplicate=False))
    assert texts(source) == [("One.",), ("One.",), ("one",)]
    assert source.tallies[0].duplicates == 0


def test_pairs_are_duplicates_only_as_a_whole_and_in_order(tmp_path: Path) -> None:
    rows = [("a", "b"), ("One", "Two"), ("One", "Three"), ("Two", "One"), ("ONE", "two!")]
    source = Source([table(tmp_path / "a.tsv", *rows)], tmp_path, Data(), sides=2)
    assert texts(source) == [("One", "Two"), ("One", "Three"), ("Two", "One")]
    assert source.tallies[0].duplicates == 1


@pytest.mark.parametrize(("copies", "alarm"), [(2, False), (3, True)])
def test_many_duplicates_raise_an_alarm(
    copies: int, alarm: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2 of 4 are half, which is not more than half; 3 of 5 are."""
    corpus = write(tmp_path / "a.txt", "One.", "Two.", *["one"] * copies)
    data = Data(most_duplicates=0.5)
    source = Source([corpus], tmp_path, data)
    list(source)
    with caplog.at_level(logging.INFO):
        report(source, data, what="pretraining")
    assert f"pretraining: a.txt: {2 + copies} rows, 2 texts kept, {copies} duplicates" in caplog.messages
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == alarm
    if alarm:
        assert "3 of 5 texts of a.txt are duplicates" in warned[0]
        assert "data.most_duplicates" in warned[0]


# ------------------------------------------------------------------------------------------------- evaluation sentences


def test_texts_that_hold_an_evaluation_sentence_are_dropped(tmp_path: Path) -> None:
    known = decontamination(tmp_path / "decontam.u64", "A man plays a guitar.", "It rains. He sings.")
    corpus = write(
        tmp_path / "a.txt",
        "a man PLAYS a guitar",
        "It is late. A man plays a guitar! He sings.",
        "It rains. He sings.",
        "A man plays a guitar and sings.",
    )
    source = Source([corpus], tmp_path, Data(decontaminate=known))
    assert texts(source) == [("A man plays a guitar and sings.",)]
    assert (source.tallies[0].contaminated, source.tallies[0].kept) == (3, 1)


def test_of_a_text_that_is_cut_only_the_evaluation_sentence_is_dropped(tmp_path: Path) -> None:
    known = decontamination(tmp_path / "decontam.u64", "A man plays a guitar.")
    write(tmp_path / "a.txt", "It is late. A man plays a guitar! He sings.")
    source = Source([Corpus(path="a.txt", split="sentences")], tmp_path, Data(decontaminate=known))
    assert texts(source) == [("It is late.",), ("He sings.",)]
    assert source.tallies[0].contaminated == 1


@pytest.mark.parametrize("row", [("A man plays a guitar.", "One"), ("Two", "Hi. A man plays a guitar.")])
def test_a_pair_is_dropped_for_either_of_its_texts(row: tuple[str, str], tmp_path: Path) -> None:
    known = decontamination(tmp_path / "decontam.u64", "A man plays a guitar.")
    corpus = table(tmp_path / "a.tsv", ("a", "b"), row, ("Three", "Four"))
    source = Source([corpus], tmp_path, Data(decontaminate=known), sides=2)
    assert texts(source) == [("Three", "Four")]
    assert source.tallies[0].contaminated == 1


def test_a_missing_list_of_evaluation_sentences_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"decontam\.u64 cannot be read: No such file or directory; is --data right"):
        Source([Corpus(path="a.txt")], tmp_path, Data(decontaminate="decontam.u64"))


# ------------------------------------------------------------------------------------------------------------ documents


def test_a_blank_line_parts_documents(tmp_path: Path) -> None:
    corpus = write(tmp_path / "a.txt", "", "One.", "Two.", "", " ", "Three.", "", "", "Four.", "Five.")
    source = Source([corpus], tmp_path, Data())
    assert list(source.documents()) == [
        Item(("One.\nTwo.",), "", 0, 3),
        Item(("Three.",), "", 0, 6),
        Item(("Four.\nFive.",), "", 0, 10),
    ]
    assert (source.tallies[0].read, source.tallies[0].kept) == (10, 3)


def test_in_other_formats_a_row_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"t": t, "b": b}) + "\n" for t, b in (("One", "Two\n\nThree"), ("", "Four"))))
    source = Source([Corpus(path="a.jsonl", columns=("t", "b"))], tmp_path, Data())
    assert [item.texts for item in source.documents()] == [("One\nTwo\n\nThree",), ("Four",)]
    assert source.tallies[0].contaminated == 0


def test_documents_lose_their_evaluation_sentences_and_no_more(tmp_path: Path) -> None:
    known = decontamination(tmp_path / "decontam.u64", "A man plays a guitar.")
    corpus = write(
        tmp_path / "a.txt",
        *("It is late. A man plays a guitar! He sings.", "It rains.", ""),
        *("A man plays a guitar.", ""),
        *("Nothing is wrong here.", ""),
        *("It snows.", "A man plays a guitar.", "It is cold."),
    )
    source = Source([corpus], tmp_path, Data(decontaminate=known))
    assert [item.texts[0] for item in source.documents()] == [
        "It is late. He sings.\nIt rains.",
        "Nothing is wrong here.",
        "It snows.\nIt is cold.",
    ]
    assert (source.tallies[0].contaminated, source.tallies[0].kept) == (3, 3)


def test_documents_are_kept_once_and_within_bounds(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "One two.", "Three.", "", "one TWO", "three", "", "Four.", "", "Five.", "S" * 50)
    source = Source([Corpus(path="a.txt", min_chars=6, max_chars=30)], tmp_path, Data())
    assert [item.texts for item in source.documents()] == [("One two.\nThree.",)]
    assert (source.tallies[0].duplicates, source.tallies[0].passed_over) == (1, 2)


def test_documents_of_a_part_stay_apart(tmp_path: Path) -> None:
    """A document is what is left of it in this part; two never become one."""
    write(tmp_path / "a.txt", *(line for number in range(200) for line in (f"line {number}", f"more {number}", "")))
    found = {
        part: [item.texts[0] for item in Source([Corpus(path="a.txt", part=part)], tmp_path, Data()).documents()]
        for part in ("train", "heldout")
    }
    for document in found["train"] + found["heldout"]:
        numbers = {line.split()[1] for line in document.split("\n")}
        assert len(numbers) == 1
    lines = sorted("\n".join(found["train"] + found["heldout"]).split("\n"))
    assert lines == sorted(line for number in range(200) for line in (f"line {number}", f"more {number}"))


def test_whole_documents_are_not_cut_into_sentences(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "One. Two.")
    source = Source([Corpus(path="a.txt", split="sentences")], tmp_path, Data())
    with pytest.raises(RunError, match=r'split of a\.txt must be "whole", since whole documents are read'):
        list(source.documents())


# ------------------------------------------------------------------------------------------------------------ streaming


@pytest.mark.parametrize("documents", [False, True])
def test_texts_are_read_as_they_are_asked_for(documents: bool, tmp_path: Path) -> None:
    """The second corpus does not even exist."""
    first = write(tmp_path / "a.txt", *(line for number in range(1000) for line in (f"text {number}", "")))
    source = Source([first, Corpus(path="gone.txt")], tmp_path, Data())
    items = iter(source.documents() if documents else source)
    assert [item.texts[0] for item in islice(items, 3)] == ["text 0", "text 1", "text 2"]
    assert source.tallies[0].read <= 6
    assert len(source.tallies) == 1
    with pytest.raises(DataError, match=r"gone\.txt cannot be read"):
        list(items)
    assert source.tallies[0].read == 2000
