"""Corpora → the texts that are trained on: cut, cleaned of evaluation sentences, each once."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.config import Data, RunError
from training.data import Corpus, Decontaminator, Rows, Tally, sentences, text_hash


@dataclass(frozen=True, slots=True)
class Item:
    """What is trained on at once: one text, or the two of a pair, perhaps with a label or a score."""

    texts: tuple[str, ...]
    value: str
    """The label or score; empty if there is none."""
    corpus: int
    row: int
    """Number of the row in its file."""


class Source:
    """Reads corpora, counting in `tallies` (one for each corpus begun) what it drops.

    Args:
        corpora: Read in this order.
        root: What their paths are relative to.
        data: Settings.
        sides: Texts of an item. With 1 each column is an item by itself.
        valued: Whether a label or score follows the texts in the last column.

    Raises:
        RunError: A corpus has other columns than its items need.
        DataError: The format of a corpus, or the list of evaluation sentences, cannot be read.
    """

    def __init__(
        self, corpora: Sequence[Corpus], root: Path, data: Data, *, sides: int = 1, valued: bool = False
    ) -> None:
        self.corpora = corpora
        self.tallies: list[Tally] = []
        self._root, self._data, self._sides, self._valued = root, data, sides, valued
        path = data.decontaminate
        self._decontaminator = Decontaminator(None if path is None else root / path)
        self._seen: set[int] = set()
        for corpus in corpora:
            wanted = sides + valued
            Rows(corpus, root, bad_rows=data.bad_rows, tally=Tally())  # refuses now what it would after hours
            if len(corpus.columns) != wanted and (sides > 1 or valued):
                what = f"{sides} text{'s' * (sides > 1)}{' and a label or score' * valued}"
                raise RunError(f"columns of {corpus.path} must be {what}, got {list(corpus.columns)}")
            if sides > 1 and corpus.split != "whole":
                raise RunError(f'split of {corpus.path} must be "whole", since its texts are pairs')

    def __iter__(self) -> Iterator[Item]:
        """Give the items, each once."""
        for number, corpus in enumerate(self.corpora):
            self.tallies.append(tally := Tally())
            for row, columns in self._rows(corpus, tally):
                texts, value = (columns[:-1], columns[-1]) if self._valued else (columns, "")
                for item in self._cut(corpus, texts):
                    if self._keeps(corpus, item, tally) and not self._contaminated(item, tally):
                        tally.kept += 1
                        yield Item(item, value, number, row)

    def documents(self) -> Iterator[Item]:
        """Give whole documents, less their evaluation sentences. In a .txt a blank line stands between two.

        Raises:
            RunError: A corpus is to be cut into sentences.
        """
        if cut := [corpus.path for corpus in self.corpora if corpus.split != "whole"]:
            raise RunError(f'split of {cut[0]} must be "whole", since whole documents are read')
        for number, corpus in enumerate(self.corpora):
            self.tallies.append(tally := Tally())
            for row, paragraphs in self._paragraphs(corpus, tally):
                cleaned = list(filter(None, map(self._decontaminator.clean, paragraphs)))
                tally.contaminated += cleaned != list(filter(None, paragraphs))
                document = ("\n".join(cleaned),)
                if cleaned and self._keeps(corpus, document, tally):
                    tally.kept += 1
                    yield Item(document, "", number, row)

    def _paragraphs(self, corpus: Corpus, tally: Tally) -> Iterator[tuple[int, Sequence[str]]]:
        """Give the paragraphs of each document, and the row it ends at."""
        document: list[str] = []
        for row, columns in self._rows(corpus, tally):
            if corpus.format != ".txt":
                yield row, columns
            elif columns[0].strip():
                document.append(columns[0])
            elif document:
                yield row, document
                document = []
        if document:
            yield tally.read, document

    def _rows(self, corpus: Corpus, tally: Tally) -> Rows:
        return Rows(corpus, self._root, bad_rows=self._data.bad_rows, tally=tally, valued=self._valued)

    def _cut(self, corpus: Corpus, texts: tuple[str, ...]) -> Iterable[tuple[str, ...]]:
        if corpus.split == "sentences":
            return [(sentence,) for text in texts for sentence in sentences(text)]
        return [(text,) for text in texts if text.strip()] if self._sides == 1 else [texts]

    def _keeps(self, corpus: Corpus, texts: tuple[str, ...], tally: Tally) -> bool:
        key = text_hash("\n".join(texts))
        sizes = [len(text) for text in texts]
        if (
            not all(text.strip() for text in texts)
            or min(sizes) < corpus.min_chars
            or max(sizes) > corpus.max_chars
            or key % 2**32 >= corpus.share * 2**32
        ):
            tally.passed_over += 1
            return False
        if self._data.deduplicate:
            if key in self._seen:
                tally.duplicates += 1
                return False
            self._seen.add(key)
        return True

    def _contaminated(self, texts: tuple[str, ...], tally: Tally) -> bool:
        hit = any(map(self._decontaminator.hits, texts))
        tally.contaminated += hit
        return hit
