import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from encoder import SentenceEncoder
from training.config import RunError, read_run
from training.data import DataError
from training.evaluate import evaluate
from training.measures import Evaluator
from training.suite import EvaluationRun

PAIRS = [
    ("A man plays the guitar.", "Someone is playing a guitar.", "5"),
    ("A man plays the guitar.", "The bank raised its rates.", "0"),
    ("The cat sleeps on the sofa.", "A cat is asleep on the couch.", "4.5"),
    ("The cat sleeps on the sofa.", "A cat chases a mouse.", "2"),
]
WORDS = [
    ("F", "3", "1", "We sat by the bank of the river .", "The bank lent us money ."),
    ("T", "1", "1", "The bank raised its rates .", "The bank lent us money ."),
    ("T", "1", "2", "The river was cold .", "The wide river flows south ."),
    ("F", "2", "1", "A rusty spring broke .", "The spring was warm this year ."),
]
DOCUMENTS = {
    "d1": "The bank lends money to small firms.",
    "d2": "Cats sleep most of the day.",
    "d3": "Guitars have strings.",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluation")
    tables = {
        "pairs.tsv": [("first", "second", "score"), *PAIRS],
        "words.tsv": [("label", "i", "j", "first", "second"), *WORDS],
        "qrels.tsv": [("query_id", "doc_id", "relevance"), ("q1", "d1", "2"), ("q1", "d2", "0"), ("q2", "d2", "1")],
        "answers.tsv": [
            ("question", "answer"),
            ("Who lends money?", DOCUMENTS["d1"]),
            ("Who sleeps?", DOCUMENTS["d2"]),
        ],
        "topics.tsv": [
            ("text", "label"),
            *((text, "0") for text, _, _ in PAIRS[:2]),
            *((t, "1") for t, _, _ in PAIRS[2:]),
        ],
    }
    for name, rows in tables.items():
        (root / name).write_text("".join("\t".join(row) + "\n" for row in rows))
    queries = {"q1": "Who lends money?", "q2": "Which animals sleep?", "q3": "a query that nobody judged"}
    for name, texts in (("documents.jsonl", DOCUMENTS), ("queries.jsonl", queries)):
        (root / name).write_text("".join(json.dumps({"_id": key, "text": text}) + "\n" for key, text in texts.items()))
    (root / "prose.txt").write_text("The cat sleeps on the sofa all day long.\n\nA man plays the guitar.\n")
    return root


def run_of(*tasks: dict) -> EvaluationRun:
    return read_run({"tasks": [{"name": "it", **task} for task in tasks]}, EvaluationRun)


def figures_of(model: Path, data: Path, task: dict) -> dict[str, float]:
    (read,) = run_of(task).tasks
    return {figure.metric: figure.value for figure in Evaluator(model, data).measure(read)}


def corpus(name: str, *columns: str) -> dict:
    return {"path": name, "columns": list(columns)}


RETRIEVAL = {
    "kind": "retrieval",
    "documents": "documents.jsonl",
    "queries": "queries.jsonl",
    "judgements": "qrels.tsv",
}
WIC = corpus("words.tsv", "i", "j", "first", "second", "label")


def test_cosines_are_ranked_against_scores(minilm_dir: Path, data: Path, minilm: SentenceEncoder) -> None:
    first, second = (minilm.encode([pair[side] for pair in PAIRS]) for side in (0, 1))
    expected = spearmanr((first * second).sum(axis=1), [float(pair[2]) for pair in PAIRS]).statistic
    task = {"kind": "similarity", "corpora": [corpus("pairs.tsv", "first", "second", "score")]}
    assert figures_of(minilm_dir, data, task) == {"spearman": pytest.approx(expected)}
    assert expected > 0.7


def test_only_judged_queries_count_and_only_relevance_above_0(minilm_dir: Path, data: Path) -> None:
    found = figures_of(minilm_dir, data, RETRIEVAL)
    assert found == dict.fromkeys(("ndcg@10", "recall@10", "recall@100", "mrr@100"), pytest.approx(1))


def test_each_question_is_asked_of_all_answers(minilm_dir: Path, data: Path) -> None:
    found = figures_of(minilm_dir, data, {"kind": "pairs", "corpora": [corpus("answers.tsv", "question", "answer")]})
    assert found["mrr@100"] == pytest.approx(1)


def test_clusters_are_the_labels(minilm_dir: Path, data: Path) -> None:
    task = {"kind": "clustering", "corpora": [corpus("topics.tsv", "text", "label")]}
    assert figures_of(minilm_dir, data, task) == {"v_measure": pytest.approx(1)}


def test_words_are_compared_where_they_stand(minilm_dir: Path, data: Path, minilm: SentenceEncoder) -> None:
    """By hand: the vectors of "bank" in the first row, token 4 and token 2, with [CLS] in front."""
    evaluator = Evaluator(minilm_dir, data)
    (task,) = run_of({"kind": "words", "train": WIC, "corpora": [WIC]}).tasks
    cosines, same = evaluator._word_cosines(task.corpora)
    assert same.tolist() == [False, True, True, False]
    first, second = minilm.encode_tokens([WORDS[0][3], WORDS[0][4]])
    assert first.tokens[5] == second.tokens[2] == "bank"
    expected = [each / np.linalg.norm(each) for each in (first.vectors[5], second.vectors[2])]
    # The word's number in the data counts from 0: number 3 is "the", whatever the sentence is about.
    assert cosines[1] > cosines[3]
    row = [("T", "4", "1", WORDS[0][3], WORDS[0][4])]
    (data / "one.tsv").write_text("label\ti\tj\tfirst\tsecond\n" + "\t".join(row[0]) + "\n")
    (one,) = run_of({"kind": "words", "train": WIC, "corpora": [{**WIC, "path": "one.tsv"}]}).tasks
    assert evaluator._word_cosines(one.corpora)[0][0] == pytest.approx(float(expected[0] @ expected[1]), abs=1e-5)


def test_a_head_is_judged_and_a_regression_where_there_is_none(minilm_dir: Path, data: Path) -> None:
    topics = [corpus("topics.tsv", "text", "label")]
    task = {"kind": "head", "head": "topic", "train": topics, "corpora": topics, "labels": {"0": "music", "1": "cats"}}
    found = figures_of(minilm_dir, data, task)
    assert found["accuracy"] == 1.0
    assert set(found) == {"accuracy", "macro_f1", "calibration_error", "brier", "nll"}


def test_perplexity_is_measured_where_there_is_a_head(tiny_pretrained: Path, minilm_dir: Path, data: Path) -> None:
    task = {"kind": "perplexity", "corpora": [corpus("prose.txt")]}
    assert figures_of(minilm_dir, data, task) == {}
    found = figures_of(tiny_pretrained / "model", data, task)
    vocabulary = SentenceEncoder.load(tiny_pretrained / "model").spec.config.vocab_size
    assert 1 < found["perplexity"] < vocabulary


def test_a_model_beside_its_reference_as_directory_and_as_figures(
    tiny_finetuned: Path, minilm_dir: Path, data: Path, tmp_path: Path
) -> None:
    similarity = {"kind": "similarity", "corpora": [corpus("pairs.tsv", "first", "second", "score")]}
    run = run_of(RETRIEVAL | {"name": "search"}, similarity | {"name": "pairs"})
    model = tiny_finetuned / "model"
    evaluate(run, minilm_dir, data=data, out=tmp_path / "reference.json")
    first = evaluate(run, model, against=minilm_dir, data=data, out=tmp_path / "own.json")
    second = evaluate(run, model, against=tmp_path / "reference.json", data=data)
    assert first.splitlines()[0] == "| task | rows | metric | model | model | share |"
    assert first == second
    lines = first.splitlines()
    assert len(lines) == 2 + 4 + 1
    assert lines[2].startswith("| search | 2 | ndcg@10 |")
    own = json.loads((tmp_path / "own.json").read_text())
    assert own["figures"][-1].keys() == {"task", "metric", "value", "low", "high", "rows"}
    share = own["figures"][0]["value"] / 1.0
    assert lines[2].endswith(f"| {share:.2f} |")
    with pytest.raises(RunError, match="must not exist yet"):
        evaluate(run, model, data=data, out=tmp_path / "own.json")


def test_a_file_without_figures_is_refused(minilm_dir: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "figures.json").write_text("{}")
    with pytest.raises(RunError, match="must be a file of figures"):
        evaluate(run_of(RETRIEVAL), minilm_dir, against=tmp_path / "figures.json", data=data)


def test_the_command_prints_the_table(
    tiny_finetuned: Path, data: Path, tmp_path: Path, command: Callable[..., list[str]]
) -> None:
    import subprocess

    tasks = tmp_path / "tasks.toml"
    tasks.write_text(
        'tasks = [{kind="pairs", name="questions", corpora=[{path="answers.tsv", columns=["question", "answer"]}]}]'
    )
    arguments = ("evaluate", str(tiny_finetuned / "model"), "--tasks", str(tasks), "--data", str(data))
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("| task | rows | metric | model |\n")
    assert "| questions | 2 | mrr@100 |" in done.stdout


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"kind": "similarity", "corpora": [corpus("strange.tsv", "a", "b", "c")]}, "'five'"),
        ({**RETRIEVAL, "judgements": "strange.tsv"}, "'query_id' is not in list"),
        ({**RETRIEVAL, "documents": "strange.jsonl"}, "'text'"),
        ({**RETRIEVAL, "documents": "strange.tsv"}, "JSONDecodeError"),
        ({"kind": "words", "train": WIC, "corpora": [corpus("strange.tsv", "a", "a", "a", "b", "c")]}, "'first'"),
        (
            {
                "kind": "classification",
                "train": [corpus("topics.tsv", "text", "label")],
                "corpora": [corpus("strange.tsv", "a", "c")],
            },
            "'five'",
        ),
    ],
)
def test_data_that_do_not_fit_are_told_with_their_task(minilm_dir: Path, data: Path, task: dict, says: str) -> None:
    (data / "strange.tsv").write_text("a\tb\tc\nfirst\tsecond\tfive\n")
    (data / "strange.jsonl").write_text('{"_id": 1}\n')
    (read,) = run_of(task).tasks
    with pytest.raises(DataError, match=f"the data of task 'it' do not fit its kind, {task['kind']}: .*{says}"):
        Evaluator(minilm_dir, data).measure(read)
