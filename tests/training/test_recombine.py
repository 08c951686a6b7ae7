"""New sentences from old ones: new, each once, of known parts, and the same each time."""

import re
from collections.abc import Callable
from itertools import islice

import pytest

from training.data import DataError
from training.recombine import recombine

TEXTS = [
    "A man is riding a bike through the snow.",
    "Two dogs are running on the beach",
    "the woman is slicing an onion in the kitchen .",
    "Children are playing a game near a fountain.",
    "No verb of that kind here.",
    "A cat is asleep",
]
SUBJECTS = {"is": {"a man", "the woman", "a cat"}, "are": {"two dogs", "children"}}
HEADS = {"riding a bike", "running", "slicing an onion", "playing a game", "asleep"}
ENDINGS = {"through the snow", "on the beach", "in the kitchen", "near a fountain"}
PREDICATES = {
    "riding a bike through the snow",
    "running on the beach",
    "slicing an onion in the kitchen",
    "playing a game near a fountain",
    "asleep",
}


def test_each_new_sentence_is_of_known_parts_in_a_known_form() -> None:
    made = list(recombine(TEXTS, count=61, seed=0))
    assert len(made) == len(set(made)) == 61
    known = {text.lower().rstrip(" .") for text in TEXTS}
    parted = PREDICATES | {f"{head} {ending}" for head in HEADS for ending in ENDINGS}
    forms = {"plain": 0, "not": 0, "no": 0, "there": 0}
    for sentence in made:
        assert sentence not in known
        if found := re.fullmatch(r"there (is|are) no (.+)", sentence):
            form = "no"
            subjects = {re.sub("^(a|the) ", "", subject) for subject in SUBJECTS[found[1]]}
        elif found := re.fullmatch(r"there (is|are) (.+)", sentence):
            form, subjects = "there", SUBJECTS[found[1]]
        else:
            found = re.fullmatch(r"(?:.+?) (is|are) (?:.+)", sentence)
            assert found is not None
            form, subjects = "plain", SUBJECTS[found[1]]
            assert any(sentence.startswith(f"{subject} {found[1]} ") for subject in subjects)
            rest = sentence.split(f" {found[1]} ", 1)[1]
            if rest.startswith("not "):
                form, rest = "not", rest[4:]
            assert rest in parted
        forms[form] += 1
        if form in ("no", "there"):
            assert any(f"{subject} {predicate}" == found[2] for subject in subjects for predicate in parted)
    assert all(forms.values())
    assert forms["plain"] > 61 / 2


def test_the_seed_decides() -> None:
    first, again, other = (list(recombine(TEXTS, count=50, seed=seed)) for seed in (3, 3, 5))
    assert first == again != other
    assert list(recombine([*reversed(TEXTS), *TEXTS], count=50, seed=3)) == first


def test_the_same_in_every_process(run_python: Callable[[str], str]) -> None:
    code = f"from training.recombine import recombine; print(list(recombine({TEXTS!r}, count=20, seed=3)))"
    assert run_python(code) == run_python(code) == str(list(recombine(TEXTS, count=20, seed=3)))


def test_fewer_are_made_where_there_are_not_so_many() -> None:
    """One sentence: its negations are the only new ones."""
    made = set(recombine(["A man is asleep here."], count=1000, seed=0))
    assert made == {"a man is not asleep here", "there is no man asleep here", "there is a man asleep here"}
    assert list(recombine(TEXTS, count=0, seed=0)) == []


def test_texts_come_one_by_one() -> None:
    assert len(list(islice(recombine(TEXTS, count=10**9, seed=0), 3))) == 3


@pytest.mark.parametrize("texts", [[], ["Nothing to exchange"], ["It is x"]])
def test_texts_without_such_sentences_are_refused(texts: list[str]) -> None:
    with pytest.raises(DataError, match="must hold sentences with 'is' or 'are' to be recombined, got none"):
        next(recombine(texts, count=5, seed=0))
