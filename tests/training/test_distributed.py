import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from training.config import FinetuneRun, PretrainRun, read_run
from training.distributed import World
from training.finetune import finetune
from training.pretrain import pretrain

RUNS = Path(__file__).parent.parent.parent / "training" / "runs"
ALONE = World(0, 1, torch.device("cpu"))
Curve = Callable[[Path], list[dict[str, float]]]


def torchrun(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Two processes on this machine that talk over its loopback. If they wait for one another for ever, this fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*torchrun, "-m", "training", *arguments, "--device", "cpu"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def changes_of(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def assert_close(together: list[dict[str, float]], alone: list[dict[str, float]], *, relative: float) -> None:
    assert len(together) == len(alone)
    for mine, theirs in zip(together, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=relative)


def losses(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [row for row in rows if "loss" in row]


# 747 or 748 windows of 32 tokens in batches of 112: seven a round, the last of which is not full and has no other
# beside it, so that one process gets windows of the round's beginning.
PRETRAIN = (
    "phases=[{length=32, share=1.0, batch_tokens=3584}]",
    *("loop.steps=9", "loop.log_every=1", "loop.evaluate_every=9", "loop.save_every=9", "loop.precision='float32'"),
)


def test_two_processes_pretrain_as_one_with_twice_the_batch(
    tmp_path: Path, tiny_tokenizer: Path, tiny_data: Path, pretrain_arguments: Callable[[Path], list[str]], curve: Curve
) -> None:
    done = torchrun(*pretrain_arguments(tmp_path / "two"), *changes_of(*PRETRAIN))
    assert done.returncode == 0, done.stderr
    run = read_run(RUNS / "tiny.toml", PretrainRun, changes=(*PRETRAIN, "loop.accumulate=2"))
    pretrain(run, data=tiny_data, tokenizer=tiny_tokenizer, out=tmp_path / "one", world=ALONE)
    two, one = curve(tmp_path / "two"), curve(tmp_path / "one")
    assert [row["step"] for row in losses(two)] == list(range(1, 10))
    assert_close(losses(two)[:3], losses(one)[:3], relative=1e-4)  # until the windows are not the same any more
    assert losses(two)[3]["loss"] != pytest.approx(losses(one)[3]["loss"], rel=1e-5)
    for mine, theirs in zip(losses(two), losses(one), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=0.02)
    assert two[-1]["heldout_loss"] == pytest.approx(one[-1]["heldout_loss"], rel=0.01)
    positions = json.loads(next((tmp_path / "two" / "state").glob("*/state.json")).read_text())["positions"]
    assert positions == {"0": {"epoch": 2, "batch": 2}}  # each round is four steps of both


FINETUNE = (
    "loop.steps=6",
    "loop.log_every=1",
    "loop.evaluate_every=6",
    "loop.save_every=6",
    "loop.precision='float32'",
)


def test_two_processes_finetune_as_one_with_twice_the_batch(
    tmp_path: Path,
    tiny_pretrained: Path,
    tiny_data: Path,
    finetune_arguments: Callable[[Path], list[str]],
    curve: Curve,
) -> None:
    """160 scored pairs make five batches of 32, an odd one; and every second step has no text to denoise."""
    done = torchrun(*finetune_arguments(tmp_path / "two"), *changes_of(*FINETUNE))
    assert done.returncode == 0, done.stderr
    run = read_run(RUNS / "tiny-sentences.toml", FinetuneRun, changes=(*FINETUNE, "loop.accumulate=2"))
    finetune(run, data=tiny_data, model=tiny_pretrained / "model", out=tmp_path / "one", world=ALONE)
    two, one = curve(tmp_path / "two"), curve(tmp_path / "one")
    assert [row["step"] for row in two] == list(range(1, 7))
    assert ["denoise_loss" in row for row in two] == [True, False] * 3
    assert_close(two[:2], one[:2], relative=1e-4)
    for mine, theirs in zip(two, one, strict=True):
        assert mine["masked_loss"] == pytest.approx(theirs["masked_loss"], rel=0.02)
    assert (tmp_path / "two" / "model" / "model.safetensors").exists()


def test_where_the_leader_fails_nobody_waits_for_it(
    tmp_path: Path, pretrain_arguments: Callable[[Path], list[str]]
) -> None:
    """Only the leader reads the corpora, and finds too few documents."""
    done = torchrun(*pretrain_arguments(tmp_path / "two"), *changes_of("heldout=0.001"))
    assert done.returncode != 0
    assert "the corpora must hold at least 1000 documents" in done.stderr
    assert not (tmp_path / "two" / "model").exists()
