"""SentenceEncoder: the one door. Text in, vectors out."""

import logging
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from encoder.model_dir import ModelSpec, fingerprint, read_spec
from encoder.tokenizer import Span, TextTokenizer, TokenBatch, TokenizedText
from encoder.weights import read_weights

logger = logging.getLogger(__name__)

# Both measured, in benchmarks/README.md: a larger batch is no faster, and more padding costs more than another batch.
MAX_BATCH_TOKENS = 2048
MAX_BATCH_PADDING = 64


@runtime_checkable
class Runtime(Protocol):
    """What runs the encoder. Padding must have no influence on what comes out for real tokens."""

    def embed(self, batch: TokenBatch) -> Float32[np.ndarray, "batch hidden"]:
        """Give one vector per sentence, pooled and not normalised."""

    def embed_tokens(self, batch: TokenBatch) -> Float32[np.ndarray, "batch seq hidden"]:
        """Give one vector per token; what stands at padding is meaningless."""


@dataclass(frozen=True, slots=True)
class TokenEmbeddings:
    """The context-aware vectors of one text's tokens, special tokens included, as the last layer gives them."""

    tokens: Sequence[str]
    spans: Sequence[Span]
    """Where each token stands in the text, in characters, end exclusive; (0, 0) for special tokens."""
    vectors: Float32[np.ndarray, "tokens hidden"]
    truncated: bool
    """Whether the end of the text was cut off."""


