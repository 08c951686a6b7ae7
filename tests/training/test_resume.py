import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from training.config import FinetuneRun, PretrainRun, RunError, read_run
from training.distributed import World
from training.finetune import finetune
from training.pretrain import pretrain
from training.resume import differences, fingerprint, load_state, save_state

RUNS = Path(__file__).parent.parent.parent / "training" / "runs"
ALONE = World(0, 1, torch.device("cpu"))
Curve = Callable[[Path], list[dict[str, float]]]


# ----------------------------------------------------------------------------------------------------- a kill, for real


def kill_once_a_state_is_saved(command: list[str], out: Path, log: Path) -> None:
    """Start a run, wait for its first whole state and one moment more, and end it as a power cut would."""
    with log.open("w") as said:
        process = subprocess.Popen(command, stderr=said)
        try:
            deadline = time.monotonic() + 120
            while not list((out / "state").glob("[0-9]*")):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL


def test_pretraining_that_was_killed_ends_with_the_same_weights_to_the_bit(
    tmp_path: Path,
    tiny_pretrained: Path,
    command: Callable[..., list[str]],
    nearsense_train: Callable[..., str],
    pretrain_arguments: Callable[[Path], list[str]],
    curve: Curve,
) -> None:
    out = tmp_path / "killed"
    kill_once_a_state_is_saved(command(*pretrain_arguments(out)), out, tmp_path / "log")
    assert not (out / "model").exists()
    said = nearsense_train(*pretrain_arguments(out))
    assert "going on from step 30" in said
    assert "step 20/60" not in said
    assert_same_run(out, tiny_pretrained, curve)


def test_finetuning_that_was_killed_ends_with_the_same_weights_to_the_bit(
    tmp_path: Path,
    tiny_finetuned: Path,
    command: Callable[..., list[str]],
    nearsense_train: Callable[..., str],
    finetune_arguments: Callable[[Path], list[str]],
    curve: Curve,
) -> None:
    out = tmp_path / "killed"
    kill_once_a_state_is_saved(command(*finetune_arguments(out)), out, tmp_path / "log")
    assert not (out / "model").exists()
    assert "going on from step 30" in nearsense_train(*finetune_arguments(out))
    assert_same_run(out, tiny_finetuned, curve)


