"""Which items and windows go into which batch: each once an epoch, the same for any number of processes."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder import ModelSpec
from training.batches import Position, Sampler, Windows, hold_out, pad
from training.data import DataError
from training.objectives import documents_mask
from training.pretrain import Masker
from training.source import Item
from training.store import write_store

Drawer = Sampler | Windows


def lengths_of(count: int, *, most: int = 97, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, most + 1, count)


def sampler(
    lengths: np.ndarray,
    items: np.ndarray | None = None,
    *,
    batch_size: int = 7,
    batch_tokens: int = 211,
    seed: int = 3,
    rank: int = 0,
    ranks: int = 1,
) -> Sampler:
    return Sampler(lengths, items, batch_size=batch_size, batch_tokens=batch_tokens, seed=seed, rank=rank, ranks=ranks)


def epoch(drawer: Drawer) -> list[list[int]]:
    """Draw until the next epoch begins."""
    number = drawer.position.epoch
    batches = []
    while drawer.position.epoch == number:
        batches.append(drawer.next().tolist())
    return batches


# ---------------------------------------------------------------------------------------------------------------- items


@pytest.mark.parametrize("count", [1, 7, 448, 449, 1009])
def test_each_item_is_drawn_once_an_epoch_in_another_order(count: int) -> None:
    drawer = sampler(lengths_of(count))
    epochs = [epoch(drawer) for _ in range(3)]
    for batches in epochs:
        assert sorted(item for batch in batches for item in batch) == list(range(count))
    assert count < 7 or (epochs[0] != epochs[1] and epochs[1] != epochs[2])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60), st.integers(1, 9), st.integers(1, 100), st.integers(0, 5))
def test_no_item_is_lost_or_repeated_and_no_batch_is_too_large(
    lengths: list[int], batch_size: int, batch_tokens: int, seed: int
) -> None:
    drawer = sampler(np.array(lengths), batch_size=batch_size, batch_tokens=batch_tokens, seed=seed)
    batches = epoch(drawer)
    assert sorted(item for batch in batches for item in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) <= batch_size
        assert len(batch) == 1 or len(batch) * max(lengths[item] for item in batch) <= batch_tokens


def test_batches_by_hand() -> None:
    """From the longest on: 20 tokens fill a batch, two of 10 another, and no batch has more than three."""
    drawer = sampler(np.array([2, 20, 1, 10, 3]), batch_size=3, batch_tokens=20)
    assert sorted(map(sorted, epoch(drawer))) == [[0, 2], [1], [3, 4]]
    drawer = sampler(np.array([2, 20, 1, 10, 3]), batch_size=3, batch_tokens=19)
    assert sorted(map(sorted, epoch(drawer))) == [[0, 2, 4], [1], [3]]


def test_lengths_in_a_batch_are_nearly_equal() -> None:
    lengths = lengths_of(2003)
    batches = epoch(sampler(lengths, batch_size=16, batch_tokens=10_000))
    padded = sum(len(batch) * lengths[batch].max() for batch in batches)
    assert padded < 1.03 * lengths.sum()
    at_random = np.random.default_rng(0).permutation(lengths)[:2000].reshape(-1, 16)
    assert (16 * at_random.max(axis=1)).sum() > 1.7 * at_random.sum()  # what it would be otherwise
    assert len(batches) <= math.ceil(2003 / 16) + 2  # so nearly all are full


def test_long_and_short_batches_are_mixed() -> None:
    lengths = lengths_of(2003)
    means = [lengths[batch].mean() for batch in epoch(sampler(lengths, batch_tokens=10_000))]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.2


def test_only_the_items_asked_for_are_drawn() -> None:
    drawer = sampler(lengths_of(101), np.arange(3, 101, 5))
    assert sorted(item for batch in epoch(drawer) for item in batch) == list(range(3, 101, 5))


def test_the_seed_alone_decides() -> None:
    lengths = lengths_of(101)
    assert epoch(sampler(lengths)) == epoch(sampler(lengths)) != epoch(sampler(lengths, seed=5))


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(DataError, match="at least one item to train on, got none"):
        sampler(np.zeros(0, dtype=np.int64))
    with pytest.raises(DataError, match="at least one item to train on, got none"):
        sampler(lengths_of(3), np.zeros(0, dtype=np.int64))


# -------------------------------------------------------------------------------------------------------------- windows


def windows(
    total: int, length: int = 10, *, batch_size: int = 3, seed: int = 3, rank: int = 0, ranks: int = 1
) -> Windows:
    return Windows(total, length, batch_size=batch_size, seed=seed, rank=rank, ranks=ranks)


@pytest.mark.parametrize("total", [10, 11, 19, 20, 103, 1009])
def test_windows_lie_side_by_side_at_other_places_each_epoch(total: int) -> None:
    drawer = windows(total, batch_size=1)
    firsts = set()
    for _ in range(20):
        starts = sorted(start for (start,) in epoch(drawer))
        assert starts == list(range(starts[0], starts[-1] + 1, 10))
        assert 0 <= starts[0] < 10
        assert total - 20 < starts[-1] <= total - 10
        firsts.add(starts[0])
    assert len(firsts) > 1 or total == 10


def test_a_last_batch_is_filled_up_with_the_first_windows_and_nothing_else_is_repeated() -> None:
    """79 tokens are 7 windows of 10, wherever these begin: of 3 batches of 3 the last has 1 of its own."""
    drawer = windows(70 + 9, batch_size=3)
    for _ in range(5):
        drawn = [start for batch in epoch(drawer) for start in batch]
        assert len(drawn) == 9
        assert len(set(drawn[:7])) == 7
        assert drawn[7:] == drawn[:2]


def test_a_corpus_of_one_window_fills_a_batch() -> None:
    drawer = windows(10, batch_size=3)
    assert epoch(drawer) == [[0, 0, 0]]


def test_a_corpus_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(DataError, match="must fill one window of 10 tokens, got 9 tokens; add text"):
        windows(9)


def test_windows_of_another_seed_or_length_stand_elsewhere() -> None:
    orders = [epoch(windows(1009, seed=seed)) for seed in (3, 5, 3)]
    assert orders[0] == orders[2] != orders[1]


def test_packed_windows_keep_documents_apart(tmp_path: Path, tiny_spec: ModelSpec) -> None:
    """A token sees those of its window that the store has in the same document, wherever the window begins."""
    texts = ["the " * (1 + number % 7) for number in range(50)]
    store = write_store(tmp_path, [Item((text,), "", 0, 0) for text in texts], tiny_spec, cut=False)
    document = np.searchsorted(store.ends, np.arange(len(store.ids)), side="right")
    drawer, masker = windows(len(store.ids), 23), Masker(tiny_spec, rate=0.25)
    for _ in range(10):
        places = drawer.next()[:, None] + np.arange(23)
        starts = masker.starts(store.ids[places].astype(np.int64))
        assert starts is not None
        same = document[places][:, None, :, None] == document[places][:, None, None, :]
        np.testing.assert_array_equal(documents_mask(starts).numpy(), same)
        assert not same.all()


def test_windows_within_one_document_need_no_mask(tiny_spec: ModelSpec) -> None:
    masker = Masker(tiny_spec, rate=0.25)
    assert masker.starts(np.array([[2, 5, 6, 7], [5, 6, 7, 8]])) is None
    starts = masker.starts(np.array([[2, 5, 6, 7], [5, 3, 2, 8]]))
    assert starts is not None
    assert starts.tolist() == [[True, False, False, False], [False, False, True, False]]


# ------------------------------------------------------------------------------------------ processes and interruptions

MAKE: dict[str, Callable[[int, int, int], Drawer]] = {
    "items": lambda count, rank, ranks: sampler(lengths_of(count), rank=rank, ranks=ranks),
    "windows": lambda count, rank, ranks: windows(10 * count, rank=rank, ranks=ranks),
}


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 8, 60, 61, 62, 1009])
@pytest.mark.parametrize("kind", MAKE)
def test_many_processes_draw_the_batches_of_one_in_turn(kind: str, count: int, ranks: int) -> None:
    """Each takes as many steps; what the last round lacks are the epoch's first batches again, and no others."""
    alone = MAKE[kind](count, 0, 1)
    together = [MAKE[kind](count, rank, ranks) for rank in range(ranks)]
    for _ in range(3):
        expected = epoch(alone)
        drawn = [epoch(drawer) for drawer in together]
        assert {len(batches) for batches in drawn} == {math.ceil(len(expected) / ranks)}
        in_turn = [batch for batches in zip(*drawn, strict=True) for batch in batches]
        assert len(in_turn) == len(expected) + -len(expected) % ranks
        if kind == "items":
            assert in_turn == [expected[place % len(expected)] for place in range(len(in_turn))]
        else:
            flat = [start for batch in expected for start in batch]
            distinct = list(dict.fromkeys(flat))
            assert [start for batch in in_turn for start in batch] == [
                distinct[place % len(distinct)] for place in range(3 * len(in_turn))
            ]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 5, 9, 10, 11, 31])
