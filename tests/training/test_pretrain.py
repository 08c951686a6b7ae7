import json
import logging
import math
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from encoder import ModelSpec
from encoder.checkpoint import load_masked_language_model
from training.batches import Windows
from training.config import PretrainRun, RunError, read_run
from training.data import DataError
from training.distributed import World
from training.pretrain import pretrain, training_operations
from training.resume import load_state

RUNS = Path(__file__).parent.parent.parent / "training" / "runs"
ALONE = World(0, 1, torch.device("cpu"))
Curve = Callable[[Path], list[dict[str, float]]]
SHORT = ("loop.steps=4", "loop.log_every=2", "loop.save_every=2", "loop.evaluate_every=4")


def pretrain_here(tokenizer: Path, data: Path, out: Path, *changes: str) -> Path:
    run = read_run(RUNS / "tiny.toml", PretrainRun, changes=changes)
    return pretrain(run, data=data, tokenizer=tokenizer, out=out, world=ALONE)


def test_the_loss_falls(tiny_pretrained: Path, curve: Curve) -> None:
    rows = curve(tiny_pretrained)
    trained = [row for row in rows if "loss" in row]
    assert [row["step"] for row in trained] == [20, 40, 60]
    # from guessing among 1000 words, and a little more for weights that are not 0, down
    assert math.log(1000) - 0.5 < trained[0]["loss"] < math.log(1000) + 0.5
    assert trained[0]["loss"] > trained[1]["loss"] > trained[2]["loss"]
    measured = [row for row in rows if "heldout_loss" in row]
    assert [row["step"] for row in measured] == [30, 60]
    for row in measured:
        assert row["heldout_perplexity"] == pytest.approx(math.exp(row["heldout_loss"]))
        assert trained[-1]["loss"] < row["heldout_loss"] < math.log(1000)
        assert 0 < row["heldout_accuracy"] < 0.2


def test_transformers_reads_what_was_pretrained_with_the_same_logits(tiny_pretrained: Path) -> None:
    import transformers

    theirs = transformers.BertForMaskedLM.from_pretrained(tiny_pretrained / "model").eval()  # type: ignore[no-untyped-call]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_pretrained / "model")
    encoder, head = load_masked_language_model(tiny_pretrained / "model")
    batch = tokenizer(
        ["The Weasel was an [MASK] of all birds.", "I love my [MASK]!"], padding=True, return_tensors="pt"
    )
    mask = batch["attention_mask"].bool()
    with torch.inference_mode():
        expected = theirs(**batch).logits
        logits = head(encoder(batch["input_ids"], mask), encoder.embeddings.word.weight)
    assert (batch["input_ids"] == tokenizer.mask_token_id).sum() == 2
    torch.testing.assert_close(logits[mask], expected[mask], atol=1e-5, rtol=1e-5)
    # and the heads say what was learned: full stops and common words rather than the rarest ones
    frequent = tokenizer.convert_tokens_to_ids(["the", ".", ",", "my", "and", "a", "to"])
    at_mask = expected[batch["input_ids"] == tokenizer.mask_token_id]
    assert at_mask[:, frequent].mean() > at_mask.mean() + 1


def test_the_last_weights_are_saved_in_float16(tiny_pretrained: Path) -> None:
    stored = safetensors.numpy.load_file(tiny_pretrained / "model" / "model.safetensors")
    assert {array.dtype for array in stored.values()} == {np.dtype("float16")}
    saved = load_state(tiny_pretrained / "state")
    assert saved is not None
    words = saved[0]["weight/encoder.embeddings.word.weight"]
    assert words.dtype == torch.float32
    assert (stored["bert.embeddings.word_embeddings.weight"] == words.half().numpy()).all()
    assert not any(name.startswith("average/") for name in saved[0])


def test_each_phase_takes_its_share_of_the_steps(tmp_path: Path, tiny_tokenizer: Path, tiny_data: Path) -> None:
    """A quarter of eight steps in windows of 32 tokens, the rest in windows of 64."""
    changes = ("phases.0.share=0.25", "phases.1.share=0.75", "loop.steps=8", "loop.log_every=8", "loop.save_every=8")
    pretrain_here(tiny_tokenizer, tiny_data, tmp_path / "out", *changes)
    saved = load_state(tmp_path / "out" / "state")
    assert saved is not None
    assert saved[1]["positions"] == {"0": {"epoch": 0, "batch": 2}, "1": {"epoch": 0, "batch": 6}}