def assert_same_run(out: Path, uninterrupted: Path, curve: Curve) -> None:
    # the means at step 40 reach back over the kill at 30
    assert [row["step"] for row in curve(out) if "loss" in row] == [20, 40, 60]
    assert curve(out) == curve(uninterrupted)
    weights = [path / "model" / "model.safetensors" for path in (out, uninterrupted)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


# --------------------------------------------------------------------------------------- whose state it is, and refusal


@pytest.fixture
def data(tmp_path: Path, tiny_data: Path) -> Path:
    return Path(shutil.copytree(tiny_data, tmp_path / "data"))


SHORT = ("loop.steps=4", "loop.log_every=3", "loop.save_every=2", "loop.evaluate_every=4")


def pretrain_a_little(tokenizer: Path, data: Path, out: Path, *changes: str) -> Path:
    run = read_run(RUNS / "tiny.toml", PretrainRun, changes=(*SHORT, *changes))
    return pretrain(run, data=data, tokenizer=tokenizer, out=out, world=ALONE)


def finetune_a_little(model: Path, data: Path, out: Path, *changes: str, fresh: bool = False) -> Path:
    run = read_run(RUNS / "tiny-sentences.toml", FinetuneRun, changes=(*SHORT, *changes))
    return finetune(run, data=data, model=model, out=out, world=ALONE, fresh=fresh)


def test_a_state_of_another_pretraining_is_refused_and_the_difference_named(
    tmp_path: Path, tiny_tokenizer: Path, data: Path
) -> None:
    out = tmp_path / "out"
    model = pretrain_a_little(tiny_tokenizer, data, out)
    before = (model / "model.safetensors").read_bytes()
    shutil.rmtree(model)  # so that the run is one that was killed at the very end

    for change, named in (
        ("optimizer.rate=0.003", "optimizer.rate was 0.002, is 0.003"),
        ("loop.seed=5", "loop.seed was 0, is 5"),
        ("phases.1.batch_tokens=512", "phases.1.batch_tokens was 1024, is 512"),
        ("masking_rate=0.15", "masking_rate was 0.25, is 0.15"),
    ):
        with pytest.raises(RunError) as caught:
            pretrain_a_little(tiny_tokenizer, data, out, change)
        assert f"another run: {named}. " in str(caught.value)
        assert str(out / "state") in str(caught.value)
        assert "--out" in str(caught.value)

    fables = (data / "fables.txt").read_text()
    (data / "fables.txt").write_text(fables.replace("Weasel", "Badger"))
    with pytest.raises(RunError, match="another run: content of the corpora was"):
        pretrain_a_little(tiny_tokenizer, data, out)
    (data / "fables.txt").write_text(fables)

    tokenizer = Path(shutil.copytree(tiny_tokenizer, tmp_path / "tokenizer"))
    described = json.loads((tokenizer / "tokenizer.json").read_text())
    described["normalizer"]["strip_accents"] = False
    (tokenizer / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(RunError, match="another run: tokenizer was"):
        pretrain_a_little(tokenizer, data, out)

    assert not model.exists()  # none of these wrote one
    pretrain_a_little(tiny_tokenizer, data, out)  # as it was, it is taken, from a file that was written anew
    assert (model / "model.safetensors").read_bytes() == before


def test_a_state_of_another_finetuning_is_refused_and_the_difference_named(
    tmp_path: Path, tiny_pretrained: Path, data: Path
) -> None:
    model, out = tiny_pretrained / "model", tmp_path / "out"
    shutil.rmtree(finetune_a_little(model, data, out))
    for change, named in (
        ("objectives.1.temperature=0.1", "objectives.1.temperature was 0.05, is 0.1"),
        ("prefixes=[16]", r"prefixes was \[16, 32\], is \[16\]"),
    ):
        with pytest.raises(RunError, match=f"another run: {named}"):
            finetune_a_little(model, data, out, change)
    with pytest.raises(RunError, match="another run: fresh was False, is True"):
        finetune_a_little(model, data, out, fresh=True)
    reviews = (data / "reviews.tsv").read_text()
    (data / "reviews.tsv").write_text(reviews.replace("\npositive\t", "\nnegative\t", 1))  # one label, no text
    with pytest.raises(RunError, match=r"another run: content of the corpora\.0 was"):
        finetune_a_little(model, data, out)
    (data / "reviews.tsv").write_text(reviews)
    assert finetune_a_little(model, data, out).exists()


def test_a_finished_run_is_not_begun_again(tiny_pretrained: Path, tiny_tokenizer: Path) -> None:
    before = (tiny_pretrained / "metrics.jsonl").read_bytes()
    again: tuple[Callable[[], Path], ...] = (
        lambda: pretrain_a_little(tiny_tokenizer, RUNS / "tiny", tiny_pretrained),
        lambda: finetune_a_little(tiny_pretrained / "model", RUNS / "tiny", tiny_pretrained),
    )
    for begin in again:
        with pytest.raises(RunError, match=r"model exists, so this run is finished; choose another --out"):
            begin()
    assert (tiny_pretrained / "metrics.jsonl").read_bytes() == before


def test_differences_are_told_by_their_path() -> None:
    former = {"a": {"b": 1, "c": [1, {"d": "x"}]}, "e": None, "f": [1, 2], "same": {"g": 1}}
    now = {"a": {"b": 2, "c": [1, {"d": "y"}]}, "e": 0, "f": [1], "same": {"g": 1}, "new": True}
    assert list(differences(former, now)) == [
        "a.b was 1, is 2",
        "a.c.1.d was 'x', is 'y'",
        "e was None, is 0",
        "f was [1, 2], is [1]",
        "new was None, is True",
    ]
    assert not list(differences(former, json.loads(json.dumps(former))))


def test_a_fingerprint_tells_contents_apart() -> None:
    ids = np.arange(100, dtype="<u2")
    changed = ids.copy()
    changed[77] += 1
    assert fingerprint(ids) == fingerprint(ids.copy())
    assert len({fingerprint(ids), fingerprint(changed), fingerprint(ids[:-1]), fingerprint(ids, ids)}) == 4


# ------------------------------------------------------------------------------------------------------- damaged states


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"weight/w": torch.full((1000,), value), "step/w": torch.tensor(value)}


def test_the_last_state_is_there_until_the_next_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state(tmp_path, weights(1), {"step": 10})

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)  # the disk's fault, not ours
        with pytest.raises(OSError, match="No space"):
            save_state(tmp_path, weights(2), {"step": 20})
    found = load_state(tmp_path)
    assert found is not None
    assert found[1] == {"step": 10}
    assert torch.equal(found[0]["weight/w"], weights(1)["weight/w"])
    save_state(tmp_path, weights(3), {"step": 30})
    found = load_state(tmp_path)
    assert found is not None
    assert float(found[0]["step/w"]) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["000000030"]  # the disk does not fill up


def test_a_state_left_half_written_by_a_kill_is_not_seen(tmp_path: Path) -> None:
    save_state(tmp_path, weights(1), {"step": 10})
    whole = tmp_path / "000000010"
    partial = Path(shutil.copytree(whole, tmp_path / ".partial"))
    (partial / "tensors").write_bytes((whole / "tensors").read_bytes()[:100])
    found = load_state(tmp_path)
    assert found is not None
    assert found[1] == {"step": 10}
    shutil.rmtree(whole)
    assert load_state(tmp_path) is None  # were it the first one, the run would begin anew
    save_state(tmp_path, weights(2), {"step": 20})
    assert [path.name for path in tmp_path.iterdir()] == ["000000020"]


def test_without_a_state_there_is_none(tmp_path: Path) -> None:
    assert load_state(tmp_path / "absent") is None
    assert load_state(tmp_path) is None


@pytest.mark.parametrize("damage", ["tensors cut", "header cut", "tensors gone", "progress cut", "progress gone"])
def test_a_damaged_state_is_refused(tmp_path: Path, damage: str) -> None:
    save_state(tmp_path, weights(1), {"step": 10, "positions": {}})
    what, how = damage.split()
    file = tmp_path / "000000010" / ("state.json" if what == "progress" else "tensors")
    content = file.read_bytes()
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(content[: 20 if what == "header" else len(content) - 5])
    with pytest.raises(RunError, match=r"000000010 is damaged .*; remove it to start anew"):
        load_state(tmp_path)


def test_a_run_does_not_go_on_from_a_damaged_state(tmp_path: Path, tiny_tokenizer: Path, tiny_data: Path) -> None:
    out = tmp_path / "out"
    shutil.rmtree(pretrain_a_little(tiny_tokenizer, tiny_data, out))
    [tensors] = (out / "state").glob("*/tensors")
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(RunError, match="is damaged"):
        pretrain_a_little(tiny_tokenizer, tiny_data, out)
    assert not (out / "model").exists()
