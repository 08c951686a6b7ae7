"""Batcher: queue → batches under a token budget. Knows no model and no HTTP."""

import asyncio
import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from service.errors import NotReadyError, OverloadedError
from service.turns import Piece, Turns, Waiting

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

CLOSED = "the service is shutting down; send the request elsewhere, or later"
# How long a batch is meant to take, and so how long a new request may find the worker busy.
TARGET_BATCH_S = 0.05
# Smaller batches cost more per token on any machine. Also the budget until a rate has been measured.
MIN_BATCH_TOKENS = 256
RATE_MEMORY = 0.8  # what the measured rate keeps of the past at each batch


@dataclass(slots=True, eq=False, kw_only=True)
class _Request(Waiting, Generic[Item, Result]):
    items: Sequence[Item]
    done: asyncio.Future[None]
    """Resolved when `parts` or `error` can be read."""
    unfinished: int
    parts: dict[int, Sequence[Result]] = field(default_factory=dict)
    """Results, by the index of the first item that they are of."""
    error: BaseException | None = None
    over: bool = False
    """Answered, failed, or left by its caller."""


@dataclass(frozen=True, slots=True)
class BatcherState:
    """What a batcher has to do and has done, at one moment."""

    queued_requests: int
    """Requests with items that no batch has taken."""
    queued_tokens: int
    """Tokens of those items."""
    running_batches: int
    batches: int
    """Batches done, failed ones included."""
    last_batch_tokens: int
    """Of the batch begun last; 0 before the first."""
    tokens_per_s: float
    """What one worker does, measured on the last batches; 0 before the first."""
    dropped_requests: int
    """Requests whose callers left before the answer."""


