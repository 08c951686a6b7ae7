import os

os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # before torch is loaded: threads that wait by spinning stop their neighbours

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RUNS = Path(__file__).parent.parent.parent / "training" / "runs"


@pytest.fixture(scope="session")
def tiny_data() -> Path:
    """training/runs/tiny: fables, pairs and reviews."""
    return RUNS / "tiny"


@pytest.fixture(scope="session")
def command() -> Callable[..., list[str]]:
    """Give the `nearsense-train` command of this environment."""
    return lambda *arguments: [sys.executable, "-m", "training", *arguments]


@pytest.fixture(scope="session")
def nearsense_train(command: Callable[..., list[str]]) -> Callable[..., str]:
    """Run `nearsense-train` as a user does, in a process of its own, where shapes and types are not enforced.

    Gives what it said.
    """

    def run(*arguments: str) -> str:
        done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stderr

    return run


@pytest.fixture(scope="session")
def tiny_tokenizer(
    tmp_path_factory: pytest.TempPathFactory, nearsense_train: Callable[..., str], tiny_data: Path
) -> Path:
    """The tokenizer's directory."""
    out = tmp_path_factory.mktemp("tiny") / "tokenizer"
    corpora = ("fables.txt", "reviews.tsv:text")
    nearsense_train("tokenizer", *corpora, "--data", str(tiny_data), "--vocab-size", "1000", "--out", str(out))
    return out


@pytest.fixture(scope="session")
def pretrain_arguments(tiny_data: Path, tiny_tokenizer: Path) -> Callable[[Path], list[str]]:
    """Of tiny.toml, into a directory."""
    return lambda out: [
        *("pretrain", str(RUNS / "tiny.toml"), "--data", str(tiny_data)),
        *("--tokenizer", str(tiny_tokenizer), "--out", str(out)),
    ]


@pytest.fixture(scope="session")
def tiny_pretrained(
    tiny_tokenizer: Path, nearsense_train: Callable[..., str], pretrain_arguments: Callable[[Path], list[str]]
) -> Path:
    """Where tiny.toml went, uninterrupted."""
    out = tiny_tokenizer.parent / "pretrained"
    said = nearsense_train(*pretrain_arguments(out))
    (out / "said").write_text(said)
    return out


@pytest.fixture(scope="session")
def finetune_arguments(tiny_data: Path, tiny_pretrained: Path) -> Callable[[Path], list[str]]:
    """Of tiny-sentences.toml, into a directory."""
    return lambda out: [
        *("finetune", str(RUNS / "tiny-sentences.toml"), "--data", str(tiny_data)),
        *("--model", str(tiny_pretrained / "model"), "--out", str(out)),
    ]


@pytest.fixture(scope="session")
def tiny_finetuned(
    tiny_pretrained: Path, nearsense_train: Callable[..., str], finetune_arguments: Callable[[Path], list[str]]
) -> Path:
    """Where tiny-sentences.toml went, uninterrupted: the end of the whole path."""
    out = tiny_pretrained.parent / "sentences"
    nearsense_train(*finetune_arguments(out))
    return out


@pytest.fixture(scope="session")
def curve() -> Callable[[Path], list[dict[str, float]]]:
    """Read a run's `metrics.jsonl`, less what says how long it took: what a restart must not change."""

    def read(out: Path) -> list[dict[str, float]]:
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k not in ("tokens_per_s", "matrix_share")} for row in rows]

    return read
