"""What HTTP costs: the service's tokens per second beside those of the encoder alone, and the latency when idle.

    python -m benchmarks.http STS.tsv [--model DIR] [--threads 2] [--rounds 7]

STS.tsv is the STS-Benchmark test split, as in benchmarks.engine; every third sentence is used, so that there are many
rounds in half a minute. Four client threads, in a process apart from the service, keep a connection each and post the
sentences to /embed in batches of 32. They read every answer to its end and parse none. Beside them
`SentenceEncoder.encode` takes the same sentences, in one call and in calls of 32, in a process of its own with as many
threads. The sides take turns, a ratio is within a round, each figure is the median of the rounds, and before them all
vectors are compared. The clients' own processor time is taken from the same processors, and so is shown.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine import read_pairs
from benchmarks.quality import serving
from encoder import SentenceEncoder, default_model_dir

TEXTS_AT_ONCE = 32
CLIENT_THREADS = 4
EVERY = 3
GOAL = 0.80
TOLERANCE = 1e-5
SINGLES = 300
SHORT = "Pizza is great."


def encode_when_asked(asked: Connection, texts: list[str], model: Path, threads: int) -> None:
    """Tell the tokens and vectors of the texts; then, for each size of a call, the seconds that all of them take."""
    torch.set_num_threads(threads)
    encoder = SentenceEncoder.load(model)
    tokens = sum(len(text.input_ids) for text in encoder.tokenizer.encode(texts))
    asked.send((tokens, encoder.encode(texts)))
    while size := asked.recv():
        start = time.perf_counter()
        for first in range(0, len(texts), size):
            encoder.encode(texts[first : first + size])
        asked.send(time.perf_counter() - start)


class Clients:
    """Threads that keep a connection each for as long as a call lasts: the service closes those left idle."""

    def __init__(self, port: int, texts: list[str]) -> None:
        batches = [texts[start : start + TEXTS_AT_ONCE] for start in range(0, len(texts), TEXTS_AT_ONCE)]
        self._bodies = [json.dumps({"inputs": batch}).encode() for batch in batches]
        self._port = port
        self.processor_s: list[float] = []
        """Processor time of each call of `embed`."""

    def embed(self) -> list[bytes]:
        """Post all batches and give the answers in their order."""
        answers = [b""] * len(self._bodies)
        waiting = iter(range(len(self._bodies)))  # an iterator that threads may share

        def work() -> None:
            with closing(HTTPConnection("127.0.0.1", self._port, timeout=600)) as connection:
                for row in waiting:
                    answers[row] = post(connection, self._bodies[row])

        start = time.process_time()
        with ThreadPoolExecutor(CLIENT_THREADS) as pool:
            for thread in [pool.submit(work) for _ in range(CLIENT_THREADS)]:
                thread.result()
        self.processor_s.append(time.process_time() - start)
        return answers


def post(connection: HTTPConnection, body: bytes) -> bytes:
    """Post a body to /embed and give the answer's."""
    connection.request("POST", "/embed", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise SystemExit(f"failed: /embed answered {response.status}: {answer[:300]!r}")
    return answer


def seconds_of(call: Callable[[], object]) -> float:
    """Give the seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def print_latency(port: int) -> None:
    """Print how long a service that has nothing else to do takes for one short sentence."""
    connection = HTTPConnection("127.0.0.1", port, timeout=600)
    body = json.dumps({"inputs": SHORT}).encode()
    taken = [1000 * seconds_of(lambda: post(connection, body)) for _ in range(SINGLES + 20)][20:]
    p50, p99 = np.percentile(taken, [50, 99])
    print(f"one short sentence, idle: p50 {p50:.1f} ms, p99 {p99:.1f} ms ({SINGLES} requests)")


def print_rates(clients: Clients, asked: Connection, tokens: int, rounds: int, texts: int) -> None:
    """Measure both sides in turn and print one row each."""
    alone, alone_in_32, served, processor_share = [], [], [], []
    for _ in range(rounds):
        for size, taken in ((texts, alone), (TEXTS_AT_ONCE, alone_in_32)):
            asked.send(size)
            taken.append(asked.recv())
        served.append(seconds_of(clients.embed))
        processor_share.append(clients.processor_s[-1] / served[-1])
    rows = {
        "SentenceEncoder.encode, all at once": alone,
        f"SentenceEncoder.encode, {TEXTS_AT_ONCE} at a time": alone_in_32,
        f"POST /embed, {TEXTS_AT_ONCE} at a time, {CLIENT_THREADS} clients": served,
    }
    print("| | tokens/s | ratio | of the rounds |\n|---|---|---|---|")
    for name, seconds in rows.items():
        ratios = [base / own for base, own in zip(alone, seconds, strict=True)]
        speed = f"{tokens / statistics.median(seconds):,.0f}"
        print(f"| {name} | {speed} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} |")
    print(f"\nratio of the last: goal {GOAL:.2f}; clients used {statistics.median(processor_share):.2f} processors\n")


def main() -> None:
    """Print a row per side, and the latency."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sts", type=Path)
    parser.add_argument("--model", type=Path, default=default_model_dir())
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    texts = read_pairs(options.sts)[0][::EVERY]

    processes = multiprocessing.get_context("spawn")
    asked, theirs = processes.Pipe()
    alone = processes.Process(
        target=encode_when_asked, args=(theirs, texts, options.model, options.threads), daemon=True
    )
    alone.start()
    tokens, expected = asked.recv()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder) / "data", "--threads", str(options.threads), "--model", str(options.model)) as client,
    ):
        port = client.base_url.port or 80
        clients = Clients(port, texts)
        vectors = np.array([row for answer in clients.embed() for row in json.loads(answer)])
        difference = np.abs(vectors - expected).max()
        print(f"{len(texts)} sentences, {tokens} tokens, {options.threads} threads, median of {options.rounds} rounds;")
        print(f"largest difference between the sides' vectors: {difference:.1e}\n")
        if difference > TOLERANCE:
            raise SystemExit(f"failed: the vectors must agree within {TOLERANCE}")
        print_rates(clients, asked, tokens, options.rounds, len(texts))
        print_latency(port)
    asked.send(0)
    alone.join(10)


if __name__ == "__main__":
    main()