class Batcher(Generic[Item, Result]):
    """Joins the items of many requests into batches and runs these on threads of its own.

    A worker takes a batch whenever it is free and something waits; nothing waits for company. Under load batches fill
    with what arrived while the last one ran. The workers are threads, not tasks of the event loop, so that the next
    batch starts at once even while the loop is busy writing answers.

    A batch holds as many tokens as take about `TARGET_BATCH_S` at the rate of the last batches, and never more than
    `max_batch_tokens`; a single item may exceed both. The items of one request run in order; `Turns` decides between
    requests, and which are short. Items of near-equal cost are not sought: `submit` them sorted.

    Close it, or its threads stay until the process ends.

    Args:
        process: Turns a batch's items into as many results, in order. Called on the worker threads; after it has
            raised, once more for each request's items of that batch alone, so that one request cannot fail another.
        max_batch_tokens: Largest batch, in tokens.
        max_queue_tokens: How many tokens may wait. A request that would exceed it is refused, unless the batcher is
            idle: then a request of any size is admitted.
        workers: Number of threads, and so of batches that run at the same time.
        express: Whether there is one more thread, for short requests alone, which then wait for no batch of bulk.
        min_batch_tokens: Smallest budget, in tokens, however slow the last batches were.
        clock: Gives seconds, and never goes back.

    Raises:
        ValueError: A number is below 1.
    """

    def __init__(
        self,
        process: Callable[[Sequence[Item]], Sequence[Result]],
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        workers: int = 1,
        express: bool = False,
        min_batch_tokens: int = MIN_BATCH_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        sizes = (max_batch_tokens, max_queue_tokens, workers, min_batch_tokens)
        if min(sizes) < 1:
            raise ValueError(f"max_batch_tokens, max_queue_tokens, workers, min_batch_tokens must be >= 1, got {sizes}")
        self._process = process
        self._max_batch_tokens = max_batch_tokens
        self._min_batch_tokens = min(min_batch_tokens, max_batch_tokens)
        self._max_queue_tokens = max_queue_tokens
        self._clock = clock
        self._changed = threading.Condition()  # guards all that follows, and the requests
        self._turns: Turns[_Request[Item, Result]] = Turns()
        self._running: list[int] = []  # tokens of each batch
        self._batches = self._last_batch_tokens = self._dropped = 0
        self._recent_tokens = self._recent_s = 0.0
        self._workers, self._closed = workers, False
        kinds = [False] * workers + [True] * express
        self._threads = [threading.Thread(target=self._work, args=(kind,), daemon=True) for kind in kinds]
        for thread in self._threads:
            thread.start()

    async def submit(self, items: Sequence[Item], costs: Sequence[int]) -> list[Result]:
        """Give the result of each item, in order. No items have no results, even when full.

        Cancel the call when its caller has left: what has not started then never runs.

        Args:
            items: What `process` takes. Leave the sequence as it is until the results are there.
            costs: Tokens of each item, at least 1.

        Raises:
            OverloadedError: Too many tokens are waiting.
            NotReadyError: The batcher is closed, or was closed without draining.
            ValueError: Not one cost per item, or a cost below 1.
            BaseException: What `process` raised for this request's items.
        """
        if len(items) != len(costs) or min(costs, default=1) < 1:
            raise ValueError(f"each item must have a cost of 1 or more, got {len(items)} items and {costs!r:.200}")
        if not items:
            return []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = _Request[Item, Result](costs=costs, items=items, done=done, unfinished=len(items))
        with self._changed:
            self.require_room(sum(costs))
            self._turns.add(request, budget=self._budget())
            self._changed.notify_all()  # not every thread takes every request
        try:
            await done
        finally:
            self._leave(request)
        if request.error is not None:
            raise request.error
        return [result for start in sorted(request.parts) for result in request.parts[start]]

    def require_room(self, tokens: int) -> None:
        """Refuse what `submit` would refuse now, for callers who want to know before they have the costs.

        Raises:
            OverloadedError: So many tokens would not be admitted. It says when they might be.
            NotReadyError: The batcher is closed.
        """
        with self._changed:
            if self._closed:
                raise NotReadyError(CLOSED)
            queued, unfinished = self._turns.tokens, self._turns.tokens + sum(self._running)
            excess = queued + tokens - self._max_queue_tokens
            if excess <= 0 or not unfinished:
                return
            rate = self._rate() * self._workers
        # Room is made when the excess has been worked off, and in any case when everything has.
        wait_s = max(1, math.ceil(min(excess, unfinished) / rate)) if rate else 1
        raise OverloadedError(
            f"at most {self._max_queue_tokens} tokens may wait, got {tokens} more where {queued} are waiting; "
            f"try again in {wait_s} s, or send less at once",
            retry_after_s=wait_s,
        )

    async def close(self, *, drain: bool = True) -> None:
        """Take no more requests, and return when all threads have ended.

        What runs is finished in any case. Closing twice is harmless, and the second time may hasten the first.

        Args:
            drain: Whether to run what is queued; else its requests fail at once with NotReadyError.
        """
        with self._changed:
            self._closed = True
            for request in () if drain else list(self._turns):
                _wake(self._fail(request, NotReadyError(CLOSED)))
            self._changed.notify_all()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def state(self) -> BatcherState:
        """Count what waits and what has been done."""
        with self._changed:
            return BatcherState(
                queued_requests=len(self._turns),
                queued_tokens=self._turns.tokens,
                running_batches=len(self._running),
                batches=self._batches,
                last_batch_tokens=self._last_batch_tokens,
                tokens_per_s=self._rate(),
                dropped_requests=self._dropped,
            )

    def _work(self, express: bool) -> None:
        while self._work_once(express):
            pass

    def _work_once(self, express: bool) -> bool:
        """Wait for a batch and run it; False if there will be none. Holds no request while it waits."""
        with self._changed:
            while not self._turns.waits(short_only=express) and not self._closed:
                self._changed.wait()
            batch = (self._turns.take_short if express else self._turns.take)(self._budget())
            if not batch.pieces:
                return False
            self._running.append(batch.tokens)
            self._last_batch_tokens = batch.tokens
        ended = self._run(list(batch.pieces.values()))
        # Before callers hear of it: one that asks for more at once must find an idle batcher idle.
        with self._changed:
            self._running.remove(batch.tokens)
            self._batches += 1
        _wake(ended)
        return True

    def _run(self, pieces: Sequence[Piece[_Request[Item, Result]]]) -> list[_Request[Item, Result]]:
        """Run pieces together, or one by one if that fails, and give the requests that this ended."""
        items = [item for piece in pieces for item in piece.request.items[piece.start : piece.stop]]
        begun = self._clock()
        try:
            results = list(self._process(items))
            if len(results) != len(items):
                raise RuntimeError(f"{len(items)} items must have as many results, got {len(results)}. This is a bug.")
        except BaseException as error:  # noqa: BLE001 - were this thread to end, its callers would wait for ever
            if len(pieces) == 1:
                return self._fail(pieces[0].request, error)
            logger.warning("a batch of %d requests failed; each runs again alone: %r", len(pieces), error)
        else:
            return self._settle(pieces, results, seconds=self._clock() - begun)
        return [request for piece in pieces if not piece.request.over for request in self._run([piece])]

    def _settle(
        self, pieces: Sequence[Piece[_Request[Item, Result]]], results: Sequence[Result], *, seconds: float
    ) -> list[_Request[Item, Result]]:
        ended: list[_Request[Item, Result]] = []
        with self._changed:
            # Sums, not a mean of rates: a single short text is slow for its size and says little about a full batch.
            tokens = sum(sum(piece.request.costs[piece.start : piece.stop]) for piece in pieces)
            self._recent_tokens = RATE_MEMORY * self._recent_tokens + tokens
            self._recent_s = RATE_MEMORY * self._recent_s + seconds
            first = 0
            for piece in pieces:
                request, size = piece.request, piece.stop - piece.start
                if not request.over:
                    request.parts[piece.start] = results[first : first + size]
                    request.unfinished -= size
                    if not request.unfinished:
                        request.over = True
                        ended.append(request)
                first += size
        return ended

    def _fail(self, request: _Request[Item, Result], error: BaseException) -> list[_Request[Item, Result]]:
        with self._changed:
            if request.over:
                return []
            request.error, request.over = error, True
            self._turns.remove(request)
        return [request]

    def _leave(self, request: _Request[Item, Result]) -> None:
        """Forget a request whose caller waits no longer; harmless if it is over."""
        with self._changed:
            if not request.over:
                request.over = True
                self._turns.remove(request)
                self._dropped += 1

    def _rate(self) -> float:
        return self._recent_tokens / self._recent_s if self._recent_s else 0.0

    def _budget(self) -> int:
        return min(self._max_batch_tokens, max(self._min_batch_tokens, int(self._rate() * TARGET_BATCH_S)))


def _wake(requests: Iterable[_Request[Any, Any]]) -> None:
    """Tell callers that their requests are over, from any thread and each in its own event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
    for request in requests:
        by_loop[request.done.get_loop()].append(request.done)
    for loop, futures in by_loop.items():
        with suppress(RuntimeError):  # in a closed loop nobody waits
            loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # its caller may have left
            future.set_result(None)
