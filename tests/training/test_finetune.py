import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from encoder import ModelDirectoryError, SentenceEncoder
from encoder.checkpoint import load_masked_language_model
from training.config import FinetuneRun, RunError, read_run
from training.distributed import World
from training.finetune import finetune
from training.resume import load_state

RUNS = Path(__file__).parent.parent.parent / "training" / "runs"
ALONE = World(0, 1, torch.device("cpu"))
Curve = Callable[[Path], list[dict[str, float]]]
SHORT = ("loop.steps=4", "loop.log_every=1", "loop.save_every=4", "loop.evaluate_every=4", "loop.precision='float32'")

TEXTS = [
    "My new rucksack makes my mornings better.",
    "The kettle was a bitter disappointment.",
    "The Weasel said he couldn't do that because he was an enemy of all birds on principle.",
    "Naïve Ünïcode, 漢字 and 🙂",
    "word " * 100,  # more than the 64 tokens that the run allows
    "",
]


def finetune_here(model: Path, data: Path, out: Path, *changes: str, fresh: bool = False) -> Path:
    run = read_run(RUNS / "tiny-sentences.toml", FinetuneRun, changes=changes)
    return finetune(run, data=data, model=model, out=out, world=ALONE, fresh=fresh)


def only(objective: str) -> str:
    """Change the run to one objective, TOML."""
    return f"objectives=[{objective}]"


REVIEWS = '{kind="classes", batch_size=32, corpora=[{path="reviews.tsv", columns=["text", "label"]}]}'
SCORED = '{kind="scored", batch_size=32, corpora=[{path="pairs.tsv", columns=["first", "second", "score"]}]}'
SENTENCES = 'corpora=[{path="fables.txt", split="sentences", max_chars=200}]'
DENOISED = f'{{kind="denoise", batch_size=16, {SENTENCES}}}'
MASKED = f'{{kind="masked", batch_size=16, {SENTENCES}}}'


# ------------------------------------------------------------------------------------------------------- the whole path