@pytest.mark.parametrize("kind", MAKE)
def test_from_a_position_on_the_same_batches_follow(kind: str, steps: int, ranks: int) -> None:
    """Across the ends of epochs: 61 items make about 10 batches."""
    for rank in range(ranks):
        uninterrupted = MAKE[kind](61, rank, ranks)
        for _ in range(steps):
            uninterrupted.next()
        kept = dict(vars(uninterrupted.position))
        expected = [uninterrupted.next().tolist() for _ in range(40)]
        resumed = MAKE[kind](61, rank, ranks)
        resumed.next()
        resumed.position = Position(**kept)
        assert [resumed.next().tolist() for _ in range(40)] == expected


@pytest.mark.parametrize("kind", MAKE)
def test_a_position_is_plain_numbers_that_count_up(kind: str) -> None:
    drawer = MAKE[kind](61, 0, 1)
    assert drawer.position == Position(epoch=0, batch=0)
    drawer.next()
    assert drawer.position == Position(epoch=0, batch=1)
    epoch(drawer)
    assert drawer.position == Position(epoch=1, batch=0)


# ------------------------------------------------------------------------------------------------ held out, and padding


@pytest.mark.parametrize(
    ("items", "apart"),
    [(0, []), (999, []), (1000, list(range(99, 1000, 100))), (100_000, list(range(99, 25_600, 100)))],
)
def test_large_stores_spare_each_hundredth_item_256_at_most(items: int, apart: list[int]) -> None:
    heldout, rest = hold_out(items)
    assert heldout.tolist() == apart
    assert sorted([*heldout, *rest]) == list(range(items))


def test_texts_are_padded_at_the_end() -> None:
    padded = pad([np.array([2, 7, 3], dtype=np.uint16), np.array([2, 3], dtype=np.uint16)], 11)
    assert padded["input_ids"].tolist() == [[2, 7, 3], [2, 3, 11]]
    assert padded["input_ids"].dtype == torch.int64
    assert padded["attention_mask"].tolist() == [[True, True, True], [True, True, False]]
    assert padded["padded"]
    assert not pad([np.array([2, 3]), np.array([5, 3])], 11)["padded"]
