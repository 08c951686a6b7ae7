"""Many clients at once: each gets its own right answer, in turn, or is told to come back."""

import itertools
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest
from serving import Server

from encoder import SentenceEncoder

CLIENTS = 64
SUBJECTS = ("The pizza", "A river", "My neighbour", "The bank", "Squatch", "An old train")
VERBS = ("came out of", "lent money to", "looked at", "ran away from", "was nothing like", "remembered")
OBJECTS = ("the oven", "the garden", "a small firm", "the mountain", "everybody I know", "it")
SENTENCES = [" ".join(words) + "." for words in itertools.product(SUBJECTS, VERBS, OBJECTS)]


@pytest.fixture(scope="module")
def vectors(shipped: SentenceEncoder) -> dict[str, np.ndarray]:
    return dict(zip(SENTENCES, shipped.encode(SENTENCES), strict=True))


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, 100 * share))


def ask(client: httpx.Client, texts: list[str]) -> tuple[int, float, list[list[float]]]:
    start = time.perf_counter()
    answer = client.post("/embed", json={"inputs": texts})
    taken = time.perf_counter() - start
    if answer.status_code == 429:
        assert int(answer.headers["retry-after"]) >= 1
        return 429, taken, []
    return answer.status_code, taken, answer.json()


def ask_until(server: Server, vectors: dict[str, np.ndarray], end: float, seed: int) -> list[int]:
    """Mix single and 32-text requests; hold each answer against the right vectors."""
    draw = random.Random(seed)
    statuses = []
    with httpx.Client(base_url=server.url, timeout=120) as client:
        while time.monotonic() < end:
            texts = draw.sample(SENTENCES, draw.choice([1, 32]))
            status, _, answer = ask(client, texts)
            statuses.append(status)
            if status == 200:
                expected = np.stack([vectors[text] for text in texts])
                assert np.abs(np.array(answer) - expected).max() <= 1e-5
    return statuses


@pytest.mark.parametrize("seconds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_every_client_gets_its_own_answer(
    start_server: Callable[..., Server], vectors: dict[str, np.ndarray], seconds: int
) -> None:
    server = start_server()
    end = time.monotonic() + seconds
    health: list[float] = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(ask_until, server, vectors, end, seed) for seed in range(CLIENTS)]
        while time.monotonic() < end:
            start = time.perf_counter()
            assert server.client.get("/health").status_code == 200
            health.append(time.perf_counter() - start)
            time.sleep(0.05)
        statuses = [status for client in clients for status in client.result()]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) > CLIENTS
    # The clients share the processors with the server and its model, so this is theirs as much as its own.
    print(f"{len(statuses)} answers, /health p99 {1000 * percentile(health, 0.99):.0f} ms")
    assert percentile(health, 0.5) < 0.1


@pytest.mark.parametrize(("most", "singles"), [(20, 20), pytest.param(5, 100, marks=pytest.mark.slow)])
def test_a_single_text_does_not_wait_behind_2048(server: Server, most: float, singles: int) -> None:
    """The request of 2,048 texts is repeated for as long as it takes to measure.

    Its answers are not parsed: that holds this process, and so the measured client, for a tenth of a second.
    """
    client = server.client
    idle = [ask(client, [SENTENCES[row]])[1] for row in range(singles)]
    done = threading.Event()
    texts = [SENTENCES[row % len(SENTENCES)] for row in range(2048)]

    def bulk() -> None:
        with httpx.Client(base_url=server.url, timeout=300) as other:
            while not done.is_set():
                assert other.post("/embed", json={"inputs": texts}).status_code == 200

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(bulk)
        time.sleep(0.5)
        busy = []
        for row in range(singles):
            busy.append(ask(client, [SENTENCES[row]])[1])
            time.sleep(0.05)
        done.set()
        running.result()
    p50, p99 = percentile(idle, 0.5), percentile(busy, 0.99)
    print(f"idle p50 {1000 * p50:.1f} ms, p99 beside 2,048 texts {1000 * p99:.1f} ms, {p99 / p50:.1f} times")
    assert p99 < most * p50


def test_a_full_queue_says_when_to_come_back_and_an_idle_one_is_never_full(start_server: Callable[..., Server]) -> None:
    server = start_server(max_queue_tokens="600")
    with ThreadPoolExecutor(CLIENTS) as pool:
        statuses = list(pool.map(lambda _: httpx_status(server, SENTENCES[:64]), range(CLIENTS)))
    assert set(statuses) == {200, 429}
    for _ in range(5):  # far more than may wait, from an idle server
        assert httpx_status(server, SENTENCES) == 200
    metrics = server.client.get("/metrics").text
    assert f'route="/embed",status="429"}} {statuses.count(429)}.0' in metrics


def httpx_status(server: Server, texts: list[str]) -> int:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        return ask(client, texts)[0]


def test_a_client_that_leaves_takes_its_work_along(start_server: Callable[..., Server]) -> None:
    server = start_server()
    body = httpx.Request("POST", server.url, json={"inputs": [f"{text} {n}" for n in range(40) for text in SENTENCES]})
    head = "POST /embed HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body.content)}"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body.content)
        time.sleep(1)

    def metric(name: str) -> float:
        lines = server.client.get("/metrics").text.splitlines()
        return float(next(line for line in lines if line.startswith(f"nearsense_{name} ")).split()[1])

    for _ in range(100):
        if metric("dropped_requests") == 1:
            break
        time.sleep(0.05)
    assert metric("dropped_requests") == 1
    assert metric("queued_tokens") == 0
    assert server.client.post("/embed", json={"inputs": "still there?"}).status_code == 200
