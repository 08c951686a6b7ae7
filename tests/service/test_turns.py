from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.turns import Turns, Waiting

COSTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)
BUDGETS = st.integers(1, 120)


def waiting(*requests: list[int], budget: int) -> tuple[Turns[Waiting], list[Waiting]]:
    turns: Turns[Waiting] = Turns()
    added = [Waiting(costs=costs) for costs in requests]
    for request in added:
        turns.add(request, budget=budget)
    return turns, added


@given(st.lists(COSTS, max_size=8), BUDGETS)
def test_every_item_is_taken_once_and_in_order(requests: list[list[int]], budget: int) -> None:
    turns, added = waiting(*requests, budget=budget)
    taken: dict[Waiting, list[int]] = {request: [] for request in added}
    while turns:
        for piece in turns.take(budget).pieces.values():
            taken[piece.request] += range(piece.start, piece.stop)
    assert taken == {request: list(range(len(request.costs))) for request in added}
    assert turns.tokens == 0
    assert not turns.take(budget).pieces


@given(st.lists(COSTS, min_size=1, max_size=8), st.lists(BUDGETS, min_size=1))
def test_a_batch_keeps_to_its_budget_unless_a_single_item_exceeds_it(
    requests: list[list[int]], budgets: list[int]
) -> None:
    turns, _ = waiting(*requests, budget=budgets[0])
    for budget in budgets:
        before = turns.tokens
        batch = turns.take(budget)
        costs = [cost for piece in batch.pieces.values() for cost in piece.request.costs[piece.start : piece.stop]]
        assert sum(costs) == batch.tokens == before - turns.tokens
        assert batch.tokens <= budget or len(costs) == 1


@given(st.data())
def test_what_was_removed_is_never_taken(data: st.DataObject) -> None:
    budget = data.draw(BUDGETS)
    turns, added = waiting(*data.draw(st.lists(COSTS, min_size=1, max_size=8)), budget=budget)
    removed: set[Waiting] = set()
    while turns:
        assert not removed & set(turns.take(budget).pieces)
        if data.draw(st.booleans()):
            removed.add(gone := data.draw(st.sampled_from(added)))
            turns.remove(gone)
        assert turns.tokens == sum(sum(request.costs[request.started :]) for request in turns)
    assert turns.tokens == 0


@given(st.lists(st.integers(2, 40), min_size=1, max_size=30), st.integers(0, 20), st.integers(1, 100))
def test_a_single_text_is_in_the_next_batch_whatever_bulk_waits(
    bulk: list[int], batches_before: int, cost: int
) -> None:
    budget = 100
    turns, _ = waiting(*([length] * 50 for length in bulk), budget=budget)
    for _ in range(batches_before):
        turns.take(budget)
    single = Waiting(costs=[cost])
    turns.add(single, budget=budget)
    assert single in turns.take(budget).pieces


@given(st.integers(1, 200), st.integers(1, 40))
def test_a_bulk_request_is_not_starved_by_single_texts(cost: int, bulk_cost: int) -> None:
    budget = 100
    turns, (bulk,) = waiting([bulk_cost] * 5_000, budget=budget)
    for _ in range(20):
        before = bulk.started
        for _ in range(2):
            for _ in range(budget // cost + 1):
                turns.add(Waiting(costs=[cost]), budget=budget)
            turns.take(budget)
        assert bulk.started > before


@given(st.integers(1, 100), st.integers(1, 40))
def test_a_single_text_waits_for_one_batch_at_most_where_both_kinds_flood(cost: int, bulk_cost: int) -> None:
    budget = 100
    turns, _ = waiting([bulk_cost] * 10_000, [bulk_cost] * 10_000, budget=budget)
    for _ in range(20):
        single = Waiting(costs=[cost])
        turns.add(single, budget=budget)
        assert single in turns.take(budget).pieces or single in turns.take(budget).pieces


@given(st.lists(st.integers(1, 40), min_size=2, max_size=7), st.integers(20, 200))
def test_bulk_requests_advance_alike_in_tokens(lengths: list[int], budget: int) -> None:
    turns, added = waiting(*([length] * 5_000 for length in lengths), budget=budget)
    for _ in range(50):
        turns.take(budget)
        done = [request.started * request.costs[0] for request in added]
        # One turn, and what an item may take beyond it: each request may have that on either side.
        assert max(done) - min(done) <= budget + 2 * max(lengths)


@pytest.mark.parametrize("items", [1, 2, 5])
def test_short_requests_keep_their_order_of_arrival(items: int) -> None:
    turns, added = waiting(*([1] * items for _ in range(40)), budget=20)
    order = Counter[Waiting]()
    while turns:
        for request in turns.take(20).pieces:
            order.setdefault(request, len(order))
    assert [order[request] for request in added] == list(range(40))


def test_a_short_request_waits_for_little_bulk_in_its_own_batch() -> None:
    turns, (first, second) = waiting([10] * 200, [10] * 200, budget=200)
    assert turns.take(200).tokens == 200  # bulk alone fills a batch
    short = Waiting(costs=[10])
    turns.add(short, budget=200)
    batch = turns.take(200)
    assert short in batch.pieces
    assert batch.tokens == 10 + 50
    assert turns.take_short(200).tokens == 0
    assert turns.take(200).tokens == 200
    while turns:
        turns.take(200)
    assert first.started == second.started == 200


@given(st.lists(COSTS, max_size=8), st.lists(st.tuples(BUDGETS, st.booleans()), min_size=1))
def test_short_requests_can_be_taken_alone(requests: list[list[int]], takes: list[tuple[int, bool]]) -> None:
    turns, added = waiting(*requests, budget=60)
    short = {request for request in added if len(request.costs) == 1 or sum(request.costs) <= 15}
    for budget, short_only in takes:
        waits, before = turns.waits(short_only=short_only), turns.tokens
        batch = turns.take_short(budget) if short_only else turns.take(budget)
        assert bool(batch.pieces) == waits
        assert batch.tokens == before - turns.tokens
        assert set(batch.pieces) <= (short if short_only else set(added))
        costs = [cost for piece in batch.pieces.values() for cost in piece.request.costs[piece.start : piece.stop]]
        assert sum(costs) == batch.tokens
        assert batch.tokens <= budget or len(costs) == 1


@given(st.lists(st.integers(1, 40), min_size=2, max_size=7), st.integers(100, 200))
def test_bulk_requests_share_no_batch_while_each_could_fill_one(lengths: list[int], budget: int) -> None:
    turns, _ = waiting(*([length] * 5_000 for length in lengths), budget=budget)
    batches = [len(turns.take(budget).pieces) for _ in range(50)]
    # Whole items seldom end where a batch does: what is left of a turn begins the next batch.
    assert max(batches) <= 3
    assert sum(batches) <= 2 * len(batches)
