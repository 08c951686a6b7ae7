"""What requests may hold. Unknown fields are errors, so that a misspelt one is not silently without effect."""

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    WithJsonSchema,
    model_validator,
)

NO_IDS = (
    "must be a string, not token ids: other models' ids would become other texts; "
    "for LangChain set check_embedding_ctx_length=False"
)


# Far beyond what a model reads; a longer one would keep a processor from everything else for seconds.
MAX_TEXT_CHARACTERS = 1_000_000
_TOO_LONG = f"must have at most {MAX_TEXT_CHARACTERS:,} characters; split it"


def _texts(value: object) -> object:
    """One text becomes a list of one; what looks like token ids is told apart from other faults."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        if not value:
            raise ValueError("must hold at least one text")
        for index, text in enumerate(value):
            numbers = text if isinstance(text, list) else [text]
            if numbers and all(type(number) is int for number in numbers):
                raise ValueError(f"text {index} {NO_IDS}")
            if text == "":
                raise ValueError(f"text {index} must not be empty")
            if isinstance(text, str) and len(text) > MAX_TEXT_CHARACTERS:
                raise ValueError(f"text {index} {_TOO_LONG}, got {len(text):,}")
    return value


def _id_lists(value: object) -> object:
    """One list of ids becomes a list of one."""
    return [value] if isinstance(value, list) and value and type(value[0]) is int else value


NAME_PATTERN = "^[a-z0-9][a-z0-9_-]{0,62}$"
_TEXT_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT_CHARACTERS}
# At the first wrong item: millions of them would take longer to list than to send.
Texts = Annotated[
    list[str],
    Field(fail_fast=True),
    BeforeValidator(_texts),
    WithJsonSchema(
        {
            "anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1}],
            "examples": [["Pizza is great."]],
        }
    ),
]
NotEmpty = Annotated[str, Field(min_length=1)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS)]


class Request(BaseModel):
    """A body whose values are taken as they are: "5" is no number and 1 is no truth value."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_field(cls, given: Any) -> Any:
        # Before pydantic lists each of them, which for a million takes longer than anybody waits.
        if isinstance(given, dict):
            unknown = next((name for name in given if name not in cls.model_fields), None)
            if unknown is not None:
                raise ValueError(f"there is no field {unknown[:80]!r}; there are {', '.join(cls.model_fields)}")
        return given


class ReadingOptions(Request):
    """How texts are read; of POST /similarity the parameters."""

    truncate: bool | None = True
    truncation_direction: Literal["right", "Right"] = "right"
    prompt_name: str | None = None


class EmbedAllRequest(ReadingOptions):
    """POST /embed_all."""

    inputs: Texts


class EmbedRequest(EmbedAllRequest):
    """POST /embed, as text-embeddings-inference takes it."""

    normalize: bool | None = True
    dimensions: int | None = None


class TokenizeRequest(Request):
    """POST /tokenize."""

    inputs: Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(Request):
    """POST /decode."""

    ids: Annotated[
        list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True), BeforeValidator(_id_lists)
    ] = Field(min_length=1)
    skip_special_tokens: bool = True


class SimilarityInputs(Request):
    """The two sides of POST /similarity."""

    source_sentence: Text
    sentences: Texts


class SimilarityRequest(Request):
    """POST /similarity."""

    inputs: SimilarityInputs
    parameters: ReadingOptions | None = None


class OpenAIEmbeddingsRequest(Request):
    """POST /v1/embeddings, as OpenAI's clients send it. `user` has no effect."""

    input: Texts
    model: str
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class DocumentRequest(Request):
    """A document to store; without an id it gets one."""

    id: str | None = None
    text: Text
    metadata: dict[str, Any] = Field(default_factory=dict)


class DeleteRequest(Request):
    """POST /collections/{collection}/documents/delete."""

    ids: Annotated[list[str], Field(fail_fast=True)] = Field(min_length=1)


class SearchRequest(Request):
    """POST /search: by exactly one of a text, a vector and the id of a stored document."""

    query: Text | None = None
    vector: Annotated[list[FiniteFloat], Field(fail_fast=True)] | None = None
    id: str | None = None
    collection: str = "default"
    k: int = Field(10, ge=1, le=10_000)
    min_score: FiniteFloat | None = None

    @model_validator(mode="after")
    def _one_question(self) -> "SearchRequest":
        if sum(side is not None for side in (self.query, self.vector, self.id)) != 1:
            raise ValueError("exactly one of query, vector and id must be given")
        return self


class Example(Request):
    """A text and what it should be called."""

    text: Text
    label: NotEmpty


class TeachRequest(Request):
    """PUT /classifiers/{classifier}."""

    examples: Annotated[list[Example], Field(fail_fast=True)] = Field(min_length=2)
    C: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] = 1.0
    """Inverse strength of regularisation."""


class ClassifyRequest(Request):
    """POST /classify."""

    inputs: Texts
    classifier: str = "sentiment"


def _documents(documents: list[DocumentRequest]) -> list[DocumentRequest]:
    if not documents:
        raise ValueError("must hold at least one document")
    return documents


Documents = Annotated[list[DocumentRequest], Field(fail_fast=True), AfterValidator(_documents)]
