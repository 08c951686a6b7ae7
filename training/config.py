"""Run files: TOML that says all of what a training run does."""

import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from training.data import Corpus

Share = Annotated[float, Field(ge=0, lt=1)]


class RunError(ValueError):
    """A run file or a command's arguments ask for what cannot be done."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Data(_Section):
    """How texts are read, whatever they are for."""

    bad_rows: Literal["skip", "refuse"] = "skip"
    decontaminate: str | None = None
    """A file of hashes of evaluation sentences, relative to the data directory; texts that hold one are dropped."""
    deduplicate: bool = True
    """Whether to drop what differs from a former text in case and punctuation alone. Takes 100 bytes a text."""
    most_duplicates: Share = 0.5
    """A larger share of duplicates in a corpus raises an alarm."""


class Optimizer(_Section):
    """AdamW, and how its rate rises and falls."""

    rate: PositiveFloat = 1e-3
    betas: tuple[Share, Share] = (0.9, 0.98)
    weight_decay: NonNegativeFloat = 0.01
    """Of matrices; biases, norms and embeddings' vectors have none."""
    warmup_steps: NonNegativeInt = 300
    final_rate: Share = 0.02
    """Share of the rate that is left at the end of the cosine."""
    clip: PositiveFloat = 1.0
    """Largest norm of the gradient."""
    average: Share = 0.0
    """Decay of the moving average of the weights, which is what is saved; 0 saves the last ones."""


class Loop(_Section):
    """How long, how precisely, and what is told on the way."""

    steps: PositiveInt
    accumulate: PositiveInt = 1
    """Batches whose gradients are added before a step."""
    seed: NonNegativeInt = 0
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the products; "auto" is bfloat16 where the processor has it."""
    compile: bool = False
    """Whether torch.compile fuses the step; worth it on a GPU."""
    log_every: PositiveInt = 50
    evaluate_every: PositiveInt = 1000
    save_every: PositiveInt = 1000
    """Steps between two states on disk that a killed run goes on from."""


class Shape(_Section):
    """Sizes of a new encoder."""

    hidden_size: PositiveInt
    num_layers: PositiveInt
    num_heads: PositiveInt
    intermediate_size: PositiveInt
    max_positions: PositiveInt = 512
    dropout: Share = 0.0
    """With more text than steps nothing is seen often enough to be learned by heart."""


class Phase(_Section):
    """A part of pretraining with sequences of one length."""

    length: PositiveInt
    share: float = Field(gt=0, le=1)
    """Of all steps."""
    batch_tokens: PositiveInt = 8192


class PretrainRun(_Section):
    """Masked-token prediction, from random weights."""

    data: Data = Data()
    model: Shape
    loop: Loop
    optimizer: Optimizer = Optimizer()
    corpora: tuple[Corpus, ...] = Field(min_length=1)
    phases: tuple[Phase, ...] = (Phase(length=128, share=1.0),)
    masking_rate: float = Field(0.25, gt=0, lt=1)
    """Share of the tokens to be predicted. Of these 80 % are masked, 10 % replaced, 10 % left as they are.
    More than BERT's 15 % learns faster per step: Wettig et al. 2022, arXiv:2202.08005; 25 % is what Geiping & Goldstein
    2022, arXiv:2212.14034, found best for a budget of one day."""
    heldout: float = Field(0.005, gt=0, lt=0.5)
    """Share of the documents that is kept for the held-out loss."""

    @model_validator(mode="after")
    def _check(self) -> "PretrainRun":
        if abs(sum(phase.share for phase in self.phases) - 1) > 1e-6:
            raise ValueError(f"the shares of the phases must add up to 1, got {[p.share for p in self.phases]}")
        if longest := [phase.length for phase in self.phases if phase.length > self.model.max_positions]:
            raise ValueError(f"a phase must fit max_positions ({self.model.max_positions}), got length {longest[0]}")
        return self


class Objective(_Section):
    """What all objectives have: texts, and how much they weigh."""

    corpora: tuple[Corpus, ...] = Field(min_length=1)
    weight: PositiveFloat = 1.0
    batch_size: PositiveInt = 256
    """Most texts (or pairs) of a batch."""
    batch_tokens: PositiveInt = 16384
    """Most tokens of a batch, so long texts make smaller ones."""
    every: PositiveInt = 1
    """Steps between two batches of this objective."""


class Distill(Objective):
    """Learn a teacher's vectors and the similarities between them."""

    kind: Literal["distill"]
    teacher: str | None = None
    """A model directory that we can run; None where each corpus names its file of vectors."""
    cosine: float = Field(4.0, ge=0)
    """Weight of 1 − cos(student, teacher)."""
    contrast: float = Field(1.0, ge=0)
    """Weight of the cross-entropy of picking the right teacher's vector among those of the batch."""
    similarity: float = Field(20.0, ge=0)
    """Weight of the mean squared difference between the two matrices of cosines."""
    temperature: PositiveFloat = 0.05


