"""Which items go into which batch: decided by the seed alone, the same on each rank and after each restart."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from training.data import DataError

_BLOCK_BATCHES = 64
"""Items are sorted by length within blocks of so many batches: little padding, and batches still mix sources."""
_HELD_OUT_EACH = 100
_MOST_HELD_OUT = 256


@dataclass
class Position:
    """Where a sampler stands; all that a restart needs."""

    epoch: int = 0
    batch: int = 0


class Sampler:
    """Endless batches of items of near-equal length, in another order each epoch.

    Each rank takes its own batches of an epoch. Where their number is not a multiple of the ranks, the last round
    begins again with the epoch's first batches, so that every rank takes as many steps.

    Args:
        lengths: Tokens of each item.
        items: Which of the items to draw; None draws all.
        batch_size: Most items of a batch.
        batch_tokens: Most tokens of a batch, padding included; a single item may exceed it.
        seed: Decides the order.
        rank: Which of the processes this is.
        ranks: How many processes train together.

    Raises:
        DataError: There is no item.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        items: np.ndarray | None = None,
        *,
        batch_size: int,
        batch_tokens: int,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self._lengths = lengths
        self._items = np.arange(len(lengths)) if items is None else items
        if not len(self._items):
            raise DataError("there must be at least one item to train on, got none")
        self._batch_size, self._batch_tokens, self._seed = batch_size, batch_tokens, seed
        self._rank, self._ranks = rank, ranks
        self.position = Position()
        self._planned = -1
        self._plan: list[np.ndarray] = []

    def next(self) -> np.ndarray:
        """Give the indices of the next batch's items."""
        if self._planned != self.position.epoch:
            self._plan = self._make_plan(self.position.epoch)
            self._planned = self.position.epoch
        batch = self._plan[(self.position.batch + self._rank) % len(self._plan)]
        self.position.batch += self._ranks
        if self.position.batch >= len(self._plan):
            self.position = Position(self.position.epoch + 1, 0)
        return batch

    def _make_plan(self, epoch: int) -> list[np.ndarray]:
        generator = np.random.default_rng((self._seed, epoch))
        order = generator.permutation(self._items)
        block = self._batch_size * _BLOCK_BATCHES
        plan: list[np.ndarray] = []
        for start in range(0, len(order), block):
            items = order[start : start + block]
            items = items[np.argsort(self._lengths[items], kind="stable")]
            plan += self._cut(items)
        generator.shuffle(plan)
        return plan

    def _cut(self, items: np.ndarray) -> list[np.ndarray]:
        """Cut items sorted by length, the longest last, into batches."""
        batches = []
        stop = len(items)
        while stop:
            fits = max(1, min(self._batch_size, self._batch_tokens // int(self._lengths[items[stop - 1]])))
            batches.append(items[max(0, stop - fits) : stop])
            stop = max(0, stop - fits)
        return batches


class Windows:
    """Endless batches of windows of one length, cut from one long row of tokens, at other places each epoch.

    Every batch is full and every rank takes as many: what the last round of an epoch lacks is filled up with windows
    that the epoch began with.

    Args:
        total: Tokens in the row.
        length: Tokens of a window.
        batch_size: Windows of a batch.
        seed: Decides the order.
        rank: Which of the processes this is.
        ranks: How many processes train together.

    Raises:
        DataError: The row is shorter than one window.
    """

    def __init__(self, total: int, length: int, *, batch_size: int, seed: int, rank: int = 0, ranks: int = 1) -> None:
        if total < length:
            raise DataError(f"the corpus must fill one window of {length} tokens, got {total} tokens; add text")
        self._total, self._length, self._batch_size, self._seed = total, length, batch_size, seed
        self._rank, self._ranks = rank, ranks
        self.position = Position()
        self._planned = -1
        self._starts = np.zeros(0, dtype=np.int64)

    def next(self) -> np.ndarray:
        """Give where the next batch's windows start."""
        if self._planned != self.position.epoch:
            generator = np.random.default_rng((self._seed, self._length, self.position.epoch))
            shift = int(generator.integers(min(self._length, self._total - self._length + 1)))
            starts = np.arange(shift, self._total - self._length + 1, self._length)
            self._starts = generator.permutation(starts)
            self._planned = self.position.epoch
        first = (self.position.batch + self._rank) * self._batch_size
        chosen = self._starts[np.arange(first, first + self._batch_size) % len(self._starts)]
        self.position.batch += self._ranks
        if self.position.batch * self._batch_size >= len(self._starts):
            self.position = Position(self.position.epoch + 1, 0)
        return chosen


def hold_out(items: int) -> tuple[np.ndarray, np.ndarray]:
    """Part the items into some to measure on, of stores large enough to spare them, and those to train on."""
    numbers = np.arange(items)
    apart = numbers % _HELD_OUT_EACH == _HELD_OUT_EACH - 1 if items >= 10 * _HELD_OUT_EACH else numbers < 0
    apart &= apart.cumsum() <= _MOST_HELD_OUT
    return numbers[apart], numbers[~apart]


def pad(texts: list[np.ndarray], pad_id: int) -> dict[str, Any]:
    """Put token ids of texts into one matrix, padded at the end; "padded" tells, before a GPU is asked, if any is."""
    lengths = np.array([len(text) for text in texts])
    attention_mask = np.arange(lengths.max()) < lengths[:, None]
    input_ids = np.full(attention_mask.shape, pad_id, dtype=np.int64)
    input_ids[attention_mask] = np.concatenate(texts)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "attention_mask": torch.from_numpy(attention_mask),
        "padded": not attention_mask.all(),
    }
