"""The nearsense-train command."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from encoder.config import ModelDirectoryError
from training.classifier import ClassifierRun, encoder_run, train_classifier
from training.config import Data, FinetuneRun, PretrainRun, RunError, read_run
from training.data import Corpus, DataError
from training.distributed import join_world
from training.evaluate import evaluate
from training.finetune import finetune
from training.pretrain import pretrain
from training.progress import TrainingError
from training.recombine import recombine
from training.source import Source
from training.store import report
from training.suite import EvaluationRun
from training.tokenizer import train_tokenizer

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, pretty_exceptions_enable=False)

_Corpora = Annotated[
    list[str],
    typer.Argument(help="Files of text, each with its columns after a colon: notes.txt mails.jsonl:title,body."),
]
_Run = Annotated[Path, typer.Argument(help="The run file, TOML.")]
_Data = Annotated[Path, typer.Option("--data", help="What the paths of corpora are relative to.")]
_Out = Annotated[Path, typer.Option("--out", help="Where everything of this run goes; the model into OUT/model.")]
_Set = Annotated[list[str], typer.Option("--set", help="section.key=value in place of the run file's.")]
_EVALUATION = Path(__file__).parent / "runs" / "evaluation.toml"
_Device = Annotated[str, typer.Option("--device", help='"cpu", "cuda", or "auto".')]


@app.command("tokenizer")
def tokenizer_command(
    corpora: _Corpora,
    out: Annotated[Path, typer.Option("--out", help="The directory to make.")],
    data: _Data = Path(),
    vocab_size: Annotated[int, typer.Option(help="Entries of the vocabulary.")] = 16_000,
    share: Annotated[float, typer.Option(help="How much of the lines to read.")] = 1.0,
    decontaminate: Annotated[
        str | None, typer.Option(help="A file of hashes of evaluation sentences, relative to the data directory.")
    ] = None,
) -> None:
    """Learn a lower-cased WordPiece vocabulary.

    nearsense-train tokenizer reviews.txt --out tokenizer
    """
    listed = _read_names(corpora, share=share)
    settings = Data(deduplicate=False, decontaminate=decontaminate)

    def read() -> Iterator[str]:
        source = Source(listed, data, settings)
        yield from (item.texts[0] for item in source)
        report(source, settings, what="tokenizer")

    train_tokenizer(read, out, vocab_size=vocab_size)


@app.command("recombine")
def recombine_command(
    corpora: _Corpora,
    out: Annotated[Path, typer.Option("--out", help="The .txt to make, one sentence a line.")],
    data: _Data = Path(),
    count: Annotated[int, typer.Option(help="How many sentences to make.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Decides which.")] = 0,
) -> None:
    """Make new sentences from descriptions by exchanging their parts; a teacher makes them useful.

    nearsense-train recombine captions.tsv:text --out more-captions.txt
    """
    if out.exists():
        raise RunError(f"{out} must not exist yet; remove it or choose another --out")
    texts = [item.texts[0] for item in Source(_read_names(corpora), data, Data())]
    out.parent.mkdir(parents=True, exist_ok=True)
    made = recombine(texts, count=count, seed=seed)
    out.write_text("".join(f"{sentence}\n" for sentence in made), encoding="utf-8")


@app.command("pretrain")
def pretrain_command(
    run: _Run,
    tokenizer: Annotated[Path, typer.Option(help="The directory of the tokenizer.")],
    out: _Out,
    data: _Data = Path(),
    change: _Set = [],  # noqa: B006
    device: _Device = "auto",
) -> None:
    """Pretrain an encoder from random weights on masked tokens.

    nearsense-train pretrain training/runs/small.toml --tokenizer tokenizer --data corpora --out pretrained
    """
    described = read_run(run, PretrainRun, changes=tuple(change))
    with join_world(device=device) as world:
        pretrain(described, data=data, tokenizer=tokenizer, out=out, world=world)


@app.command("finetune")
def finetune_command(
    run: _Run,
    model: Annotated[Path, typer.Option(help="The model directory to begin from.")],
    out: _Out,
    data: _Data = Path(),
    change: _Set = [],  # noqa: B006
    device: _Device = "auto",
    fresh: Annotated[bool, typer.Option(help="Begin from random weights instead, for comparison.")] = False,
) -> None:
    """Turn a pretrained encoder into a sentence encoder.

    nearsense-train finetune training/runs/small-sentences.toml --model pretrained/model --data corpora --out sentences
    """
    described = read_run(run, FinetuneRun, changes=tuple(change))
    with join_world(device=device) as world:
        finetune(described, data=data, model=model, out=out, world=world, fresh=fresh)


@app.command("classifier")
def classifier_command(
    rows: Annotated[
        list[str],
        typer.Argument(
            help="A run file, TOML, or files of labelled texts with their two columns: reviews.tsv:text,label."
        ),
    ],
    model: Annotated[Path, typer.Option(help="The model directory whose embeddings the head reads.")],
    name: Annotated[str, typer.Option(help="Of the head, which goes into MODEL/heads/NAME.")],
    data: _Data = Path(),
    change: _Set = [],  # noqa: B006
    fine_tune: Annotated[bool, typer.Option("--fine-tune", help="First train the encoder itself, into OUT.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --fine-tune, where the new model goes: OUT/model.")] = None,
    device: _Device = "auto",
) -> None:
    """Make a classifier of labelled texts, stopped and calibrated on rows that it does not learn from.

    nearsense-train classifier reviews.tsv:text,label --model sentences/model --name sentiment
    """
    if fine_tune != (out is not None):
        raise RunError("--fine-tune needs --out, and --out is for --fine-tune alone")
    described: dict[str, Any] | Path = Path(rows[0])
    if len(rows) > 1 or described.suffix != ".toml":  # type: ignore[union-attr]
        described = {"corpora": [corpus.model_dump() for corpus in _read_names(rows)]}
    run = read_run(described, ClassifierRun, changes=tuple(change))
    with join_world(device=device) as world:
        if out is not None:
            model = finetune(encoder_run(run, model), data=data, model=model, out=out, world=world)
        if world.leads:
            path, head = train_classifier(run, data=data, model=model, name=name)
            typer.echo(f"{path}: {json.dumps(head.details, ensure_ascii=False, indent=1)}")


@app.command("evaluate")
def evaluate_command(
    model: Annotated[Path, typer.Argument(help="The model directory.")],
    against: Annotated[
        Path | None, typer.Option(help="Another, to stand beside it, or the JSON that its evaluation made.")
    ] = None,
    tasks: Annotated[Path, typer.Option(help="What to measure: an evaluation file, TOML.")] = _EVALUATION,
    data: _Data = Path(),
    out: Annotated[Path | None, typer.Option(help="A JSON file for all figures.")] = None,
) -> None:
    """Measure a model: similarity, retrieval, clustering, classification, words in context, perplexity.

    nearsense-train evaluate sentences/model --against all-MiniLM-L6-v2 --data corpora
    """
    run = read_run(tasks, EvaluationRun)
    typer.echo(evaluate(run, model, against=against, data=data, out=out))


def _read_names(named: list[str], *, share: float = 1.0) -> list[Corpus]:
    parts = [name.partition(":") for name in named]
    if not 0 < share <= 1:
        raise RunError(f"--share must be above 0 and at most 1, got {share}")
    return [
        Corpus(path=path, columns=tuple(filter(None, columns.split(","))), share=share) for path, _, columns in parts
    ]


def main() -> None:
    """Run the command; what a person can mend is told in one line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    try:
        app()
    except (RunError, DataError, ModelDirectoryError, TrainingError) as error:
        raise SystemExit(f"nearsense-train: {error}") from error


if __name__ == "__main__":
    main()