class SentenceEncoder:
    """A model, ready to turn text into vectors; `load` makes one.

    Any number of threads may share one. Processes that fork must load it after they forked.
    """

    def __init__(self, spec: ModelSpec, *, fingerprint: str, runtime: Runtime) -> None:
        self.spec = spec
        self.fingerprint = fingerprint
        self.tokenizer = TextTokenizer(spec)
        self._runtime = runtime

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        runtime: Literal["torch"] = "torch",
        precision: Literal["float32", "bfloat16"] = "float32",
        device: str = "cpu",
        threads: int | None = None,
    ) -> "SentenceEncoder":
        """Load a sentence-transformers directory with a BERT encoder.

        Args:
            model_dir: The directory.
            runtime: What runs it; "torch" is the only one so far.
            precision: What the products are computed in.
            device: Where to run, as torch names it: "cpu", "cuda", "cuda:1".
            threads: Processor threads of the runtime, for the whole process; None leaves them as they are.

        Raises:
            ModelDirectoryError: The directory is incomplete, contradictory, or not BERT mathematics.
            ValueError: An unknown runtime or precision.
            ImportError: The runtime is not installed.
        """
        if runtime != "torch":
            raise ValueError(f"runtime must be 'torch', got {runtime!r}")
        try:
            from encoder.runtime_torch import TorchRuntime  # noqa: PLC0415 - this module must not need torch
        except ModuleNotFoundError as error:
            raise ImportError("the torch runtime needs torch: pip install 'nearsense[train]'") from error
        path = Path(model_dir)
        spec = read_spec(path)
        weights = read_weights(path, spec.config)
        loaded = TorchRuntime(spec, weights, precision=precision, device=device, threads=threads)
        return cls(spec, fingerprint=fingerprint(spec, weights), runtime=loaded)

    @property
    def hidden_size(self) -> int:
        """Length of a full embedding."""
        return self.spec.config.hidden_size

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt: str | None = None,
    ) -> Float32[np.ndarray, "*texts dimensions"]:
        """Give one vector per text, in order; one str gives one vector without the first axis.

        The same text gives the same vector within 1e-5 (float32, normalised), whatever stands beside it. Texts longer
        than the model's maximum length are cut at their end, and the log says how many; `tokenizer.encode`, followed by
        `encode_tokenized`, tells it text by text.

        Args:
            texts: Any Unicode; an empty text has a vector too.
            normalize: Whether to scale each vector to length 1, so that the dot product of two is their cosine.
            dimensions: Keep this many leading components, before normalising; None keeps all.
            prompt: Put before each text, such as `spec.prompts["query"]`; None is the model's default prompt, if any.

        Raises:
            TypeError: A text is not a str. The message names its index.
            ValueError: A text holds a lone surrogate, or `dimensions` is not in [1, hidden_size].
            FloatingPointError: A vector is not finite, or has length 0 and cannot be normalised.
        """
        listed = [texts] if isinstance(texts, str) else list(texts)
        if prompt is None:
            prompt = self.spec.prompts[self.spec.default_prompt] if self.spec.default_prompt is not None else ""
        if not isinstance(prompt, str):
            raise TypeError(f"prompt must be a str, got {type(prompt).__name__}")
        if prompt:
            listed = [prompt + text if isinstance(text, str) else text for text in listed]
        tokenized = self.tokenizer.encode(listed)
        if truncated := sum(text.truncated for text in tokenized):
            logger.warning("%d of %d texts were cut to %d tokens", truncated, len(listed), self.spec.max_length)
        vectors = self.encode_tokenized(tokenized, normalize=normalize, dimensions=dimensions)
        return vectors[0] if isinstance(texts, str) else vectors

    def encode_tokenized(
        self, texts: Sequence[TokenizedText], *, normalize: bool = True, dimensions: int | None = None
    ) -> Float32[np.ndarray, "texts dimensions"]:
        """Give one vector per tokenised text, in order. Arguments and errors are those of `encode`."""
        size = self.hidden_size if dimensions is None else operator.index(dimensions)
        if isinstance(dimensions, bool) or not 1 <= size <= self.hidden_size:
            raise ValueError(f"dimensions must be between 1 and {self.hidden_size}, got {dimensions!r}")
        vectors = np.empty((len(texts), self.hidden_size), dtype=np.float32)
        for rows, batch in self._batches(texts):
            vectors[rows] = self._runtime.embed(batch)
        _require_finite(vectors)
        vectors = vectors[:, :size]
        return _normalize(vectors) if normalize else vectors

    def encode_tokens(self, texts: str | Iterable[str]) -> list[TokenEmbeddings]:
        """Give the context-aware vector of every token of each text, in order. No prompt is put before the texts.

        "bank" has one vector in "the bank of the river" and another in "the bank lent money". For a model that pools by
        the mean, the mean of a text's vectors is its embedding before normalisation.

        One str is a list of one. Longer texts are cut at their end, and say so. Errors are those of `encode`.
        """
        tokenized = self.tokenizer.encode([texts] if isinstance(texts, str) else list(texts), spans=True)
        embedded: dict[int, Float32[np.ndarray, "tokens hidden"]] = {}
        for rows, batch in self._batches(tokenized):
            for row, vectors in zip(rows, self._runtime.embed_tokens(batch), strict=True):
                embedded[row] = vectors[: len(tokenized[row].input_ids)].copy()
                _require_finite(embedded[row], of=f"a token of text {row}")
        return [
            TokenEmbeddings(self.tokenizer.tokens(text.input_ids), text.spans, embedded[row], text.truncated)
            for row, text in enumerate(tokenized)
        ]

    def _batches(self, texts: Sequence[TokenizedText]) -> Iterator[tuple[list[int], TokenBatch]]:
        for rows in plan_batches([len(text.input_ids) for text in texts]):
            batch = [texts[row] for row in rows]
            yield rows, TokenBatch.collate(batch, pad_token_id=self.spec.config.pad_token_id)


def plan_batches(
    lengths: Sequence[int], *, max_tokens: int = MAX_BATCH_TOKENS, max_padding: int = MAX_BATCH_PADDING
) -> list[list[int]]:
    """Sort texts into batches of near-equal length, the longest first.

    Args:
        lengths: Tokens of each text.
        max_tokens: Largest padded size of a batch, in tokens; a single text may exceed it.
        max_padding: Largest padding of a batch, in tokens.

    Returns:
        The indices of each batch; every index stands in exactly one.
    """
    batches: list[list[int]] = []
    longest = padding = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        padding += longest - lengths[row]
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens or padding > max_padding:
            batches.append([])
            longest, padding = lengths[row], 0
        batches[-1].append(row)
    return batches


def _normalize(vectors: Float32[np.ndarray, "texts dimensions"]) -> Float32[np.ndarray, "texts dimensions"]:
    # In double precision, or the squares of large components would overflow.
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not lengths.all():
        raise FloatingPointError(f"the vector of text {np.argmin(lengths)} has length 0; ask for more dimensions")
    return (vectors / lengths).astype(np.float32)


def _require_finite(vectors: Float32[np.ndarray, "rows hidden"], *, of: str | None = None) -> None:
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        where = of or f"text {np.argmin(finite)}"
        raise FloatingPointError(f"the vector of {where} is not finite; the model is damaged or its precision too low")
