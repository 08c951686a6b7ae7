"""Heads that came with the model beside those that were taught."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from serving import Server

from encoder import SentenceEncoder
from encoder.classifier import ClassifierHead, write_head

POSITIVE, NEGATIVE = "It is wonderful, I love it.", "It is terrible, I hate it."


@pytest.fixture
def head(shipped: SentenceEncoder) -> ClassifierHead:
    """What tells one of two sentences from the other, sure of itself."""
    weights = 20 * shipped.encode([NEGATIVE, POSITIVE])
    return ClassifierHead(
        labels=("negative", "positive"),
        weights=weights,
        biases=np.zeros(2, dtype=np.float32),
        fingerprint=shipped.fingerprint,
        temperature=4.0,
        details={"examples": 2},
    )


@pytest.fixture
def model_dir(shipped_dir: Path, tmp_path: Path) -> Path:
    return shutil.copytree(shipped_dir, tmp_path / "model", ignore=shutil.ignore_patterns("heads"))


def teach(server: Server, name: str) -> dict:
    """Teach the opposite of the truth, to tell it from the head that came with the model."""
    examples = [{"text": POSITIVE, "label": "negative"}, {"text": NEGATIVE, "label": "positive"}]
    answer = server.client.put(f"/classifiers/{name}", json={"examples": examples})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_head_of_the_model_decides_until_another_is_taught(
    start_server: Callable[..., Server], head: ClassifierHead, model_dir: Path, shipped: SentenceEncoder
) -> None:
    write_head(model_dir / "heads" / "sentiment", head)
    server = start_server(model=str(model_dir))
    (described,) = server.client.get("/classifiers").json()["classifiers"]
    assert described == {
        "name": "sentiment",
        "labels": ["negative", "positive"],
        "fingerprint": shipped.fingerprint,
        "shipped": True,
        "temperature": 4.0,
        "details": {"examples": 2},
    }

    def classify() -> dict:
        return server.client.post("/classify", json={"inputs": [POSITIVE]}).json()[0]

    assert classify()["label"] == "positive"
    expected = head.probabilities(shipped.encode([POSITIVE]))[0]
    assert list(classify()["scores"].values()) == pytest.approx(expected, abs=1e-4)

    refused = server.client.delete("/classifiers/sentiment")
    assert refused.status_code == 409
    assert "came with the model" in refused.json()["error"]

    assert not teach(server, "sentiment")["shipped"]
    assert classify()["label"] == "negative"
    server.stop()
    server.start()
    assert classify()["label"] == "negative"
    assert server.client.delete("/classifiers/sentiment").status_code == 204
    assert classify()["label"] == "positive"
    assert server.client.get("/classifiers/sentiment").json() == described


def test_a_head_of_another_model_is_listed_and_refused(
    start_server: Callable[..., Server], head: ClassifierHead, model_dir: Path
) -> None:
    write_head(model_dir / "heads" / "sentiment", replace(head, fingerprint="0" * 64))
    server = start_server(model=str(model_dir))
    assert server.client.get("/classifiers/sentiment").json()["fingerprint"] == "0" * 64
    refused = server.client.post("/classify", json={"inputs": ["a"]})
    assert refused.status_code == 409
    assert "0" * 64 in refused.json()["error"]


def test_a_damaged_head_is_told_at_the_start(
    start_server: Callable[..., Server], head: ClassifierHead, model_dir: Path
) -> None:
    write_head(model_dir / "heads" / "sentiment", head)
    (model_dir / "heads" / "sentiment" / "head.safetensors").write_bytes(b"")
    with pytest.raises(pytest.fail.Exception, match="is damaged"):
        start_server(model=str(model_dir))


def test_modules_in_the_working_directory_are_not_run(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server = start_server()
    for name in ("numpy.py", "service.py", "sklearn.py"):
        (tmp_path / name).write_text(f"open({str(tmp_path / 'run')!r}, 'w').write(__name__)")
    teach(server, "topic")
    assert not (tmp_path / "run").exists()


def test_files_that_are_no_classifiers_are_left_alone(start_server: Callable[..., Server]) -> None:
    server = start_server()
    teach(server, "topic")
    for stray in ("classifiers/.DS_Store", "classifiers/notes.txt", "classifiers/topic/.DS_Store"):
        (server.data / stray).write_text("")
    server.kill()
    server.start()
    listed = server.client.get("/classifiers").json()["classifiers"]
    assert [each["name"] for each in listed if not each["shipped"]] == ["topic"]


def test_a_classifier_that_cannot_be_stored_is_told_and_the_former_serves(start_server: Callable[..., Server]) -> None:
    server = start_server()
    teach(server, "topic")
    folder = server.data / "classifiers" / "topic"
    folder.rename(folder.with_name("away"))
    folder.write_text("")  # a file where a directory should be: no permission, which root would have anyway
    examples = [{"text": "a", "label": "x"}, {"text": "b", "label": "y"}]
    answer = server.client.put("/classifiers/topic", json={"examples": examples})
    assert answer.status_code == 503
    assert "could not be stored" in answer.json()["error"]
    body = {"inputs": [POSITIVE], "classifier": "topic"}
    assert server.client.post("/classify", json=body).json()[0]["label"] == "negative"


def test_the_model_that_ships_knows_good_reviews_from_bad(server: Server) -> None:
    texts = {
        "I love it, it works perfectly and arrived a day early.": "positive",
        "One of the best films I have seen in years.": "positive",
        "The acting is wooden and the plot makes no sense.": "negative",
        "A waste of two hours, dull from beginning to end.": "negative",
    }
    described = server.client.get("/classifiers/sentiment").json()
    assert described["shipped"]
    assert described["labels"] == ["negative", "positive"]
    assert described["details"]["figures"]["sst2_dev"]["accuracy"] >= 0.75
    answers = server.client.post("/classify", json={"inputs": list(texts)}).json()
    assert [answer["label"] for answer in answers] == list(texts.values())