class Pairs(Objective):
    """Pull the two texts of a pair together and push apart all others of the batch (InfoNCE, both ways)."""

    kind: Literal["pairs"]
    temperature: PositiveFloat = 0.05


class Scored(Objective):
    """Order pairs of texts as their scores do. The last column is the score. A higher one is nearer (CoSENT)."""

    kind: Literal["scored"]
    temperature: PositiveFloat = 0.05


class Classes(Objective):
    """Let a linear classifier read the label, which is the last column, from the embedding."""

    kind: Literal["classes"]


class Denoise(Objective):
    """Rebuild a text from the embedding of what is left of it when words are deleted (TSDAE)."""

    kind: Literal["denoise"]
    delete: Share = 0.6
    """Share of the words that is deleted. Source: Wang et al. 2021, arXiv:2104.06979."""
    num_layers: PositiveInt = 1
    """Of the decoder, which reads the embedding through cross-attention and is thrown away afterwards."""


class Masked(Objective):
    """Go on predicting masked tokens, on single texts."""

    kind: Literal["masked"]
    masking_rate: float = Field(0.25, gt=0, lt=1)


AnyObjective = Annotated[Distill | Pairs | Scored | Classes | Denoise | Masked, Field(discriminator="kind")]


class FinetuneRun(_Section):
    """From a pretrained directory to a sentence encoder."""

    data: Data = Data()
    loop: Loop
    optimizer: Optimizer = Optimizer(rate=5e-4)
    objectives: tuple[AnyObjective, ...] = Field(min_length=1)
    max_length: PositiveInt = 256
    """Tokens that a text is cut to, in training and ever after."""
    pooling: Literal["mean", "cls"] = "mean"
    prefixes: tuple[PositiveInt, ...] = ()
    """Leading parts of the embedding that must be good by themselves (Matryoshka), beside the whole.
    Source: Kusupati et al. 2022, arXiv:2205.13147."""


Run = TypeVar("Run", bound=BaseModel)


def read_run(described: Path | dict[str, Any], kind: type[Run], *, changes: tuple[str, ...] = ()) -> Run:
    """Read a run file.

    Args:
        described: TOML, or what stands in it.
        kind: Which run it describes.
        changes: "loop.steps=100": values, as TOML, that take the place of the file's.

    Raises:
        RunError: It is not TOML, or a key is missing, unknown or impossible; the message names each.
    """
    raw = deepcopy(described) if isinstance(described, dict) else _read_toml(described)
    for change in changes:
        _change(raw, change)
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        where = "" if isinstance(described, dict) else f"{described}: "
        raise RunError(f"{where}{faults}") from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(f"the run file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path} is not TOML in UTF-8: {error}") from error


def _change(raw: dict[str, Any], change: str) -> None:
    key, _, value = change.partition("=")
    *sections, last = key.strip().split(".")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
        place: Any = raw
        for section in sections:
            place = place[int(section)] if isinstance(place, list) else place.setdefault(section, {})
        if isinstance(place, list):
            place[int(last)] = parsed
        else:
            place[last] = parsed
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise RunError(f"a change must be section.key=value with a TOML value, got {change!r}") from error