def test_accumulated_batches_are_each_drawn(tmp_path: Path, tiny_tokenizer: Path, tiny_data: Path) -> None:
    """So twice as many are read."""
    pretrain_here(tiny_tokenizer, tiny_data, tmp_path / "out", *SHORT, "loop.accumulate=2")
    saved = load_state(tmp_path / "out" / "state")
    assert saved is not None
    assert [position["batch"] for position in saved[1]["positions"].values()] == [4, 4]


def test_a_state_knows_nothing_of_batches_prepared_ahead(tmp_path: Path, tiny_tokenizer: Path, tiny_data: Path) -> None:
    """They are drawn by a thread that runs ahead, up to the end; the state is of those that were trained on."""
    out = tmp_path / "out"
    shutil.rmtree(pretrain_here(tiny_tokenizer, tiny_data, out, *SHORT, "loop.save_every=4"))
    run = read_run(RUNS / "tiny.toml", PretrainRun, changes=SHORT)
    saved = load_state(out / "state")
    assert saved is not None
    for index, phase in enumerate(run.phases):
        windows = Windows(10_000, phase.length, batch_size=phase.batch_tokens // phase.length, seed=0)
        for _ in range(2):
            windows.next()
        assert saved[1]["positions"][str(index)] == vars(windows.position)


def test_operations_are_counted_by_hand(tiny_spec: ModelSpec) -> None:
    forward = 2 * (3 * (4 * 14 * 14 + 2 * 14 * 31) * 11 + 14 * 29 * 5)  # a multiplication and an addition a weight
    assert training_operations(tiny_spec.config, 11, 5) == 3 * forward  # backward costs twice as much again


# --------------------------------------------------------------------------------------------------------------- alarms


def alarms(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "ALARM" in record.message]


@pytest.fixture
def two_subjects(tmp_path: Path) -> Path:
    """Documents that are each of eight words or of eight others: easily guessed far better than by frequency."""
    words = [
        "river",
        "bank",
        "oven",
        "pizza",
        "money",
        "good",
        "lamp",
        "weasel",
        "bat",
        "mouse",
        "wind",
        "bird",
        "lion",
        "crow",
        "fox",
        "tree",
    ]
    chance = random.Random(0)
    documents = []
    for _ in range(300):
        known = chance.choice([words[:8], words[8:]])
        documents.append(" ".join(chance.choice(known) for _ in range(chance.randrange(60, 120))))
    directory = tmp_path / "subjects"
    directory.mkdir()
    (directory / "subjects.txt").write_text("\n\n".join(documents) + "\n")
    return directory


SUBJECTS = ('corpora=[{path="subjects.txt"}]', "optimizer.warmup_steps=5", "loop.evaluate_every=6")


def test_no_alarm_while_the_model_learns(
    tmp_path: Path, tiny_tokenizer: Path, two_subjects: Path, caplog: pytest.LogCaptureFixture, curve: Curve
) -> None:
    caplog.set_level(logging.INFO)
    pretrain_here(tiny_tokenizer, two_subjects, tmp_path / "out", *SUBJECTS, "optimizer.rate=5e-3", "loop.steps=60")
    assert curve(tmp_path / "out")[-1]["heldout_loss"] < 2.8  # of 3.03 by frequency
    early = [row["heldout_loss"] for row in curve(tmp_path / "out") if row["step"] == 6]
    assert early[0] > 3.03  # when it is no better yet, it is too early to say so
    late = [alarm for alarm in alarms(caplog) if not any(f"after {share} %" in alarm for share in (20, 30, 40))]
    assert not late


def test_an_alarm_when_the_model_learns_nothing(
    tmp_path: Path, tiny_tokenizer: Path, two_subjects: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    out = tmp_path / "out"
    pretrain_here(
        *(tiny_tokenizer, two_subjects, out),
        *(*SUBJECTS, "optimizer.rate=1e-9", "loop.steps=12", "loop.evaluate_every=2", "loop.save_every=12"),
    )
    heard = alarms(caplog)
    assert ["%" in alarm and alarm.split("after ")[1].split(" %")[0] for alarm in heard] == [
        "33",
        "50",
        "67",
        "83",
        "100",
    ]
    assert "no better than guessing by frequency (3.026 nats)" in heard[0]
    assert "optimizer.rate" in heard[0]


def test_the_alarm_counts_the_steps_before_a_restart(
    tmp_path: Path, tiny_tokenizer: Path, two_subjects: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last evaluation of a run is at its end, also where it is the only one since a restart."""
    changes = (*SUBJECTS, "optimizer.rate=1e-9", "loop.steps=12", "loop.evaluate_every=2", "loop.save_every=6")
    out = tmp_path / "out"
    shutil.rmtree(pretrain_here(tiny_tokenizer, two_subjects, out, *changes))
    [state] = (out / "state").glob("*/state.json")
    progress = json.loads(state.read_text())
    state.write_text(json.dumps({**progress, "step": 10}))  # as if killed after ten
    caplog.clear()
    pretrain_here(tiny_tokenizer, two_subjects, out, *changes)
    assert len(alarms(caplog)) == 1
    assert "after 100 %" in alarms(caplog)[0]


@pytest.mark.parametrize(("copies", "alarmed"), [(3, True), (2, False), (1, False)])
def test_an_alarm_when_most_texts_are_duplicates(
    tmp_path: Path,
    tiny_tokenizer: Path,
    tiny_data: Path,
    caplog: pytest.LogCaptureFixture,
    copies: int,
    alarmed: bool,
) -> None:
    """Of three copies two thirds are duplicates, more than half; of two copies a half, not more."""
    data = tmp_path / "data"
    data.mkdir()
    fables = (tiny_data / "fables.txt").read_text().rstrip("\n")
    (data / "fables.txt").write_text("\n\n".join([fables, fables.upper(), fables.replace(",", ";")][:copies]) + "\n")
    changes = ('corpora=[{path="fables.txt"}]', *SHORT, "loop.steps=1", "loop.evaluate_every=1")
    pretrain_here(tiny_tokenizer, data, tmp_path / "out", *changes)
    heard = [alarm for alarm in alarms(caplog) if "duplicates" in alarm]
    assert len(heard) == alarmed
    if alarmed:
        assert "222 of 333 texts of fables.txt are duplicates" in heard[0]


# ------------------------------------------------------------------------------------------------------ what goes wrong


def test_a_run_that_diverges_says_what_to_do_and_makes_no_model(
    tmp_path: Path, command: Callable[..., list[str]], pretrain_arguments: Callable[[Path], list[str]]
) -> None:
    out = tmp_path / "out"
    changes = ("optimizer.rate=1e10", "optimizer.warmup_steps=0", "loop.log_every=5", "loop.save_every=3")
    settings = [part for change in changes for part in ("--set", change)]
    done = subprocess.run(
        command(*pretrain_arguments(out), *settings), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("nearsense-train: the loss is nan at step ")
    assert "another --out and a lower optimizer.rate" in last
    assert "Traceback" not in done.stderr
    assert not (out / "model").exists()
    assert not list(out.glob("**/model.safetensors"))
    saved = load_state(out / "state")
    assert saved is None or all(tensor.isfinite().all() for tensor in saved[0].values())


def test_a_huge_loss_has_a_perplexity(tmp_path: Path, tiny_tokenizer: Path, tiny_data: Path, curve: Curve) -> None:
    """e to the loss may be more than a float can hold; the run goes on, and its figures say what it is like."""
    changes = (*SHORT, "optimizer.rate=50.0", "optimizer.warmup_steps=0", "loop.evaluate_every=1")
    pretrain_here(tiny_tokenizer, tiny_data, tmp_path / "out", *changes)
    measured = [row for row in curve(tmp_path / "out") if "heldout_loss" in row]
    assert max(row["heldout_loss"] for row in measured) > 720
    assert all(math.isfinite(row["heldout_perplexity"]) for row in measured)


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, tiny_tokenizer: Path, tiny_data: Path) -> None:
    with pytest.raises(RunError, match=r"must hold a tokenizer .*nearsense-train tokenizer"):
        pretrain_here(tmp_path / "absent", tiny_data, tmp_path / "one", *SHORT)
    with pytest.raises(DataError, match="at least 1000 documents"):
        pretrain_here(tiny_tokenizer, tiny_data, tmp_path / "two", *SHORT, "heldout=0.001")
    with pytest.raises(DataError, match="is --data the right directory"):
        pretrain_here(tiny_tokenizer, tmp_path, tmp_path / "three", *SHORT)
    described = json.loads((tiny_tokenizer / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token["content"] = token["content"].replace("[MASK]", "[HIDE]")
    described["model"]["vocab"]["[HIDE]"] = described["model"]["vocab"].pop("[MASK]")
    crippled = Path(shutil.copytree(tiny_tokenizer, tmp_path / "tokenizer"))
    (crippled / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(RunError, match=r"it lacks \[MASK\]"):
        pretrain_here(crippled, tiny_data, tmp_path / "four", *SHORT)
    assert not list(tmp_path.glob("*/model"))
