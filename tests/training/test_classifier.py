import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from serving import Server

from encoder import SentenceEncoder
from encoder.classifier import read_heads
from training.classifier import ClassifierRun, find_temperature, train_classifier
from training.config import RunError
from training.data import Corpus

ROWS = Corpus(path="reviews.tsv", columns=("text", "label"))


@pytest.fixture
def model_dir(tiny_finetuned: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_finetuned / "model", tmp_path / "model")


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Path], Server]]:
    servers: list[Server] = []

    def start(model_dir: Path) -> Server:
        servers.append(Server(tmp_path / "data", model=str(model_dir)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_the_end_of_the_whole_path_is_a_server_that_classifies(
    model_dir: Path, tiny_data: Path, nearsense_train: Callable[..., str], serve: Callable[[Path], Server]
) -> None:
    rows = "reviews.tsv:text,label"
    nearsense_train("classifier", rows, "--data", str(tiny_data), "--model", str(model_dir), "--name", "sentiment")
    head = read_heads(model_dir)["sentiment"]
    encoder = SentenceEncoder.load(model_dir)
    assert head.labels == ("negative", "positive")
    assert head.fingerprint == encoder.fingerprint
    assert head.details["validation_macro_f1"] > 0.8
    assert head.details["examples"] < 240  # a tenth is kept apart
    figures = head.details["figures"]["calibration_rows"]
    assert figures["nll"] <= head.details["figures"]["calibration_rows_before"]["nll"] + 1e-9
    assert sum(map(sum, figures["confusion"])) == figures["rows"]

    texts = ["I love it, it is wonderful.", "It broke and I want my money back."]
    server = serve(model_dir)
    answer = server.client.post("/embed", json={"inputs": texts}).json()
    np.testing.assert_allclose(answer, encoder.encode(texts), atol=1e-5)
    classified = server.client.post("/classify", json={"inputs": texts}).json()
    expected = head.probabilities(encoder.encode(texts))
    np.testing.assert_allclose([list(each["scores"].values()) for each in classified], expected, atol=1e-4)


def test_the_same_rows_give_the_same_head(model_dir: Path, tiny_data: Path) -> None:
    run = ClassifierRun(corpora=(ROWS,))
    heads = [train_classifier(run, data=tiny_data, model=model_dir, name=name)[1] for name in ("one", "two")]
    np.testing.assert_array_equal(heads[0].weights, heads[1].weights)
    assert heads[0].temperature == heads[1].temperature


def test_tests_are_measured_under_their_names_and_labels_renamed(model_dir: Path, tiny_data: Path) -> None:
    run = ClassifierRun(corpora=(ROWS,), tests={"all of them": (ROWS,)}, labels={"positive": "good", "negative": "bad"})
    _, head = train_classifier(run, data=tiny_data, model=model_dir, name="mood")
    assert head.labels == ("bad", "good")
    assert head.details["figures"]["all of them"]["rows"] == 240
    assert head.details["figures"]["all of them"]["accuracy"] > 0.8


def test_fine_tuning_makes_another_model_with_a_head(
    model_dir: Path, tiny_data: Path, tmp_path: Path, nearsense_train: Callable[..., str]
) -> None:
    before = SentenceEncoder.load(model_dir).fingerprint
    nearsense_train(
        *("classifier", "reviews.tsv:text,label", "--data", str(tiny_data), "--model", str(model_dir)),
        *("--name", "mood", "--fine-tune", "--out", str(tmp_path / "out"), "--set", "loop.steps=10"),
    )
    made = SentenceEncoder.load(tmp_path / "out" / "model")
    assert read_heads(tmp_path / "out" / "model")["mood"].fingerprint == made.fingerprint != before
    assert read_heads(model_dir) == {}
    assert SentenceEncoder.load(model_dir).fingerprint == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tests": {"test": (Corpus(path="strange.tsv", columns=("text", "label")),)}}, "'neutral' is in no row"),
        ({"corpora": (Corpus(path="one.tsv", columns=("text", "label")),)}, "two labels or more"),
        ({"corpora": (ROWS.model_copy(update={"part": "train"}),)}, "validation must be named"),
        (
            {"validation": (Corpus(path="reviews.tsv", columns=("text", "label"), min_chars=9999),)},
            "rows for validation",
        ),
    ],
)
def test_rows_that_cannot_make_a_head_are_refused(
    model_dir: Path, tiny_data: Path, tmp_path: Path, change: dict, says: str
) -> None:
    data = shutil.copytree(tiny_data, tmp_path / "corpora")
    (data / "strange.tsv").write_text("label\ttext\nneutral\tIt is a kettle.\n")
    (data / "one.tsv").write_text("label\ttext\n" + "".join(f"good\tIt is kettle {row}.\n" for row in range(60)))
    run = ClassifierRun(**{"corpora": (ROWS,), **change})
    with pytest.raises(RunError, match=says):
        train_classifier(run, data=data, model=model_dir, name="mood")
    assert not (model_dir / "heads").exists()


@pytest.mark.parametrize("name", ["Mood", "", "../mood", "so so"])
def test_a_strange_name_is_refused(model_dir: Path, tiny_data: Path, name: str) -> None:
    with pytest.raises(RunError, match="the name of a head must match"):
        train_classifier(ClassifierRun(corpora=(ROWS,)), data=tiny_data, model=model_dir, name=name)


def test_a_head_is_not_written_over(model_dir: Path, tiny_data: Path) -> None:
    run = ClassifierRun(corpora=(ROWS,))
    path, _ = train_classifier(run, data=tiny_data, model=model_dir, name="mood")
    former = json.loads((path / "head.json").read_text())
    with pytest.raises(RunError, match="must not exist yet"):
        train_classifier(run, data=tiny_data, model=model_dir, name="mood")
    assert json.loads((path / "head.json").read_text()) == former


def test_the_temperature_undoes_what_logits_were_multiplied_by() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(20_000, 3)).astype(np.float32)
    odds = np.exp(logits)
    draws = generator.random((len(logits), 1))
    numbers = (draws > (odds / odds.sum(axis=1, keepdims=True)).cumsum(axis=1)).sum(axis=1).clip(max=2)
    assert find_temperature(logits, numbers) == pytest.approx(1, rel=0.05)
    assert find_temperature(3 * logits, numbers) == pytest.approx(3, rel=0.05)
