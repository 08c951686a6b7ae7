"""Run files: what is said in them holds, and what cannot be is refused by the name of its key."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from training.config import Data, Distill, FinetuneRun, Masked, Pairs, PretrainRun, RunError, read_run

RUNS = Path(__file__).parent.parent.parent / "training" / "runs"
PRETRAIN = """
heldout = 0.03
corpora = [
    { path = "a.txt", share = 0.5 },
    { path = "b.tsv.gz", columns = ["title", "body"], where = { split = ["train", "dev"] } },
]
phases = [{ length = 13, share = 0.7 }, { length = 29, share = 0.3, batch_tokens = 999 }]

[model]
hidden_size = 14
num_layers = 3
num_heads = 2
intermediate_size = 31
max_positions = 37

[loop]
steps = 11

[data]
bad_rows = "refuse"
"""
FINETUNE = """
prefixes = [7, 14]

[loop]
steps = 11

[[objectives]]
kind = "pairs"
corpora = [{ path = "a.tsv", columns = ["a", "b"] }]

[[objectives]]
kind = "distill"
teacher = "teacher"
every = 2
corpora = [{ path = "b.txt" }]
"""


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def pretrain_run(tmp_path: Path, *changes: str, content: str = PRETRAIN) -> PretrainRun:
    return read_run(write(tmp_path / "run.toml", content), PretrainRun, changes=changes)


def finetune_run(tmp_path: Path, *changes: str, content: str = FINETUNE) -> FinetuneRun:
    return read_run(write(tmp_path / "run.toml", content), FinetuneRun, changes=changes)


def test_a_pretraining_run_is_what_the_file_says(tmp_path: Path) -> None:
    run = pretrain_run(tmp_path)
    assert [corpus.path for corpus in run.corpora] == ["a.txt", "b.tsv.gz"]
    assert run.corpora[0].share == 0.5
    assert run.corpora[1].columns == ("title", "body")
    assert run.corpora[1].where == {"split": ("train", "dev")}
    assert [(phase.length, phase.share, phase.batch_tokens) for phase in run.phases] == [
        (13, 0.7, 8192),
        (29, 0.3, 999),
    ]
    assert (run.model.hidden_size, run.model.max_positions, run.loop.steps, run.heldout) == (14, 37, 11, 0.03)
    assert run.data == Data(bad_rows="refuse")


def test_a_finetuning_run_is_what_the_file_says(tmp_path: Path) -> None:
    run = finetune_run(tmp_path)
    pairs, distill = run.objectives
    assert isinstance(pairs, Pairs)
    assert isinstance(distill, Distill)
    assert (pairs.corpora[0].columns, pairs.every) == (("a", "b"), 1)
    assert (distill.teacher, distill.every) == ("teacher", 2)
    assert (run.prefixes, run.max_length, run.optimizer.rate) == ((7, 14), 256, 5e-4)


@pytest.mark.parametrize("name", ["tiny.toml", "small.toml", "base.toml"])
def test_the_pretraining_runs_beside_the_code_are_right(name: str) -> None:
    assert read_run(RUNS / name, PretrainRun).corpora


@pytest.mark.parametrize("name", ["tiny-sentences.toml", "small-sentences.toml"])
def test_the_finetuning_runs_beside_the_code_are_right(name: str) -> None:
    assert read_run(RUNS / name, FinetuneRun).objectives


def test_a_run_is_not_changed_afterwards(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        pretrain_run(tmp_path).loop.steps = 5  # type: ignore[misc]


# -------------------------------------------------------------------------------------------------------------- changes


@pytest.mark.parametrize(
    ("change", "place", "value"),
    [
        ("loop.steps=100", "loop.steps", 100),
        ("loop.steps = 1_000", "loop.steps", 1000),
        (" loop.steps=7", "loop.steps", 7),
        ("optimizer.rate=3e-4", "optimizer.rate", 3e-4),
        ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", (0.8, 0.9)),
        ("loop.compile=true", "loop.compile", True),
        ('loop.precision="float32"', "loop.precision", "float32"),
        ("heldout=0.25", "heldout", 0.25),
        ("corpora.1.share=0.1", "corpora.1.share", 0.1),
        ('corpora.0={path = "c=d.txt"}', "corpora.0.path", "c=d.txt"),
        ('corpora=[{path = "e.txt"}]', "corpora.0.path", "e.txt"),
        ("phases.0.batch_tokens=77", "phases.0.batch_tokens", 77),
        ('data.decontaminate="decontam.u64"', "data.decontaminate", "decontam.u64"),
    ],
)
def test_a_change_takes_the_place_of_what_the_file_says(change: str, place: str, value: Any, tmp_path: Path) -> None:
    def at(run: PretrainRun) -> Any:
        found: Any = run
        for part in place.split("."):
            found = found[int(part)] if part.isdecimal() else getattr(found, part)
        return found

    assert at(pretrain_run(tmp_path)) != value
    changed = pretrain_run(tmp_path, change)
    assert at(changed) == value
    for section in set(PretrainRun.model_fields) - {place.partition(".")[0]}:
        assert getattr(changed, section) == getattr(pretrain_run(tmp_path), section)


def test_changes_are_made_in_order(tmp_path: Path) -> None:
    run = pretrain_run(tmp_path, "loop.steps=5", "loop.seed=3", "loop.steps=7")
    assert (run.loop.steps, run.loop.seed) == (7, 3)


def test_objectives_are_changed_by_their_number(tmp_path: Path) -> None:
    run = finetune_run(tmp_path, "objectives.1.cosine=0.5", "objectives.0.weight=2", 'objectives.0.kind="masked"')
    masked, distill = run.objectives
    assert isinstance(distill, Distill)
    assert distill.cosine == 0.5
    assert isinstance(masked, Masked)
    assert masked.weight == 2


@pytest.mark.parametrize(
    "change",
    ["loop.steps", "loop.steps=", "loop.steps=many", "", "=5x", "corpora.7.share=0.5", "corpora.x.share=0.5",
     "loop.steps.more=5", "heldout.more=5"],
)  # fmt: skip
def test_a_change_that_is_none_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as refused:
        pretrain_run(tmp_path, change)
    assert str(refused.value) == f"a change must be section.key=value with a TOML value, got {change!r}"


def test_a_change_to_an_unknown_key_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run\.toml: loop\.stpes: Extra inputs"):
        pretrain_run(tmp_path, "loop.stpes=100")
    with pytest.raises(RunError, match=r"run\.toml: lop: Extra inputs"):
        pretrain_run(tmp_path, "lop.steps=100")


# --------------------------------------------------------------------------------------------------------------- faults

PRETRAIN_FAULTS = {
    "stpes": "stpes=5",
    "loop.stpes": "loop.stpes=5",
    "corpora.0.colums": 'corpora.0.colums=["a"]',
    "model.dim": "model.dim=5",
    "loop.steps": 'loop.steps="many"',
    "model.num_heads": "model.num_heads=2.5",
    "optimizer.betas": "optimizer.betas=0.9",
    "corpora": 'corpora="a.txt"',
    "corpora.0.path": "corpora.0.path=5",
    "corpora.1.columns": 'corpora.1.columns="title"',
    "corpora.1.where.split": 'corpora.1.where.split="train"',
    "data.deduplicate": 'data.deduplicate="perhaps"',
    "loop.precision": 'loop.precision="float64"',
    "data.bad_rows": 'data.bad_rows="ignore"',
    "corpora.0.part": 'corpora.0.part="test"',
    "corpora.0.split": 'corpora.0.split="lines"',
    "loop.seed": "loop.seed=-1",
    "loop.accumulate": "loop.accumulate=0",
    "loop.save_every": "loop.save_every=-5",
    "model.hidden_size": "model.hidden_size=-14",
    "model.dropout": "model.dropout=1.0",
    "optimizer.rate": "optimizer.rate=-1e-3",
    "optimizer.warmup_steps": "optimizer.warmup_steps=-1",
    "optimizer.clip": "optimizer.clip=0",
    "optimizer.betas.1": "optimizer.betas=[0.9, 1.0]",
    "optimizer.average": "optimizer.average=1",
    "corpora.0.share": "corpora.0.share=0",
    "corpora.0.min_chars": "corpora.0.min_chars=0",
    "phases.0.length": "phases.0.length=0",
    "phases.1.share": "phases.1.share=1.5",
    "masking_rate": "masking_rate=1.0",
    "heldout": "heldout=0.5",
    "data.most_duplicates": "data.most_duplicates=-0.1",
}


@pytest.mark.parametrize("steps", ["-5", "0", "1.5", '"ten"', "[1]", "nan"])
def test_steps_are_a_positive_number(steps: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run\.toml: loop\.steps: Input should be"):
        pretrain_run(tmp_path, f"loop.steps={steps}")


def test_no_corpora_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run\.toml: corpora: .* at least 1 item"):
        pretrain_run(tmp_path, "corpora=[]")
    with pytest.raises(RunError, match=r"run\.toml: objectives: .* at least 1 item"):
        finetune_run(tmp_path, "objectives=[]")
    with pytest.raises(RunError, match=r"run\.toml: objectives\.0\.pairs\.corpora: .* at least 1 item"):
        finetune_run(tmp_path, "objectives.0.corpora=[]")


@pytest.mark.parametrize("section", ["model", "loop"])
def test_a_section_that_must_be_there_is_named(section: str, tmp_path: Path) -> None:
    parts = PRETRAIN.split("\n\n")
    content = "\n\n".join(part for part in parts if not part.startswith(f"[{section}]"))
    with pytest.raises(RunError, match=rf"run\.toml: {section}: Field required$"):
        pretrain_run(tmp_path, content=content)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (["phases.0.share=0.5"], r"the shares of the phases must add up to 1, got \[0\.5, 0\.3\]"),
        (["phases.0.share=0.8"], r"the shares of the phases must add up to 1, got \[0\.8, 0\.3\]"),
        (["phases=[]"], r"the shares of the phases must add up to 1, got \[\]"),
        (["phases.1.length=38"], r"a phase must fit max_positions \(37\), got length 38"),
        (["model.max_positions=28"], r"a phase must fit max_positions \(28\), got length 29"),
    ],
)
def test_phases_that_contradict_are_refused(changes: list[str], rule: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rf"run\.toml: .*{rule}"):
        pretrain_run(tmp_path, *changes)


def test_phases_that_just_fit_are_taken(tmp_path: Path) -> None:
    assert pretrain_run(tmp_path, "phases.1.length=37").phases[1].length == 37
    third = "{length = 13, share = 0.3333333333333333}"
    assert len(pretrain_run(tmp_path, f"phases=[{third}, {third}, {third}]").phases) == 3


def test_all_faults_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunError) as refused:
        pretrain_run(tmp_path, "loop.steps=-1", "model.num_heads=0", "extra=1")
    assert all(f"{key}: " in str(refused.value) for key in ("loop.steps", "model.num_heads", "extra"))


FINETUNE_FAULTS = {
    "objectives.0.pairs.temperature": "objectives.0.temperature=0",
    "objectives.0.pairs.teacher": 'objectives.0.teacher="a"',
    "objectives.0.pairs.batch_size": "objectives.0.batch_size=-1",
    "objectives.1.distill.every": "objectives.1.every=0",
    "objectives.1.distill.cosine": "objectives.1.cosine=-1",
    "objectives.1.distill.weight": "objectives.1.weight=0",
    "objectives.0": 'objectives.0.kind="pears"',
    "prefixes.1": "prefixes=[7, 0]",
    "max_length": "max_length=-1",
    "pooling": 'pooling="max"',
    "corpora": 'corpora=[{path = "a.txt"}]',
}


@pytest.mark.parametrize(
    ("make_run", "key", "change"),
    [
        *((pretrain_run, key, change) for key, change in PRETRAIN_FAULTS.items()),
        *((finetune_run, key, change) for key, change in FINETUNE_FAULTS.items()),
    ],
)
def test_a_fault_is_refused_by_the_name_of_its_key(
    make_run: Callable[..., BaseModel], key: str, change: str, tmp_path: Path
) -> None:
    with pytest.raises(RunError) as refused:
        make_run(tmp_path, change)
    assert str(refused.value).startswith(f"{tmp_path / 'run.toml'}: {key}: ")


def test_an_objective_must_say_its_kind(tmp_path: Path) -> None:
    content = FINETUNE.replace('kind = "pairs"\n', "")
    with pytest.raises(RunError, match=r"run\.toml: objectives\.0: .*'kind'"):
        finetune_run(tmp_path, content=content)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (b"[loop\nsteps = 5", r"run\.toml is not TOML in UTF-8: .*line 1"),
        (b"steps = 5\nsteps = 6\n", r"run\.toml is not TOML in UTF-8: Cannot overwrite a value"),
        (b"name = '\xff'", r"run\.toml is not TOML in UTF-8: 'utf-8' codec can't decode"),
        (b"", r"run\.toml: model: Field required; loop: Field required; corpora: Field required"),
    ],
)
def test_what_is_no_run_file_is_refused(content: bytes, rule: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=rule):
        read_run(write(tmp_path / "run.toml", content), PretrainRun)


def test_a_missing_run_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"the run file .*run\.toml cannot be read: No such file or directory"):
        read_run(tmp_path / "run.toml", PretrainRun)
    with pytest.raises(RunError, match="cannot be read: Is a directory"):
        read_run(tmp_path, PretrainRun)


def test_a_run_may_be_given_as_what_stands_in_its_file() -> None:
    described: dict[str, Any] = {
        "loop": {"steps": 11},
        "objectives": [{"kind": "masked", "corpora": [{"path": "a.txt"}]}],
    }
    run = read_run(described, FinetuneRun, changes=("loop.steps=5",))
    assert (run.loop.steps, run.objectives[0].kind) == (5, "masked")
    assert described["loop"] == {"steps": 11}
    with pytest.raises(RunError, match=r"^loop\.steps: Input should be"):
        read_run(described, FinetuneRun, changes=("loop.steps=-5",))
