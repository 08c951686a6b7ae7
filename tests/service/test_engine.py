import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from encoder import ModelSpec, SentenceEncoder
from encoder.sentence import Runtime
from encoder.tokenizer import TokenBatch
from service.engine import TEXTS_AT_ONCE, Embedded, Engine
from service.errors import InvalidError, ModelError, NotReadyError, OverloadedError

WORDS = "the river bank lent money to a squatch who eats pizza and naïve zażółć 東京 🍕 out of an oven"


def sentences(count: int, *, seed: int, longest: int = 23) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS.split(), k=draw.randint(0, longest))) for _ in range(count)]


def run(encoder: SentenceEncoder, scenario: Callable[[Engine], Coroutine[Any, Any, Any]], **limits: int) -> Any:
    """Run a scenario with an engine that is closed whatever happens."""

    async def whole() -> Any:
        engine = Engine(encoder, **({"max_batch_tokens": 2048, "max_queue_tokens": 100_000} | limits))
        try:
            return await asyncio.wait_for(scenario(engine), 300)
        finally:
            await engine.close(drain=False)

    return asyncio.run(whole())


class TableRuntime:
    """The simplest encoder: each token has a vector of its own, whatever stands beside it."""

    def __init__(self, spec: ModelSpec) -> None:
        rng = np.random.default_rng(7)
        self.table = rng.normal(size=(spec.config.vocab_size, spec.config.hidden_size)).astype(np.float32)
        self.batches: list[TokenBatch] = []
        self.threads: set[threading.Thread] = set()
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def embed(self, batch: TokenBatch) -> np.ndarray:
        hidden_states, mask = self.embed_tokens(batch), batch.attention_mask[..., None]
        return (hidden_states * mask).sum(axis=1) / mask.sum(axis=1, dtype=np.float32)

    def embed_tokens(self, batch: TokenBatch) -> np.ndarray:
        self.threads.add(threading.current_thread())
        self.batches.append(batch)
        self.entered.release()
        assert self.gate.wait(10)
        return self.table[batch.input_ids]

    async def wait_until_running(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=10)


@pytest.fixture
def table(tiny_spec: ModelSpec) -> TableRuntime:
    return TableRuntime(tiny_spec)


@pytest.fixture
def tiny(tiny_spec: ModelSpec, table: TableRuntime) -> SentenceEncoder:
    return SentenceEncoder(tiny_spec, fingerprint="tiny", runtime=table)


class GatedRuntime:
    """Another runtime that stops before its first batch until let go."""

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner
        self.gate = threading.Event()

    def embed(self, batch: TokenBatch) -> np.ndarray:
        assert self.gate.wait(10)
        return self._inner.embed(batch)

    def embed_tokens(self, batch: TokenBatch) -> np.ndarray:
        return self._inner.embed_tokens(batch)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_each_of_64_concurrent_requests_gets_what_the_encoder_gives_it_alone(shipped: SentenceEncoder) -> None:
    draw = random.Random(5)
    requests = [
        (
            sentences(draw.choice([1, 1, 1, 2, 3]), seed=n, longest=13),
            {
                "normalize": draw.random() < 0.7,
                "dimensions": draw.choice([None, 256, 127, 3]),
                "prompt": draw.choice([None, "", "query: "]),
            },
        )
        for n in range(64)
    ]

    async def scenario(engine: Engine) -> list[Embedded]:
        answers = await asyncio.gather(*(engine.embed(texts, **asked) for texts, asked in requests))
        assert engine.state().batches < len(requests)
        return answers

    for (texts, asked), answer in zip(requests, run(shipped, scenario), strict=True):
        expected = shipped.encode(texts, **asked)
        assert answer.vectors.shape == expected.shape
        assert answer.vectors.dtype == np.float32
        # Not normalised, a vector's length is about 5.
        assert np.abs(answer.vectors - expected).max() < (1e-5 if asked["normalize"] else 5e-5)


