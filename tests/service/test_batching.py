import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.batching import TARGET_BATCH_S, Batcher
from service.errors import NotReadyError, OverloadedError

Item = tuple[int, int]
"""Which request, and which of its items."""

ANY = 10_000
REQUESTS = st.lists(st.lists(st.integers(1, 30), max_size=12), max_size=10)


class Recorder:
    """Answers each item with itself, and remembers what ran. Poisoned items raise; without a permit a batch stops."""

    def __init__(self, poisoned: Sequence[Item] = (), *, permits: int = ANY) -> None:
        self.batches: list[list[Item]] = []
        self.entered = threading.Semaphore(0)
        self._permits = threading.Semaphore(permits)
        self._poisoned = set(poisoned)

    def __call__(self, items: Sequence[Item]) -> list[Item]:
        self.batches.append(list(items))
        self.entered.release()
        assert self._permits.acquire(timeout=10)
        for item in items:
            if item in self._poisoned:
                raise ArithmeticError(item)
        return list(items)

    def ran(self) -> Counter[Item]:
        return Counter(item for batch in self.batches for item in batch)

    def let_go(self, batches: int = ANY) -> None:
        self._permits.release(batches)

    async def wait_until_running(self, batches: int = 1) -> None:
        """Wait until so many more batches have begun."""
        for _ in range(batches):
            assert await asyncio.to_thread(self.entered.acquire, timeout=10)


