"""Whether the service is of use: retrieval and sentiment through its HTTP interface, before and after a restart.

    python -m benchmarks.quality retrieval CORPUS QUERIES QRELS
    python -m benchmarks.quality sentiment TRAIN DEV

CORPUS and QUERIES hold one JSON object a line with _id and text; QRELS (query_id, doc_id, relevance), TRAIN and DEV
(label, sentence) are tab-separated with a header and no quoting. Names that end in .gz are unpacked. Cranfield and
SST-2 are what the two bounds are for: nDCG@10 of at least 0.35 (a relevance above 0 counts as 1), and an accuracy of at
least 0.75 after 2,000 examples. Below its bound, or where a restart changes an answer, a command fails.

Each command starts a service of its own on a temporary data directory, with the model that NEARSENSE_MODEL names. The
bounds are for all-MiniLM-L6-v2.
"""

import argparse
import gzip
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from training.metrics import ndcg

LEAST_NDCG = 0.35
LEAST_ACCURACY = 0.75
EXAMPLES = 2000
DOCUMENTS_AT_ONCE = 100
TEXTS_AT_ONCE = 32
# Between batches of other shape; the vectors of a text agree within this.
TOLERANCE = 1e-5
START_S = 60.0


@contextmanager
def serving(data: Path, *arguments: str) -> Iterator[httpx.Client]:
    """Run `nearsense serve` on a data directory and give a client of it; the process ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "service", "serve", "--data", str(data), "--port", str(port), *arguments]
    process = subprocess.Popen(command, env={"NEARSENSE_LOG_LEVEL": "warning", **os.environ})
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
            _wait_until_ready(process, client)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> None:
    give_up = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    raise SystemExit(f"the service was not ready within {START_S:.0f} s")


def _read(file: Path) -> list[str]:
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        return [line.rstrip("\n") for line in lines]


def _read_texts(file: Path) -> dict[str, str]:
    return {row["_id"]: row["text"] for row in map(json.loads, _read(file))}


def _read_table(file: Path, *columns: str) -> list[tuple[str, ...]]:
    header, *rows = (line.split("\t") for line in _read(file))
    places = [header.index(column) for column in columns]
    return [tuple(row[place] for place in places) for row in rows]


def _require(*, met: bool, rule: str) -> None:
    if not met:
        raise SystemExit(f"failed: {rule}")


def _answer(response: httpx.Response) -> Any:
    _require(met=response.is_success, rule=f"a status of 2xx, got {response.status_code}: {response.text[:300]}")
    return response.json()


def add_documents(client: httpx.Client, texts: dict[str, str]) -> int:
    """Add documents to the collection `cranfield` and give the number of those that were cut."""
    documents = [{"id": key, "text": text} for key, text in texts.items()]
    cut = 0
    for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
        batch = documents[start : start + DOCUMENTS_AT_ONCE]
        response = client.post("/collections/cranfield/documents", json=batch)
        _require(met=_answer(response)["ids"] == [each["id"] for each in batch], rule="each id as it was given")
        cut += int(response.headers.get("x-truncated-inputs", 0))
    return cut


def search(client: httpx.Client, queries: dict[str, str]) -> tuple[dict[str, Any], list[float]]:
    """Give the ten nearest documents of each query, as the service tells it, and the seconds of each answer."""
    found, seconds = {}, []
    for key, text in queries.items():
        start = time.perf_counter()
        response = client.post("/search", json={"query": text, "collection": "cranfield", "k": 10})
        seconds.append(time.perf_counter() - start)
        found[key] = _answer(response)["results"]
    return found, seconds


def retrieval(corpus: Path, queries_file: Path, qrels: Path, data: Path) -> None:
    """Print how well the documents that a query is about are found."""
    texts, queries = _read_texts(corpus), _read_texts(queries_file)
    given = {key: text for key, text in texts.items() if text}  # the service takes no empty text
    relevant: dict[str, set[str]] = defaultdict(set)
    for query, document, relevance in _read_table(qrels, "query_id", "doc_id", "relevance"):
        if int(relevance) > 0:
            relevant[query].add(document)

    with serving(data) as client:
        start = time.perf_counter()
        cut = add_documents(client, given)
        taken = time.perf_counter() - start
        found, seconds = search(client, queries)
        count = _answer(client.get("/collections/cranfield"))["count"]
    print(f"documents: {len(texts)}, {len(texts) - len(given)} of them empty and left out, {cut} cut, {count} stored")
    print(f"added in {taken:.1f} s, {count / taken:.0f} documents/s")
    print(f"queries: {len(queries)}, {1000 * statistics.median(seconds):.1f} ms each (median)")
    gains = [
        ndcg(np.array([float(each["id"] in relevant[query]) for each in found[query]]), len(relevant[query]))
        for query in queries
        if relevant[query]
    ]
    score = statistics.fmean(gains)
    print(f"nDCG@10: {score:.4f} over {len(gains)} queries (bound: {LEAST_NDCG})")

    with serving(data) as client:
        again, _ = search(client, queries)
    same = sum(again[query] == results for query, results in found.items())
    print(f"after a restart: {same} of {len(queries)} answers identical")
    _require(met=count == len(given), rule="every document is stored")
    _require(met=score >= LEAST_NDCG, rule=f"nDCG@10 of at least {LEAST_NDCG}")
    _require(met=same == len(queries), rule="a restart changes no answer")


def classify(client: httpx.Client, texts: list[str]) -> list[dict[str, Any]]:
    """Give the answer of the classifier `sentiment` for each text."""
    answers = []
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        body = {"inputs": texts[start : start + TEXTS_AT_ONCE], "classifier": "sentiment"}
        answers += _answer(client.post("/classify", json=body))
    return answers


def sentiment(train: Path, dev: Path, data: Path) -> None:
    """Print how often a classifier that was taught over the interface is right."""
    rows = _read_table(train, "label", "sentence")
    random.Random(0).shuffle(rows)
    examples = [{"text": text, "label": label} for label, text in rows[:EXAMPLES]]
    labels, texts = (list(column) for column in zip(*_read_table(dev, "label", "sentence"), strict=True))

    with serving(data) as client:
        start = time.perf_counter()
        taught = _answer(client.put("/classifiers/sentiment", json={"examples": examples, "C": 1.0}))
        taken = time.perf_counter() - start
        answers = classify(client, texts)
    print(f"taught: {taught['details']['examples']} examples, labels {', '.join(taught['labels'])}, in {taken:.1f} s")
    accuracy = statistics.fmean(answer["label"] == label for answer, label in zip(answers, labels, strict=True))
    print(f"accuracy: {accuracy:.4f} over {len(texts)} sentences (bound: {LEAST_ACCURACY})")

    with serving(data) as client:
        again = classify(client, texts)
    pairs = list(zip(answers, again, strict=True))
    same = sum(before["label"] == after["label"] for before, after in pairs)
    largest = max(
        abs(before["scores"][key] - after["scores"][key]) for before, after in pairs for key in taught["labels"]
    )
    print(f"after a restart: {same} of {len(texts)} labels identical, scores within {largest:.1e}")
    _require(met=accuracy >= LEAST_ACCURACY, rule=f"an accuracy of at least {LEAST_ACCURACY}")
    _require(met=same == len(texts) and largest <= TOLERANCE, rule="a restart changes no answer")


def main() -> None:
    """Measure one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    for name, files in {"retrieval": ("corpus", "queries", "qrels"), "sentiment": ("train", "dev")}.items():
        task = tasks.add_parser(name)
        for file in files:
            task.add_argument(file, type=Path, metavar=file.upper())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        if options.task == "retrieval":
            retrieval(options.corpus, options.queries, options.qrels, data)
        else:
            sentiment(options.train, options.dev, data)


if __name__ == "__main__":
    main()
