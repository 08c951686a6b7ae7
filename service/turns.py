"""Whose turn it is: requests that wait → one batch under a token budget. Knows no threads and no clock."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """A request, as far as turns concern it: items that are whole, and run in order."""

    costs: Sequence[int]
    """Tokens of each item, at least 1."""
    started: int = 0
    """Items that some batch has taken, which are always the first ones."""
    credit: int = 0
    """Tokens left of its turn; negative when the last item took more than was left."""

    @property
    def waits(self) -> bool:
        """Whether there are items that no batch has taken."""
        return self.started < len(self.costs)


Request = TypeVar("Request", bound=Waiting)


@dataclass(slots=True)
class Piece(Generic[Request]):
    """What one batch takes of one request: the items from `start` up to `stop`."""

    request: Request
    start: int
    stop: int


@dataclass(slots=True)
class Batch(Generic[Request]):
    """Items for the worker, at most one piece a request."""

    budget: int
    """Tokens that it may hold; a first item always fits."""
    tokens: int = 0
    pieces: dict[Request, Piece[Request]] = field(default_factory=dict)

    def take_next(self, request: Request) -> int:
        """Take a request's next item and give its cost, or 0 if it does not fit."""
        cost = request.costs[request.started]
        if self.tokens and self.tokens + cost > self.budget:
            return 0
        piece = self.pieces.setdefault(request, Piece(request, request.started, request.started))
        request.started += 1
        piece.stop = request.started
        self.tokens += cost
        return cost


class Turns(Generic[Request]):
    """Requests that wait. Not safe for threads.

    Requests that need no more than a quarter of a batch, and all those of a single item, go first, in order of arrival:
    however much bulk waits, they are in the next batch, with no more than a quarter of it beside them. The others take
    turns of a whole batch, as the items of one request are of more like length than those of several; what one takes
    too much, because items are whole, is missing in its next turn. Where short requests alone would fill batch after
    batch, every other one begins with a long request, so that neither kind starves.
    """

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of all items that wait."""
        # Ordered dictionaries for the sake of removal from the middle.
        self._short: OrderedDict[Request, None] = OrderedDict()
        self._long: OrderedDict[Request, None] = OrderedDict()
        self._long_passed_over = False

    def __len__(self) -> int:
        return len(self._short) + len(self._long)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._short, self._long)

    def add(self, request: Request, *, budget: int) -> None:
        """Let a request wait.

        Args:
            request: None of it started.
            budget: Tokens of a batch these days, which decides what is short.
        """
        cost = sum(request.costs)
        line = self._short if len(request.costs) == 1 or cost <= _quarter(budget) else self._long
        line[request] = None
        self.tokens += cost

    def remove(self, request: Request) -> None:
        """Forget what no batch has taken of a request; harmless if that is nothing."""
        for line in (self._short, self._long):
            if request in line:
                del line[request]
                self.tokens -= sum(request.costs[request.started :])

    def waits(self, *, short_only: bool = False) -> bool:
        """Whether there is something to take."""
        return bool(self._short) or (bool(self._long) and not short_only)

    def take_short(self, budget: int) -> Batch[Request]:
        """Make a batch of short requests alone; empty only if none waits."""
        batch = Batch[Request](budget)
        self._fill_with_short(batch)
        self.tokens -= batch.tokens
        return batch

    def take(self, budget: int) -> Batch[Request]:
        """Make the next batch; empty only if nothing waits."""
        batch = Batch[Request](budget)
        long_first = self._long_passed_over and bool(self._long)
        self._long_passed_over = bool(self._long)
        if long_first:
            self._give_turn(batch, _quarter(budget))
        tokens = batch.tokens
        self._fill_with_short(batch)
        hurried = batch.tokens > tokens
        # Whoever sent a short request waits for all of its batch: beside them bulk gets a quarter, not what is left.
        while self._long and self._give_turn(batch, _quarter(budget) if hurried else budget) and not hurried:
            pass
        self.tokens -= batch.tokens
        return batch

    def _fill_with_short(self, batch: Batch[Request]) -> None:
        while self._short and self._take_first_short(batch):
            pass

    def _take_first_short(self, batch: Batch[Request]) -> bool:
        """Take all of the first short request; False if not all of it fits."""
        request = next(iter(self._short))
        while request.waits:
            if not batch.take_next(request):
                return False
        del self._short[request]
        return True

    def _give_turn(self, batch: Batch[Request], most: int) -> bool:
        """Give the first long request its turn, or `most` tokens of it; False if the batch was full before that."""
        request = next(iter(self._long))
        if request.credit <= 0:
            request.credit += batch.budget
        end = batch.tokens + most
        while request.credit > 0 and request.waits and batch.tokens < end:
            cost = batch.take_next(request)
            if not cost:
                return False
            request.credit -= cost
            self._long_passed_over = False
        if not request.waits:
            del self._long[request]
        elif request.credit <= 0:
            self._long.move_to_end(request)
        return True


def _quarter(budget: int) -> int:
    return max(budget // 4, 1)
