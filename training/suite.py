"""What to measure: the tasks that an evaluation file names. Paths are relative to the data directory."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from training.data import Corpus


class _Task(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str


class Similarity(_Task):
    """Rank correlation of cosines with people's scores. The columns are two texts and the score."""

    kind: Literal["similarity"]
    corpora: tuple[Corpus, ...]


class Retrieval(_Task):
    """Finding the passages that answer a query, by cosine."""

    kind: Literal["retrieval"]
    documents: str
    """JSON lines with _id, text, and perhaps title."""
    queries: str
    """JSON lines with _id and text."""
    judgements: str
    """Tab-separated with a header: query_id, doc_id, relevance; above 0 is relevant."""


class PairRetrieval(_Task):
    """Finding each question's own answer among all answers. The columns are question and answer."""

    kind: Literal["pairs"]
    corpora: tuple[Corpus, ...]


class Clustering(_Task):
    """k-means into as many clusters as there are labels, against the labels: V-measure, mean of five seeds.

    The columns are the text and its label.
    """

    kind: Literal["clustering"]
    corpora: tuple[Corpus, ...]


class Classification(_Task):
    """A logistic regression on frozen embeddings. The columns are the text and its label."""

    kind: Literal["classification"]
    train: tuple[Corpus, ...]
    corpora: tuple[Corpus, ...]
    most_rows: PositiveInt = 20_000
    """To train on, the first ones after a shuffle with a fixed seed."""


class Head(_Task):
    """A head of the model directory; where there is none, a logistic regression on `train`, as in classification."""

    kind: Literal["head"]
    head: str
    train: tuple[Corpus, ...]
    corpora: tuple[Corpus, ...]
    labels: dict[str, str] = {}
    """Names for the labels of the files."""
    most_rows: PositiveInt = 20_000


class WordInContext(_Task):
    """Whether a word means the same in two sentences: cosine of its token vectors, threshold found on `train`.

    The columns are label (T or F), the two word numbers, and the two sentences, split at spaces.
    """

    kind: Literal["words"]
    train: Corpus
    corpora: tuple[Corpus, ...]


class Perplexity(_Task):
    """Masked-token perplexity, 15 % of the tokens masked, of models that have kept their masked-token head."""

    kind: Literal["perplexity"]
    corpora: tuple[Corpus, ...]


AnyTask = Annotated[
    Similarity | Retrieval | PairRetrieval | Clustering | Classification | Head | WordInContext | Perplexity,
    Field(discriminator="kind"),
]


class EvaluationRun(BaseModel):
    """What to measure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: tuple[AnyTask, ...] = Field(min_length=1)
