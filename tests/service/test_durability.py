"""What was answered is there, however the process ends."""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from serving import Server

from service.store import Store

ROUNDS = 5


def write_until_the_end(server: Server, writer: int, acknowledged: list[str], stop: threading.Event) -> None:
    """Store documents one call after another; note what was answered, until nobody answers."""
    number = 0
    with httpx.Client(base_url=server.url, timeout=30) as client:
        while not stop.is_set():
            ids = [f"{writer}-{len(acknowledged)}-{number}-{row}" for row in range(random.choice([1, 2, 7]))]
            number += 1
            body = [{"id": each, "text": f"document {each}", "metadata": {"writer": writer}} for each in ids]
            try:
                answer = client.post("/collections/kept/documents", json=body)
            except httpx.TransportError:
                return
            assert answer.status_code == 201
            acknowledged += ids


def kill_in_the_middle_of_writes(server: Server, acknowledged: list[str]) -> None:
    stop = threading.Event()
    lists: list[list[str]] = [[], [], []]
    known = len(acknowledged)
    writers = [
        threading.Thread(target=write_until_the_end, args=(server, known * 10 + row, lists[row], stop))
        for row in range(3)
    ]
    for writer in writers:
        writer.start()
    time.sleep(random.uniform(0.1, 0.8))
    server.kill()
    stop.set()
    for writer in writers:
        writer.join()
    acknowledged += [each for part in lists for each in part]


def assert_all_there(server: Server, acknowledged: list[str]) -> None:
    stored: list[dict] = []
    page = [{}]
    while page:
        after = {"after": stored[-1]["id"]} if stored else {}
        answer = server.client.get("/collections/kept/documents", params={"limit": 1000, **after})
        page = answer.json()["documents"]
        stored += page
    texts = {document["id"]: document["text"] for document in stored}
    for each in acknowledged:
        assert texts[each] == f"document {each}"
    for each in random.sample(acknowledged, min(5, len(acknowledged))):
        found = server.client.post("/search", json={"id": each, "collection": "kept", "k": 1}).json()["results"]
        assert found[0]["score"] == pytest.approx(1, abs=1e-5)
    # Store and index agree: a search finds as many as there are, each of them once.
    found = server.client.post("/search", json={"query": "document", "collection": "kept", "k": 10_000}).json()[
        "results"
    ]
    assert sorted(each["id"] for each in found) == sorted(texts)


@pytest.mark.parametrize("rounds", [ROUNDS, pytest.param(20, marks=pytest.mark.slow)])
def test_a_kill_loses_nothing_that_was_answered(start_server: Callable[..., Server], rounds: int) -> None:
    server = start_server()
    assert server.client.put("/collections/kept").status_code == 200
    acknowledged: list[str] = []
    for _ in range(rounds):
        kill_in_the_middle_of_writes(server, acknowledged)
        server.start()
        assert_all_there(server, acknowledged)
    assert len(acknowledged) > 5 * rounds


def test_every_commit_reaches_the_disk(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        assert store._database._writer.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert store._database._writer.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_second_process_is_told_who_has_the_directory(start_server: Callable[..., Server]) -> None:
    server = start_server()
    with pytest.raises(pytest.fail.Exception, match=rf"(?s)in use.*{server.process.pid}|{server.process.pid}.*"):
        Server(server.data)
    assert server.client.get("/ready").status_code == 200


def test_a_classifier_survives_and_is_replaced_whole(start_server: Callable[..., Server]) -> None:
    server = start_server()

    def teach(yes: str, no: str) -> dict:
        examples = [{"text": yes, "label": "yes"}, {"text": no, "label": "no"}]
        return server.client.put("/classifiers/topic", json={"examples": examples}).json()

    def label(text: str) -> str:
        return server.client.post("/classify", json={"inputs": text, "classifier": "topic"}).json()[0]["label"]

    teach("a pizza with cheese", "a bank with money")
    assert label("pasta with tomatoes") == "yes"
    server.kill()
    server.start()
    assert label("pasta with tomatoes") == "yes"
    described = teach("a bank with money", "a pizza with cheese")
    assert label("pasta with tomatoes") == "no"
    server.kill()
    server.start()
    assert label("pasta with tomatoes") == "no"
    assert server.client.get("/classifiers/topic").json() == described
    assert server.client.delete("/classifiers/topic").status_code == 204
    server.kill()
    server.start()
    assert server.client.get("/classifiers/topic").status_code == 404
