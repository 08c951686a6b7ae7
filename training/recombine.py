"""New sentences from old ones, by exchanging subjects, predicates and endings: cheap text of a kind that is rare.

Of plain descriptions ("a man is riding a bike through the snow") there are few that may be trained on. A teacher needs
no true sentences, only such as differ in the ways that matter: who, what, where, and whether at all.
"""

import random
import re
from collections.abc import Iterable, Iterator

from training.data import DataError

_VERB = re.compile(r"^(.{3,60}?) (is|are) (.{4,90})$")
_ENDING = re.compile(r"^(.{8,}) ((?:in|on|at|near|with|through|by|under|over|down|outside|behind|for) .{4,40})$")
_ARTICLE = re.compile(r"^(?:a|an|the) ")
_NEGATED = 0.08
_EXISTS = 0.08
_WHOLE_PREDICATE = 0.6


def recombine(texts: Iterable[str], *, count: int, seed: int) -> Iterator[str]:
    """Give new sentences of the form subject, "is" or "are", predicate; each once, none that was given.

    Args:
        texts: Sentences; those of another form are passed over.
        count: How many to make; fewer if so many different ones cannot be made.
        seed: Decides which.

    Raises:
        DataError: No text has that form.
    """
    given = {text.strip().rstrip(" .").lower() for text in texts}
    parsed = [match.groups() for match in map(_VERB.match, sorted(given)) if match]
    if not parsed:
        raise DataError("the texts must hold sentences with 'is' or 'are' to be recombined, got none")
    subjects = {verb: sorted({subject for subject, other, _ in parsed if other == verb}) for verb in ("is", "are")}
    predicates = sorted({predicate for _, _, predicate in parsed})
    parted = [match.groups() for match in map(_ENDING.match, predicates) if match] or [("", "")]
    verbs = [verb for _, verb, _ in parsed]
    chance = random.Random(seed)  # noqa: S311 - nothing secret
    made: set[str] = set()
    for _ in range(20 * count):
        if len(made) == count:
            return
        verb = chance.choice(verbs)
        subject, predicate = chance.choice(subjects[verb]), chance.choice(predicates)
        if chance.random() > _WHOLE_PREDICATE:
            predicate = f"{chance.choice(parted)[0]} {chance.choice(parted)[1]}".strip() or predicate
        sentence = _said(subject, verb, predicate, chance)
        if sentence not in made and sentence not in given:
            made.add(sentence)
            yield sentence


def _said(subject: str, verb: str, predicate: str, chance: random.Random) -> str:
    """Say that it is so, that there is one for which it is so, or that it is not so."""
    fate = chance.random()
    if fate < _NEGATED / 2:
        return f"{subject} {verb} not {predicate}"
    if fate < _NEGATED:
        return f"there {verb} no {_ARTICLE.sub('', subject)} {predicate}"
    if fate < _NEGATED + _EXISTS:
        return f"there {verb} {subject} {predicate}"
    return f"{subject} {verb} {predicate}"
