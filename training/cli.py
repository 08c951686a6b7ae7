"""The nearsense-train command."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from encoder.config import ModelDirectoryError
from training.config import Data, FinetuneRun, PretrainRun, RunError, read_run
from training.data import Corpus, DataError
from training.distributed import join_world
from training.finetune import finetune
from training.pretrain import pretrain
from training.progress import TrainingError
from training.recombine import recombine
from training.source import Source
from training.store import report
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
_Device = Annotated[str, typer.Option("--device", help='"cpu", "cuda", or "auto".')]


@app.command("tokenizer")
def tokenizer_command(
    corpora: _Corpora,
    out: Annotated[Path, typer.Option("--out", help="The directory to make.")],
    data: _Data = Path(),
    vocab_size: Annotated[int, typer.Option(help="Entries of the vocabulary.")] = 16_000,
    share: Annotated[float, typer.Option(help="How much of the lines to read.")] = 1.0,
) -> None:
    """Learn a lower-cased WordPiece vocabulary.

    nearsense-train tokenizer reviews.txt --out tokenizer
    """
    listed = _read_names(corpora, share=share)
    settings = Data(deduplicate=False)

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


def _read_names(named: list[str], *, share: float = 1.0) -> list[Corpus]:
    parts = [name.partition(":") for name in named]
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