def test_the_whole_path_from_the_command_line(tiny_finetuned: Path, curve: Curve) -> None:
    """Tokenizer, pretraining, finetuning: sentences of one label end nearer to one another than to the others."""
    rows = curve(tiny_finetuned)
    assert [row["step"] for row in rows] == [20, 40, 60]  # there are too few texts to keep any apart for measuring
    for name in ("loss", "classes_loss", "scored_loss", "denoise_loss"):
        assert rows[0][name] > rows[2][name], name
    for row in rows:  # all weigh 1, but texts are denoised every second step only
        parts = row["classes_loss"] + row["scored_loss"] + row["denoise_loss"] / 2 + row["masked_loss"]
        assert row["loss"] == pytest.approx(parts, rel=1e-5)
    assert rows[2]["classes_accuracy"] > 0.9

    encoder = SentenceEncoder.load(tiny_finetuned / "model")
    lines = [line.split("\t") for line in (RUNS / "tiny" / "reviews.tsv").read_text().splitlines()[1:]]
    vectors = encoder.encode([text for _, text in lines])
    assert vectors.shape == (240, 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    for size in (64, 32, 16):  # the prefixes are good by themselves
        cut = vectors[:, :size] / np.linalg.norm(vectors[:, :size], axis=1, keepdims=True)
        cosines = cut @ cut.T
        labels = np.array([label for label, _ in lines])
        same = labels[:, None] == labels[None]
        assert cosines[same].mean() > cosines[~same].mean() + 0.1


def test_sentence_transformers_has_the_same_vectors(tiny_finetuned: Path) -> None:
    import sentence_transformers

    theirs = sentence_transformers.SentenceTransformer(str(tiny_finetuned / "model"), device="cpu")
    ours = SentenceEncoder.load(tiny_finetuned / "model")
    assert theirs.max_seq_length == 64
    expected = theirs.encode(TEXTS)
    np.testing.assert_allclose(ours.encode(TEXTS), expected, atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 0.05


def test_transformers_reads_the_head_that_was_trained_on(tiny_finetuned: Path) -> None:
    import transformers

    theirs = transformers.BertForMaskedLM.from_pretrained(tiny_finetuned / "model").eval()  # type: ignore[no-untyped-call]
    encoder, head = load_masked_language_model(tiny_finetuned / "model")
    ids = torch.tensor([[2, 77, 4, 99, 3]])
    with torch.inference_mode():
        logits = head(encoder(ids), encoder.embeddings.word.weight)
        torch.testing.assert_close(logits, theirs(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


def test_the_averaged_weights_are_saved_in_float16(tiny_finetuned: Path) -> None:
    stored = safetensors.numpy.load_file(tiny_finetuned / "model" / "model.safetensors")
    assert {array.dtype for array in stored.values()} == {np.dtype("float16")}
    saved = load_state(tiny_finetuned / "state")
    assert saved is not None
    name = "embed.encoder.embeddings.word.weight"
    words = stored["bert.embeddings.word_embeddings.weight"]
    assert (words == saved[0][f"average/{name}"].half().numpy()).all()
    assert (words != saved[0][f"weight/{name}"].half().numpy()).any()


def test_without_masked_tokens_the_head_is_not_kept(tmp_path: Path, tiny_pretrained: Path, tiny_data: Path) -> None:
    """It would not fit the encoder any more."""
    model = finetune_here(tiny_pretrained / "model", tiny_data, tmp_path / "out", *SHORT, only(REVIEWS))
    assert json.loads((model / "config.json").read_text())["architectures"] == ["BertModel"]
    assert not [name for name in safetensors.numpy.load_file(model / "model.safetensors") if name.startswith("cls.")]
    again = finetune_here(model, tiny_data, tmp_path / "again", *SHORT, only(MASKED))  # and a new one can be learned
    assert json.loads((again / "config.json").read_text())["architectures"] == ["BertForMaskedLM"]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_the_model_pools_and_cuts_as_it_was_trained(
    tmp_path: Path, tiny_pretrained: Path, tiny_data: Path, pooling: str
) -> None:
    import sentence_transformers

    changes = (*SHORT, only(REVIEWS), f"pooling='{pooling}'", "max_length=19")
    model = finetune_here(tiny_pretrained / "model", tiny_data, tmp_path / "out", *changes)
    theirs = sentence_transformers.SentenceTransformer(str(model), device="cpu")
    assert theirs.max_seq_length == 19
    ours = SentenceEncoder.load(model)
    np.testing.assert_allclose(ours.encode(TEXTS), theirs.encode(TEXTS), atol=1e-5)
    hidden = ours.encode_tokens([TEXTS[1]])[0].vectors
    pooled = hidden[0] if pooling == "cls" else hidden.mean(axis=0)
    np.testing.assert_allclose(ours.encode([TEXTS[1]])[0], pooled / np.linalg.norm(pooled), atol=1e-5)


# ------------------------------------------------------------------------------------------------------- each objective


@pytest.mark.parametrize(
    ("objective", "name"),
    [(REVIEWS, "classes"), (SCORED, "scored"), (DENOISED, "denoise"), (MASKED, "masked")],
)
def test_each_objective_is_learned_alone(
    tmp_path: Path, tiny_pretrained: Path, tiny_data: Path, curve: Curve, objective: str, name: str
) -> None:
    changes = ("loop.steps=24", "loop.log_every=8", "loop.evaluate_every=24", "loop.save_every=24", only(objective))
    finetune_here(tiny_pretrained / "model", tiny_data, tmp_path / "out", *changes)
    losses = [row[f"{name}_loss"] for row in curve(tmp_path / "out")]
    assert losses[-1] < losses[0] - 0.02
    assert losses == [row["loss"] for row in curve(tmp_path / "out")]


def test_pairs_find_one_another(tmp_path: Path, tiny_pretrained: Path, tiny_data: Path, curve: Curve) -> None:
    """Sentences and what is left of them without their first three words."""
    data = tmp_path / "data"
    data.mkdir()
    texts = [line.split("\t")[1] for line in (tiny_data / "reviews.tsv").read_text().splitlines()[1:]]
    pairs = [("first", "second"), *((text, text.split(maxsplit=3)[-1]) for text in texts if text.count(" ") > 5)]
    (data / "parts.tsv").write_text("".join(f"{first}\t{second}\n" for first, second in pairs))
    objective = '{kind="pairs", batch_size=32, corpora=[{path="parts.tsv", columns=["first", "second"]}]}'
    changes = ("loop.steps=40", "loop.log_every=10", "loop.evaluate_every=40", "loop.save_every=40", only(objective))
    model = finetune_here(tiny_pretrained / "model", data, tmp_path / "out", *changes)
    losses = [row["pairs_loss"] for row in curve(tmp_path / "out")]
    assert losses[0] < np.log(32) + 1
    assert losses[-1] < losses[0] - 0.5
    encoder = SentenceEncoder.load(model)
    wholes, parts = (encoder.encode([pair[side] for pair in pairs[1:33]]) for side in (0, 1))
    assert ((wholes @ parts.T).argmax(axis=1) == np.arange(32)).mean() > 0.3  # of 1 in 32 by chance


def test_a_teacher_is_followed(tmp_path: Path, tiny_finetuned: Path, tiny_data: Path, curve: Curve) -> None:
    """The finetuned model teaches a fresh one of its shape, by itself or by a file of its vectors: the same lesson."""
    texts = [line.split("\t") for line in (tiny_data / "reviews.tsv").read_text().splitlines()[1:]]
    data = tmp_path / "data"
    data.mkdir()
    (data / "reviews.tsv").write_text((tiny_data / "reviews.tsv").read_text())
    teacher = SentenceEncoder.load(tiny_finetuned / "model")
    np.save(data / "vectors.npy", teacher.encode([text for _, text in texts]))
    corpus = 'path="reviews.tsv", columns=["text"]'
    by_model = f'{{kind="distill", teacher="{tiny_finetuned}/model", corpora=[{{{corpus}}}]}}'
    by_file = f'{{kind="distill", corpora=[{{{corpus}, vectors="vectors.npy"}}]}}'
    loop = ("loop.steps=30", "loop.log_every=10", "loop.evaluate_every=30", "loop.save_every=30")
    for place, objective in enumerate((by_model, by_file)):
        out = tmp_path / str(place)
        finetune_here(tiny_finetuned / "model", data, out, *loop, only(objective), fresh=True)
    for rows in (curve(tmp_path / "0"), curve(tmp_path / "1")):
        assert rows[-1]["distill_loss"] < rows[0]["distill_loss"]
        assert rows[-1]["distill_cosine"] > max(rows[0]["distill_cosine"], 0.5)
    # compared here, not as losses: the signs of principal axes turn on the last bit
    by_itself, from_file = (np.load(next((tmp_path / out / "prepared").glob("*/vectors.npy"))) for out in "01")
    assert by_itself.shape == (240, 64)
    np.testing.assert_allclose(by_itself, from_file, atol=0.02)  # where the processor has bfloat16, it is used
    assert np.abs(by_itself - by_itself[::-1]).max() > 0.1


def test_objectives_are_summed_by_weight_and_named_apart(
    tmp_path: Path, tiny_pretrained: Path, tiny_data: Path, curve: Curve
) -> None:
    twice = f"objectives=[{REVIEWS}, {SCORED}, {REVIEWS}]"
    weights = ("objectives.0.weight=0.5", "objectives.2.weight=3.0", "objectives.1.every=3")
    finetune_here(tiny_pretrained / "model", tiny_data, tmp_path / "out", *SHORT, twice, *weights)
    rows = curve(tmp_path / "out")
    assert ["scored_loss" in row for row in rows] == [True, False, False, True]
    for row in rows:
        expected = 0.5 * row["classes1_loss"] + 3 * row["classes2_loss"] + row.get("scored_loss", 0)
        assert row["loss"] == pytest.approx(expected, rel=1e-5)


def test_fresh_weights_are_not_the_pretrained_ones(
    tmp_path: Path, tiny_pretrained: Path, tiny_data: Path, curve: Curve
) -> None:
    first = {}
    for fresh in (False, True):
        out = tmp_path / str(fresh)
        finetune_here(tiny_pretrained / "model", tiny_data, out, *SHORT, only(MASKED), fresh=fresh)
        first[fresh] = curve(out)[0]["masked_loss"]
    assert first[True] > first[False] + 0.5  # it has yet to learn which words are frequent


def test_some_of_many_texts_are_kept_apart_and_measured(tmp_path: Path, tiny_pretrained: Path, curve: Curve) -> None:
    """Of 1,000 texts each hundredth. Measured before anything is learned they are as hard as the others."""
    words = ["river", "bank", "oven", "pizza", "money", "good", "lamp", "weasel", "bat", "mouse"]
    numbered = [(f"{words[i % 10]} {words[i // 10 % 10]} {words[i // 100]}", i % 2) for i in range(1000)]
    (tmp_path / "many.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *numbered]))
    many = '{kind="classes", batch_size=99, corpora=[{path="many.tsv", columns=["text", "label"]}]}'
    changes = (*SHORT, "loop.steps=20", "loop.evaluate_every=10", "loop.log_every=10", only(many))
    finetune_here(tiny_pretrained / "model", tmp_path, tmp_path / "out", *changes)
    measured = [row for row in curve(tmp_path / "out") if "heldout_classes_loss" in row]
    assert [row["step"] for row in measured] == [10, 20]
    assert all((row["heldout_classes_accuracy"] * 10) % 1 == pytest.approx(0, abs=1e-5) for row in measured)
    saved = load_state(tmp_path / "out" / "state")
    assert saved is not None
    # 990 in batches of 99 make ten a round, so that 20 steps are two rounds of all but the ten
    assert saved[1]["positions"] == {"classes": {"epoch": 2, "batch": 0}}


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (("max_length=129",), "max_length must fit 128 positions, got 129"),
        ((only(REVIEWS), "objectives.0.every=2"), "one objective must have every = 1"),
        (
            (only(REVIEWS), 'objectives.0.corpora.0.where={label=["positive"]}'),
            r"reviews.tsv must have two labels or more, got \['positive'\]",
        ),
        (
            (only('{kind="scored", corpora=[{path="pairs.tsv", columns=["second", "score", "first"]}]}'),),
            "the scores of pairs.tsv must be numbers",
        ),
        (
            (only('{kind="distill", corpora=[{path="reviews.tsv", columns=["text"]}]}'),),
            "a teacher must be named, or a file of vectors for each corpus; reviews.tsv has none",
        ),
    ],
    ids=["too long", "idle steps", "one label", "no numbers", "no teacher"],
)
def test_a_run_that_asks_for_what_is_not_there_is_refused(
    tmp_path: Path, tiny_pretrained: Path, tiny_data: Path, changes: tuple[str, ...], says: str
) -> None:
    with pytest.raises(RunError, match=says):
        finetune_here(tiny_pretrained / "model", tiny_data, tmp_path / "out", *SHORT, *changes)
    assert not (tmp_path / "out" / "model").exists()


def test_what_is_no_model_directory_is_refused(tmp_path: Path, tiny_data: Path) -> None:
    with pytest.raises(ModelDirectoryError):
        finetune_here(tmp_path / "absent", tiny_data, tmp_path / "out", *SHORT)


def test_the_model_says_how_it_was_made(tiny_finetuned: Path, tiny_pretrained: Path) -> None:
    record = json.loads((tiny_finetuned / "model" / "training.json").read_text())
    assert record["command"] == "finetune"
    assert record["run"] == read_run(RUNS / "tiny-sentences.toml", FinetuneRun).model_dump(mode="json")
    assert record["versions"]["torch"] == torch.__version__
    assert record["began_with"] == json.loads((tiny_pretrained / "model" / "training.json").read_text())
    assert record["began_with"]["command"] == "pretrain"
    assert record["began_with"]["began_with"] is None
    assert record["began_with"]["figures"]["heldout_loss"] > 0
    assert str(tiny_pretrained) not in json.dumps(record)  # no path of the machine