class Panic(BaseException):
    """As libraries written in Rust raise."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def named(request: int, costs: Sequence[int]) -> list[Item]:
    return [(request, index) for index in range(len(costs))]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def outcomes(tasks: Sequence[Awaitable[list[Item]]]) -> list[list[Item] | BaseException]:
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)


@settings(deadline=None)
@given(REQUESTS, st.integers(1, 60), st.integers(1, 60), st.integers(1, 3), st.booleans())
def test_every_item_runs_once_and_results_go_to_their_caller_in_order(
    requests: list[list[int]], budget: int, floor: int, workers: int, express: bool
) -> None:
    recorder = Recorder()

    async def scenario() -> None:
        batcher = Batcher(
            recorder,
            max_batch_tokens=budget,
            max_queue_tokens=10**6,
            min_batch_tokens=floor,
            workers=workers,
            express=express,
        )
        answers = await outcomes([batcher.submit(named(n, costs), costs) for n, costs in enumerate(requests)])
        assert answers == [named(n, costs) for n, costs in enumerate(requests)]
        await batcher.close()
        assert batcher.state().queued_tokens == batcher.state().running_batches == 0
        assert batcher.state().batches == len(recorder.batches)

    asyncio.run(scenario())
    assert recorder.ran() == Counter(item for n, costs in enumerate(requests) for item in named(n, costs))
    for batch in recorder.batches:
        assert sum(requests[n][index] for n, index in batch) <= budget or len(batch) == 1


@settings(deadline=None)
@given(st.data(), REQUESTS, st.integers(1, 60), st.integers(1, 3))
def test_a_failing_item_fails_its_own_request_alone(
    data: st.DataObject, requests: list[list[int]], budget: int, workers: int
) -> None:
    items = [item for n, costs in enumerate(requests) for item in named(n, costs)]
    poisoned = data.draw(st.lists(st.sampled_from(items), max_size=3)) if items else []
    recorder = Recorder(poisoned)

    async def scenario() -> list[list[Item] | BaseException]:
        batcher = Batcher(recorder, max_batch_tokens=budget, max_queue_tokens=10**6, workers=workers)
        answers = await outcomes([batcher.submit(named(n, costs), costs) for n, costs in enumerate(requests)])
        assert await batcher.submit([(-1, 0)], [1]) == [(-1, 0)]
        await batcher.close()
        return answers

    for n, answer in enumerate(asyncio.run(scenario())):
        if n in {request for request, _ in poisoned}:
            assert isinstance(answer, ArithmeticError)
            assert answer.args[0][0] == n
        else:
            assert answer == named(n, requests[n])
    assert max(recorder.ran().values()) <= 2


@settings(deadline=None)
@given(st.data(), st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=1, max_size=10))
def test_what_a_caller_left_before_its_start_never_runs(data: st.DataObject, requests: list[list[int]]) -> None:
    leaving = data.draw(st.sets(st.sampled_from(range(len(requests)))))
    recorder = Recorder(permits=0)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=40, max_queue_tokens=10**6)
        first = asyncio.create_task(batcher.submit([(-1, 0)], [1]))
        await recorder.wait_until_running()
        tasks = [asyncio.create_task(batcher.submit(named(n, costs), costs)) for n, costs in enumerate(requests)]
        await until(lambda: batcher.state().queued_requests == len(requests))
        for n in leaving:
            tasks[n].cancel()
        await until(lambda: batcher.state().dropped_requests == len(leaving))
        staying = [costs for n, costs in enumerate(requests) if n not in leaving]
        assert batcher.state().queued_tokens == sum(map(sum, staying))
        recorder.let_go()
        for n, answer in enumerate(await outcomes(tasks)):
            assert isinstance(answer, asyncio.CancelledError) if n in leaving else answer == named(n, requests[n])
        assert await first == [(-1, 0)]
        await batcher.close()

    asyncio.run(scenario())
    assert not leaving & {n for n, _ in recorder.ran()}


def test_a_caller_that_leaves_in_the_middle_stops_the_rest_of_its_request() -> None:
    recorder = Recorder(permits=0)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=1000)
        bulk = asyncio.create_task(batcher.submit(named(0, [1] * 100), [1] * 100))
        await recorder.wait_until_running()
        bulk.cancel()
        await until(lambda: batcher.state().queued_tokens == 0)
        recorder.let_go()
        await batcher.close()

    asyncio.run(scenario())
    assert recorder.batches == [named(0, [1] * 10)]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 100))
def test_a_single_text_is_in_the_batch_after_the_running_one(bulks: int, batches_before: int, cost: int) -> None:
    recorder = Recorder(permits=batches_before)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=100, max_queue_tokens=10**6)
        costs = [7] * 500
        tasks = [asyncio.create_task(batcher.submit(named(n, costs), costs)) for n in range(bulks)]
        await recorder.wait_until_running(batches_before + 1)
        await until(lambda: batcher.state().queued_requests == bulks)
        single = asyncio.create_task(batcher.submit([(-1, 0)], [cost]))
        await until(lambda: batcher.state().queued_requests == bulks + 1)
        recorder.let_go()
        assert await single == [(-1, 0)]
        assert (-1, 0) in recorder.batches[batches_before + 1]
        for task in tasks:
            task.cancel()
        await batcher.close(drain=False)

    asyncio.run(scenario())


def test_a_caller_that_left_is_not_run_again_when_its_batch_fails() -> None:
    recorder = Recorder(poisoned=[(1, 0)], permits=0)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=100)
        first = asyncio.create_task(batcher.submit([(0, 0)], [10]))
        await recorder.wait_until_running()
        failing, leaving, staying = (asyncio.create_task(batcher.submit([(n, 0)], [1])) for n in (1, 2, 3))
        await until(lambda: batcher.state().queued_requests == 3)
        recorder.let_go(1)
        await recorder.wait_until_running()
        leaving.cancel()
        await until(lambda: batcher.state().dropped_requests == 1)
        recorder.let_go()
        answers = await outcomes([first, failing, leaving, staying])
        assert answers[::3] == [[(0, 0)], [(3, 0)]]
        assert [type(answer) for answer in answers[1:3]] == [ArithmeticError, asyncio.CancelledError]
        await batcher.close()

    asyncio.run(scenario())
    assert recorder.batches[1:] == [[(1, 0), (2, 0), (3, 0)], [(1, 0)], [(3, 0)]]


def test_an_idle_batcher_admits_a_request_of_any_size_and_a_full_one_refuses() -> None:
    recorder = Recorder(permits=0)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=50)
        bulk = asyncio.create_task(batcher.submit(named(0, [1] * 500), [1] * 500))
        await recorder.wait_until_running()
        assert batcher.state().queued_tokens == 490
        for costs in ([1], [1] * 500):
            with pytest.raises(OverloadedError, match="at most 50 tokens may wait") as refused:
                await batcher.submit(named(1, costs), costs)
            assert refused.value.retry_after_s == 1  # no rate is known yet
        assert await batcher.submit([], []) == []
        recorder.let_go()
        assert await bulk == named(0, [1] * 500)
        await batcher.close()

    asyncio.run(scenario())
    assert {n for n, _ in recorder.ran()} == {0}


def test_a_running_batch_alone_does_not_count_as_waiting() -> None:
    recorder = Recorder(permits=0)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=50)
        first = asyncio.create_task(batcher.submit([(0, 0)], [1000]))
        await recorder.wait_until_running()
        with pytest.raises(OverloadedError):
            await batcher.submit([(1, 0)], [51])
        second = asyncio.create_task(batcher.submit([(2, 0)], [50]))
        await until(lambda: batcher.state().queued_tokens == 50)
        recorder.let_go()
        assert await outcomes([first, second]) == [[(0, 0)], [(2, 0)]]
        await batcher.close()

    asyncio.run(scenario())


def test_one_client_that_sends_too_much_again_and_again_is_always_admitted() -> None:
    async def scenario() -> None:
        batcher = Batcher(Recorder(), max_batch_tokens=10, max_queue_tokens=1)
        for n in range(300):
            assert await batcher.submit(named(n, [1] * 13), [1] * 13) == named(n, [1] * 13)
        await batcher.close()

    asyncio.run(scenario())


def test_retry_after_comes_from_the_measured_rate_of_all_workers() -> None:
    clock = Clock()
    recorder = Recorder(permits=1)

    def process(items: Sequence[Item]) -> list[Item]:
        clock.now += 2.0
        return recorder(items)

    async def scenario() -> None:
        batcher = Batcher(process, max_batch_tokens=1000, max_queue_tokens=100, min_batch_tokens=1, clock=clock)
        await batcher.submit([(0, 0)], [20])
        assert batcher.state().tokens_per_s == 10
        tasks = [asyncio.create_task(batcher.submit([(1, 0)], [30]))]
        await until(lambda: batcher.state().running_batches == 1)
        tasks.append(asyncio.create_task(batcher.submit([(2, 0)], [90])))
        await until(lambda: batcher.state().queued_tokens == 90)
        for tokens, seconds in ((12, 1), (20, 1), (21, 2), (75, 7), (10**6, 12)):
            with pytest.raises(OverloadedError, match=f"try again in {seconds} s") as refused:
                await batcher.submit([(3, 0)], [tokens])
            assert refused.value.retry_after_s == seconds
        recorder.let_go()
        assert await outcomes(tasks) == [[(1, 0)], [(2, 0)]]
        await batcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(("rate", "expected"), [(100, 16), (1_000, 50), (1_600, 80), (100_000, 400)])
def test_a_batch_grows_to_what_takes_the_target_time(rate: int, expected: int) -> None:
    clock = Clock()

    def process(items: Sequence[Item]) -> list[Item]:
        sizes.append(len(items))
        clock.now += len(items) / rate
        return list(items)

    sizes: list[int] = []

    async def scenario() -> None:
        batcher = Batcher(process, max_batch_tokens=400, max_queue_tokens=1, min_batch_tokens=16, clock=clock)
        await batcher.submit(named(0, [1] * 3000), [1] * 3000)
        await batcher.close()

    asyncio.run(scenario())
    assert sizes[0] == 16
    assert set(sizes[1:-1]) <= {expected, expected - 1}  # the rate is a float
    assert expected in (16, 400) or expected / rate == pytest.approx(TARGET_BATCH_S)


def test_the_next_batch_starts_while_the_event_loop_is_busy() -> None:
    recorder = Recorder()

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=1)
        bulk = asyncio.create_task(batcher.submit(named(0, [1] * 100), [1] * 100))
        await asyncio.sleep(0)
        for _ in range(10):
            assert recorder.entered.acquire(timeout=10)  # blocks the loop
        await bulk
        await batcher.close()

    asyncio.run(scenario())


def test_an_idle_batcher_starts_at_once() -> None:
    async def scenario() -> float:
        batcher = Batcher(Recorder(), max_batch_tokens=10, max_queue_tokens=1)
        waits = []
        for n in range(100):
            begun = time.perf_counter()
            await batcher.submit([(n, 0)], [1])
            waits.append(time.perf_counter() - begun)
        await batcher.close()
        return min(waits)

    assert asyncio.run(scenario()) < 0.001


def test_two_idle_workers_share_one_bulk_request() -> None:
    recorder = Recorder(permits=0)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=1, workers=2)
        bulk = asyncio.create_task(batcher.submit(named(0, [1] * 100), [1] * 100))
        await recorder.wait_until_running()
        await recorder.wait_until_running()
        assert batcher.state().running_batches == 2
        recorder.let_go()
        assert await bulk == named(0, [1] * 100)
        await batcher.close()

    asyncio.run(scenario())


def test_a_short_request_runs_at_once_while_all_workers_have_bulk() -> None:
    recorder = Recorder(permits=0)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=1000, workers=2, express=True)
        bulk = asyncio.create_task(batcher.submit(named(0, [1] * 100), [1] * 100))
        await recorder.wait_until_running(2)
        await asyncio.sleep(0.01)
        assert batcher.state().running_batches == 2  # bulk has no use of the third thread
        singles = [asyncio.create_task(batcher.submit([(n, 0)], [1])) for n in (1, 2)]
        await recorder.wait_until_running()
        assert {n for n, _ in recorder.batches[2]} <= {1, 2}
        recorder.let_go()
        assert await outcomes([bulk, *singles]) == [named(0, [1] * 100), [(1, 0)], [(2, 0)]]
        await batcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [StopIteration(), Panic(), asyncio.CancelledError()])
def test_no_exception_of_the_work_ends_the_worker(error: BaseException) -> None:
    def process(items: Sequence[int]) -> list[int]:
        if 13 in items:
            raise error
        return list(items)

    async def scenario() -> None:
        batcher = Batcher(process, max_batch_tokens=10, max_queue_tokens=1)
        with pytest.raises((type(error), RuntimeError)):
            await asyncio.wait_for(batcher.submit([13], [1]), 10)
        assert await batcher.submit([1, 2], [1, 1]) == [1, 2]
        await batcher.close()

    asyncio.run(scenario())


def test_too_few_results_are_an_error() -> None:
    async def scenario() -> None:
        batcher = Batcher[int, int](lambda items: items[:-1], max_batch_tokens=10, max_queue_tokens=10)
        with pytest.raises(RuntimeError, match="2 items must have as many results, got 1"):
            await batcher.submit([1, 2], [1, 1])
        await batcher.close()

    asyncio.run(scenario())


def test_an_event_loop_that_was_closed_leaves_the_batcher_working() -> None:
    recorder = Recorder(permits=0)
    batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=100)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(batcher.submit([(0, 0)], [1]))
    loop.run_until_complete(recorder.wait_until_running())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    recorder.let_go()

    async def another() -> None:
        assert await asyncio.wait_for(batcher.submit([(1, 0)], [1]), 10) == [(1, 0)]
        await batcher.close()

    asyncio.run(another())
    assert not waiting.done()


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize(("workers", "express"), [(1, False), (3, False), (1, True)])
def test_closing_leaves_no_caller_waiting_and_no_thread(workers: int, express: bool, drain: bool) -> None:
    recorder = Recorder(permits=0)
    threads = set(threading.enumerate())

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=10**6, workers=workers, express=express)
        costs = [[3] * size for size in (1, 40, 2, 17)]
        tasks = [asyncio.create_task(batcher.submit(named(n, c), c)) for n, c in enumerate(costs)]
        await recorder.wait_until_running()
        await until(lambda: batcher.state().queued_requests >= 2)
        closing = asyncio.create_task(batcher.close(drain=drain))
        await asyncio.sleep(0)
        with pytest.raises(NotReadyError, match="shutting down"):
            await batcher.submit([(9, 0)], [1])
        recorder.let_go()
        await asyncio.wait_for(closing, 10)
        answers = await outcomes(tasks)
        whole = [answer == named(n, c) for n, (c, answer) in enumerate(zip(costs, answers, strict=True))]
        assert all(done or isinstance(answer, NotReadyError) for done, answer in zip(whole, answers, strict=True))
        assert all(whole) == drain
        assert batcher.state().queued_tokens == batcher.state().queued_requests == 0
        await batcher.close()

    asyncio.run(scenario())
    assert set(threading.enumerate()) <= threads


def test_closing_without_draining_hastens_a_closing_with() -> None:
    recorder = Recorder(permits=0)

    async def scenario() -> None:
        batcher = Batcher(recorder, max_batch_tokens=10, max_queue_tokens=1)
        bulk = asyncio.create_task(batcher.submit(named(0, [1] * 100), [1] * 100))
        await recorder.wait_until_running()
        closing = [asyncio.create_task(batcher.close(drain=drain)) for drain in (True, False)]
        with pytest.raises(NotReadyError):
            await bulk
        recorder.let_go()
        await asyncio.gather(*closing)

    asyncio.run(scenario())
    assert len(recorder.batches) == 1


@pytest.mark.parametrize("costs", [[1], [1, 2, 3], [1, 0], [-1, 1]])
def test_each_item_needs_a_cost(costs: list[int]) -> None:
    async def scenario() -> None:
        batcher = Batcher(Recorder(), max_batch_tokens=10, max_queue_tokens=10)
        with pytest.raises(ValueError, match="must have a cost of 1 or more"):
            await batcher.submit([(0, 0), (0, 1)], costs)
        await batcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["max_batch_tokens", "max_queue_tokens", "workers", "min_batch_tokens"])
def test_sizes_are_at_least_one(name: str) -> None:
    sizes = {"max_batch_tokens": 1, "max_queue_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match="must be >= 1"):
        Batcher(Recorder(), **sizes)