def test_one_batch_may_mix_dimensions_and_normalisation(shipped: SentenceEncoder) -> None:
    runtime = GatedRuntime(shipped._runtime)
    gated = SentenceEncoder(shipped.spec, fingerprint=shipped.fingerprint, runtime=runtime)
    settings = [{"dimensions": size, "normalize": normalize} for size in (5, 64, None) for normalize in (True, False)]
    texts = ["the bank of the river", "the bank lent money"]

    async def scenario(engine: Engine) -> list[Embedded]:
        first = asyncio.create_task(engine.embed(["pizza"]))
        await until(lambda: engine.state().running_batches == 1)
        answers = asyncio.gather(*(engine.embed(texts, **asked) for asked in settings))
        await until(lambda: engine.state().queued_requests == len(settings))
        runtime.gate.set()
        await first
        await answers
        assert engine.state().batches == 2
        return answers.result()

    for asked, answer in zip(settings, run(gated, scenario), strict=True):
        np.testing.assert_allclose(answer.vectors, shipped.encode(texts, **asked), atol=5e-6, rtol=1e-5)


def test_the_event_loop_answers_while_2048_texts_run(shipped: SentenceEncoder) -> None:
    texts = sentences(2048, seed=3)

    async def heartbeat(gaps: list[float]) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    async def single(engine: Engine, waits: list[float]) -> None:
        while True:
            begun = time.perf_counter()
            await engine.embed(["a short question"])
            waits.append(time.perf_counter() - begun)
            await asyncio.sleep(0.05)

    async def scenario(engine: Engine) -> None:
        gaps: list[float] = []
        waits: list[float] = []
        beside = [asyncio.create_task(heartbeat(gaps)), asyncio.create_task(single(engine, waits))]
        begun = time.perf_counter()
        answer = await engine.embed(texts)
        took = time.perf_counter() - begun
        for task in beside:
            task.cancel()
        assert answer.vectors.shape == (2048, 256)
        assert max(gaps) < 0.1
        assert len(waits) > 3
        assert sorted(waits)[len(waits) // 2] < took / 5

    run(shipped, scenario)


def test_token_vectors_are_those_of_the_encoder(shipped: SentenceEncoder) -> None:
    texts = ["the bank of the river", "", "pizza " * 300]

    async def scenario(engine: Engine) -> Any:
        return await asyncio.gather(engine.embed_tokens(texts), engine.embed(texts, normalize=False))

    per_token, pooled = run(shipped, scenario)
    for ours, expected, vector in zip(per_token, shipped.encode_tokens(texts), pooled.vectors, strict=True):
        assert (ours.tokens, ours.spans, ours.truncated) == (expected.tokens, expected.spans, expected.truncated)
        np.testing.assert_allclose(ours.vectors, expected.vectors, atol=5e-5)
        np.testing.assert_allclose(ours.vectors.mean(axis=0), vector, atol=5e-5)


def test_what_was_cut_or_unknown_is_told(tiny: SentenceEncoder) -> None:
    # At most 11 tokens, two of them special; "zebra" is not in the vocabulary.
    answer = run(tiny, lambda engine: engine.embed(["", "the zebra eats pizza", "bank " * 13]))
    assert list(answer.tokens) == [2, 6, 15]
    assert list(answer.tokens_used) == [2, 6, 11]
    assert list(answer.truncated) == [False, False, True]
    assert list(answer.unknown_share) == [0, 0.25, 0]


def test_tokenising_gives_the_whole_text(tiny: SentenceEncoder) -> None:
    texts = ["bank " * 13, *["eats pizza"] * TEXTS_AT_ONCE]
    whole, *others = run(tiny, lambda engine: engine.tokenize(texts))
    assert len(whole.input_ids) == 15
    assert [whole.spans[n] for n in (0, 1, 13, 14)] == [(0, 0), (0, 4), (60, 64), (0, 0)]
    assert others == tiny.tokenizer.encode(texts[1:], spans=True)


def test_a_longer_text_is_an_error_when_it_is_not_to_be_cut(tiny: SentenceEncoder, table: TableRuntime) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(InvalidError, match="text 1 must have at most 11 tokens when it is not to be cut, got 12"):
            await engine.embed(["bank " * 9, "bank " * 10, "bank " * 11], truncate=False)
        assert (await engine.embed(["bank " * 9], truncate=False)).vectors.shape == (1, 14)

    run(tiny, scenario)
    assert len(table.batches) == 1


@pytest.mark.parametrize("index", [0, TEXTS_AT_ONCE - 1, TEXTS_AT_ONCE, 3 * TEXTS_AT_ONCE + 5])
def test_a_text_that_is_none_is_named_by_its_index(tiny: SentenceEncoder, index: int) -> None:
    texts = ["pizza"] * (4 * TEXTS_AT_ONCE)
    texts[index] = "oven\ud83d"

    async def scenario(engine: Engine) -> None:
        for embed in (engine.embed, engine.embed_tokens):
            with pytest.raises(InvalidError, match=f"^text {index} must be Unicode text, .* at character 4"):
                await embed(texts)

    run(tiny, scenario)


def test_what_is_no_str_is_named_by_its_index(run_python: Callable[[str], str]) -> None:
    said = run_python("""
        import asyncio
        from encoder import SentenceEncoder, default_model_dir
        from encoder.model_dir import read_spec
        from service.engine import Engine
        from service.errors import InvalidError

        async def main():
            encoder = SentenceEncoder(read_spec(default_model_dir()), fingerprint="", runtime=None)
            engine = Engine(encoder, max_batch_tokens=512, max_queue_tokens=512)
            try:
                await engine.embed(["pizza"] * 100 + [None])
            except InvalidError as error:
                print(error)
            await engine.close()

        asyncio.run(main())
    """)
    assert said == "text 100 must be a str, got NoneType"


def test_one_str_is_not_taken_for_its_characters(tiny: SentenceEncoder) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(TypeError, match="put it into a list"):
            await engine.embed("pizza")

    run(tiny, scenario)


@pytest.mark.parametrize("dimensions", [0, -1, 15, True])
def test_dimensions_must_fit(tiny: SentenceEncoder, dimensions: int) -> None:
    async def scenario(engine: Engine) -> None:
        with pytest.raises(InvalidError, match="dimensions must be between 1 and 14, got"):
            await engine.embed(["pizza"], dimensions=dimensions)
        assert (await engine.embed(["pizza"], dimensions=np.int64(3))).vectors.shape == (1, 3)

    run(tiny, scenario)


def test_the_default_prompt_is_put_before_unless_another_is_asked_for(
    tiny_spec: ModelSpec, table: TableRuntime
) -> None:
    encoder = SentenceEncoder(replace(tiny_spec, default_prompt="query"), fingerprint="tiny", runtime=table)

    async def scenario(engine: Engine) -> list[Sequence[int]]:
        return [(await engine.embed(["eats"], prompt=prompt)).tokens for prompt in (None, "", "a b ")]

    assert run(encoder, scenario) == [[5], [3], [5]]
    assert [len(batch.input_ids[0]) for batch in table.batches] == [5, 3, 5]


def test_no_texts_have_no_vectors(tiny: SentenceEncoder) -> None:
    async def scenario(engine: Engine) -> None:
        assert (await engine.embed([], dimensions=5)).vectors.shape == (0, 5)
        assert await engine.embed_tokens([]) == []

    run(tiny, scenario)


def test_a_vector_that_is_not_finite_fails_its_own_request_alone(tiny: SentenceEncoder, table: TableRuntime) -> None:
    table.table[tiny.tokenizer.encode(["pizza"])[0].input_ids[1]] = np.nan
    table.gate.clear()

    async def scenario(engine: Engine) -> list[Any]:
        asked = [asyncio.create_task(engine.embed(["river"]))]
        await table.wait_until_running()
        for call in (engine.embed, engine.embed_tokens):
            asked += [asyncio.create_task(call(texts)) for texts in (["bank", "pizza"], ["bank", "oven"])]
        await until(lambda: engine.state().queued_requests == 4)
        table.gate.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert engine.state().batches == 2
        return answers

    _, bad, good, bad_tokens, good_tokens = run(tiny, scenario)
    for error in (bad, bad_tokens):
        assert isinstance(error, ModelError)
        assert "not finite" in str(error)
    np.testing.assert_allclose(good.vectors, tiny.encode(["bank", "oven"]), atol=1e-6)
    assert [list(text.tokens) for text in good_tokens] == [["[CLS]", word, "[SEP]"] for word in ("bank", "oven")]


def test_a_vector_without_length_cannot_be_normalised(tiny: SentenceEncoder, table: TableRuntime) -> None:
    table.table[:, 0] = 0

    async def scenario(engine: Engine) -> None:
        with pytest.raises(ModelError, match="text 0 has length 0 and cannot be normalised"):
            await engine.embed(["pizza", "oven"], dimensions=1)
        assert not (await engine.embed(["pizza"], dimensions=1, normalize=False)).vectors.any()
        assert (await engine.embed(["pizza"], dimensions=2)).vectors.shape == (1, 2)

    run(tiny, scenario)


def test_a_full_engine_refuses_before_it_tokenises(tiny: SentenceEncoder, table: TableRuntime) -> None:
    table.gate.clear()

    async def scenario(engine: Engine) -> None:
        bulk = asyncio.create_task(engine.embed(["pizza"] * 500))
        await table.wait_until_running()
        with pytest.raises(OverloadedError):
            await engine.embed(["\ud83d"])
        table.gate.set()
        assert (await bulk).vectors.shape == (500, 14)

    run(tiny, scenario, max_batch_tokens=11, max_queue_tokens=100)


def test_a_caller_that_left_costs_no_model_work(tiny: SentenceEncoder, table: TableRuntime) -> None:
    table.gate.clear()

    async def scenario(engine: Engine) -> None:
        first = asyncio.create_task(engine.embed(["pizza"]))
        await table.wait_until_running()
        left = asyncio.create_task(engine.embed(["oven"] * 100))
        await until(lambda: engine.state().queued_requests == 1)
        left.cancel()
        await until(lambda: engine.state().dropped_requests == 1)
        table.gate.set()
        await first

    run(tiny, scenario)
    assert len(table.batches) == 1
    assert threading.main_thread() not in table.threads


def test_closing_answers_what_is_queued_and_leaves_no_thread(tiny: SentenceEncoder, table: TableRuntime) -> None:
    table.gate.clear()
    threads = set(threading.enumerate())

    async def scenario(engine: Engine) -> None:
        asked = [asyncio.create_task(engine.embed(["pizza"]))]
        await table.wait_until_running()
        asked += [asyncio.create_task(engine.embed(["pizza"] * size)) for size in (100, 7)]
        await until(lambda: engine.state().queued_requests == 2)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        for call in (engine.embed, engine.embed_tokens):
            with pytest.raises(NotReadyError):
                await call(["pizza"])
        table.gate.set()
        await closing
        assert [len((await task).vectors) for task in asked] == [1, 100, 7]

    run(tiny, scenario)
    assert set(threading.enumerate()) <= threads


def test_closing_fails_what_is_still_being_tokenised(tiny: SentenceEncoder) -> None:
    async def scenario(engine: Engine) -> None:
        asked = asyncio.create_task(engine.embed(["pizza"] * 100 * TEXTS_AT_ONCE))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(NotReadyError):
            await asked

    run(tiny, scenario)


def test_a_batch_must_hold_the_longest_text(tiny: SentenceEncoder) -> None:
    with pytest.raises(ValueError, match=r"max_batch_tokens must be at least .*\(11\), got 10; raise NEARSENSE_"):
        Engine(tiny, max_batch_tokens=10, max_queue_tokens=10)
