import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from encoder import ModelDirectoryError
from encoder.classifier import ClassifierHead, read_head, read_heads, write_head


@pytest.fixture
def head() -> ClassifierHead:
    return ClassifierHead(
        labels=("bad", "good", "so so"),
        weights=np.array([[-1, 0], [1, 0], [0, 2]], dtype=np.float32),
        biases=np.array([0.5, 0, 0], dtype=np.float32),
        fingerprint="f" * 64,
        temperature=2.0,
        details={"examples": 3, "macro_f1": 0.5},
    )


def test_probabilities_are_a_softmax_of_the_scores_divided_by_the_temperature(head: ClassifierHead) -> None:
    # Scores of (1, 0): -0.5, 1, 0; halved: -0.25, 0.5, 0.
    exponents = [math.exp(score) for score in (-0.25, 0.5, 0.0)]
    expected = [[each / sum(exponents) for each in exponents]]
    np.testing.assert_allclose(head.probabilities(np.array([[1, 0]], dtype=np.float32)), expected, rtol=1e-6)


def test_scores_that_overflow_an_exponential_still_give_probabilities(head: ClassifierHead) -> None:
    large = replace(head, weights=head.weights * 1e4)
    np.testing.assert_array_equal(large.probabilities(np.array([[1, 0]], dtype=np.float32)), [[0, 1, 0]])


def test_a_head_comes_back_as_it_was(head: ClassifierHead, tmp_path: Path) -> None:
    write_head(tmp_path / "heads" / "mood", head)
    ((name, found),) = read_heads(tmp_path).items()
    assert name == "mood"
    np.testing.assert_array_equal(found.weights, head.weights)
    np.testing.assert_array_equal(found.biases, head.biases)
    for same in ("labels", "fingerprint", "temperature", "details"):
        assert getattr(found, same) == getattr(head, same)


def test_a_directory_without_heads_has_none(tmp_path: Path) -> None:
    assert read_heads(tmp_path) == {}


def test_nothing_is_written_over(head: ClassifierHead, tmp_path: Path) -> None:
    write_head(tmp_path / "mood", head)
    with pytest.raises(ModelDirectoryError, match="must not exist"):
        write_head(tmp_path / "mood", replace(head, temperature=1.0))
    assert read_head(tmp_path / "mood").temperature == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["mood"]


@pytest.mark.parametrize("name", ["Mood", "-mood", "m" * 64, "so so"])
def test_a_strange_name_is_refused(head: ClassifierHead, tmp_path: Path, name: str) -> None:
    write_head(tmp_path / "heads" / name, head)
    with pytest.raises(ModelDirectoryError, match=name):
        read_heads(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"labels": ("bad", "good")},
        {"labels": ("bad", "good", "good")},
        {"labels": ("bad",)},
        {"biases": np.array([0, math.nan, 0], dtype=np.float32)},
        {"weights": np.full((3, 2), math.inf, dtype=np.float32)},
        {"temperature": 0.0},
        {"temperature": math.nan},
    ],
)
def test_a_head_that_cannot_decide_is_refused(head: ClassifierHead, change: dict) -> None:
    with pytest.raises(ModelDirectoryError):
        replace(head, **change)


@pytest.mark.parametrize("damage", ["no labels", "not JSON", "no weights", "cut", "missing"])
def test_damage_names_the_directory(head: ClassifierHead, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "mood"
    write_head(path, head)
    described = json.loads((path / "head.json").read_text())
    if damage == "no labels":
        del described["labels"]
        (path / "head.json").write_text(json.dumps(described))
    elif damage == "not JSON":
        (path / "head.json").write_text("{")
    elif damage == "no weights":
        (path / "head.safetensors").write_bytes(safetensors.numpy.save({"biases": head.biases}))
    elif damage == "cut":
        (path / "head.safetensors").write_bytes((path / "head.safetensors").read_bytes()[:-3])
    else:
        (path / "head.safetensors").unlink()
    with pytest.raises(ModelDirectoryError, match=str(path)):
        read_head(path)
