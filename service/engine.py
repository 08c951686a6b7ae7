"""Engine: text → tokens → Batcher → SentenceEncoder, with none of the work on the event loop."""

import asyncio
import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, SupportsIndex

import numpy as np
from jaxtyping import Float32

from encoder.sentence import SentenceEncoder, TokenEmbeddings
from encoder.tokenizer import TokenizedText
from service.batching import CLOSED, Batcher, BatcherState
from service.errors import InvalidError, ModelError, NotReadyError

# So that a short request gets between the texts of a long one: a few milliseconds of a tokenizer thread.
TEXTS_AT_ONCE = 64
CHARACTERS_OF_TEXTS_AT_ONCE = 100_000
# A tokenizer spreads over the processors by itself; the second thread is for what Python does around it.
TOKENIZER_THREADS = 2
# What is done on the event loop: a tenth of a millisecond's work, against several for the way to a thread and back
# where all processors are busy.
CHARACTERS_AT_ONCE = 256
VECTORS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Embedded:
    """The embeddings of one request's texts, with an account of what was lost on the way. All in the texts' order."""

    vectors: Float32[np.ndarray, "texts dimensions"]
    tokens: Sequence[int]
    """What each whole text takes, prompt and special tokens included."""
    tokens_used: Sequence[int]
    """How many of these the model read."""
    truncated: Sequence[bool]
    """Whether the end of the text was cut off."""
    unknown_share: Sequence[float]
    """Share of what the model read that its vocabulary lacks, in [0, 1]."""


class Engine:
    """A model for many callers at once, in one event loop.

    Close it, or its threads stay until the process ends.

    Args:
        encoder: The model. Others may use it at the same time.
        max_batch_tokens: Largest batch, in tokens; at least the model's maximum length.
        max_queue_tokens: How many tokens may wait, whoever sent them; an idle engine takes more.
        workers: How many batches run at the same time. As many as there are processors, with one thread of the runtime
            each, is the fastest.
        express: Whether short requests may begin while all workers are busy, on a thread of their own.

    Raises:
        ValueError: A number is too small.
    """

    def __init__(
        self,
        encoder: SentenceEncoder,
        *,
        max_batch_tokens: int,
        max_queue_tokens: int,
        workers: int = 1,
        express: bool = False,
    ) -> None:
        if max_batch_tokens < encoder.spec.max_length:
            raise ValueError(
                f"max_batch_tokens must be at least the model's maximum length ({encoder.spec.max_length}), "
                f"got {max_batch_tokens}; raise NEARSENSE_MAX_BATCH_TOKENS"
            )
        self.encoder = encoder
        # A tokenised text wants one vector, a str one for each of its tokens.
        self._batcher: Batcher[TokenizedText | str, Any] = Batcher(
            self._run,
            max_batch_tokens=max_batch_tokens,
            max_queue_tokens=max_queue_tokens,
            workers=workers,
            express=express,
        )
        self._tokenizers = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")
        self._closed = False

    async def embed(
        self,
        texts: Sequence[str],
        *,
        normalize: bool = True,
        dimensions: SupportsIndex | None = None,
        prompt: str | None = None,
        truncate: bool = True,
    ) -> Embedded:
        """Give one vector per text, in order: what `SentenceEncoder.encode` gives, whatever other callers ask for.

        Cancel the call when its caller has left: what has not started then never runs.

        Args:
            texts: Any Unicode; an empty text has a vector too, and no texts have no vectors.
            normalize: Whether to scale each vector to length 1.
            dimensions: Keep this many leading components, before normalising; None keeps all.
            prompt: Put before each text. None means the model's default prompt if it names one, "" none at all.
            truncate: Whether to cut texts longer than the model's maximum length; else they are an error.

        Raises:
            InvalidError: A text is not Unicode text, or too long and not to be cut; or `dimensions` is not in
                [1, hidden_size]. The message names the text by its index.
            OverloadedError: Too much is waiting.
            NotReadyError: The engine is closed.
            ModelError: A vector is not finite, or has length 0 and cannot be normalised.
        """
        size = self._check_dimensions(dimensions)
        tokenized = await self._tokenize(texts, prompt=self._default_prompt() if prompt is None else prompt)
        if not truncate:
            self._refuse_longer(tokenized)
        rows = await self._submit(tokenized, tokenized)
        finish = partial(_finish, rows, self.encoder.hidden_size, size, normalize=normalize)
        return Embedded(
            vectors=finish() if len(rows) <= VECTORS_AT_ONCE else await asyncio.to_thread(finish),
            tokens=[text.total_tokens for text in tokenized],
            tokens_used=[len(text.input_ids) for text in tokenized],
            truncated=[text.truncated for text in tokenized],
            unknown_share=[text.unknown_share for text in tokenized],
        )

    async def embed_tokens(self, texts: Sequence[str]) -> list[TokenEmbeddings]:
        """Give the context-aware vector of every token of each text, in order, not normalised.

        No prompt is put before the texts, and longer ones are cut, which each result tells.

        Raises:
            InvalidError: A text is not Unicode text. The message names its index.
            OverloadedError: Too much is waiting.
            NotReadyError: The engine is closed.
            ModelError: A vector is not finite.
        """
        tokenized = await self._tokenize(texts, prompt="")
        return await self._submit(texts, tokenized)

    async def tokenize(self, texts: Sequence[str]) -> list[TokenizedText]:
        """Give the tokens of each whole text, not cut, with their spans.

        Raises:
            InvalidError: A text is not Unicode text. The message names its index.
        """
        return await self._tokenize(texts, prompt="", whole=True)

    def state(self) -> BatcherState:
        """Count what waits and what has been done."""
        return self._batcher.state()

    async def close(self, *, drain: bool = True) -> None:
        """Take no more requests, and return when all threads have ended.

        Args:
            drain: Whether to answer what is queued; else it fails at once with NotReadyError. Requests whose texts are
                still being tokenised fail in any case.
        """
        self._closed = True
        await self._batcher.close(drain=drain)
        await asyncio.to_thread(self._tokenizers.shutdown)

    async def _submit(self, items: Sequence[TokenizedText | str], tokenized: Sequence[TokenizedText]) -> list[Any]:
        """Give the result of each item; they run sorted by length.

        A batch takes what comes next of a request, and texts of unlike length cost padding, or many small passes:
        unsorted, 2,048 mixed sentences ran at 50-65 % of this rate.
        """
        lengths = [len(text.input_ids) for text in tokenized]
        order = sorted(range(len(items)), key=lambda index: -lengths[index])
        results = await self._batcher.submit([items[index] for index in order], [lengths[index] for index in order])
        by_index = dict(zip(order, results, strict=True))
        return [by_index[index] for index in range(len(items))]

    def _run(self, batch: Sequence[TokenizedText | str]) -> list[Any]:
        """Turn a batch of several callers into vectors, full and not normalised. Runs on the batcher's threads."""
        try:
            pooled = self.encoder.encode_tokenized(
                [item for item in batch if isinstance(item, TokenizedText)], normalize=False
            )
            per_token = self.encoder.encode_tokens([item for item in batch if isinstance(item, str)])
        except FloatingPointError as error:
            # The encoder counts from the start of the batch, which is no caller's own count.
            raise ModelError(
                "the model gave a vector that is not finite; the model is damaged or its precision too low"
            ) from error
        vectors, token_embeddings = iter(pooled), iter(per_token)
        return [next(token_embeddings) if isinstance(item, str) else next(vectors) for item in batch]

    async def _tokenize(self, texts: Sequence[str], *, prompt: str, whole: bool = False) -> list[TokenizedText]:
        if isinstance(texts, str):
            raise TypeError("texts must be a sequence of str, got a single str; put it into a list")
        # To tokenise what is sure to be refused would help nobody. Each text takes at least one token.
        self._batcher.require_room(len(texts))
        loop = asyncio.get_running_loop()
        tokenized: list[TokenizedText] = []
        while (start := len(tokenized)) < len(texts):
            if self._closed:
                raise NotReadyError(CLOSED)
            part = [prompt + text if isinstance(text, str) else text for text in _next_part(texts, start)]
            if len(texts) == 1 and isinstance(part[0], str) and len(part[0]) <= CHARACTERS_AT_ONCE:
                return self._encode(part, start, whole)
            tokenized += await loop.run_in_executor(self._tokenizers, self._encode, part, start, whole)
        return tokenized

    def _encode(self, part: list[str], start: int, whole: bool) -> list[TokenizedText]:
        """Tokenise the texts from index `start` on. Runs on the tokenizer threads."""
        try:
            return self.encoder.tokenizer.encode(part, spans=whole, cut=not whole)
        except (TypeError, ValueError):
            pass
        try:  # Again, for a message that counts from the first text. Nothing is tokenised before all are checked.
            return self.encoder.tokenizer.encode([""] * start + part)[start:]
        except (TypeError, ValueError) as error:
            raise InvalidError(str(error)) from error

    def _default_prompt(self) -> str:
        spec = self.encoder.spec
        return "" if spec.default_prompt is None else spec.prompts[spec.default_prompt]

    def _check_dimensions(self, dimensions: SupportsIndex | None) -> int:
        if dimensions is None:
            return self.encoder.hidden_size
        size = operator.index(dimensions)
        if isinstance(dimensions, bool) or not 1 <= size <= self.encoder.hidden_size:
            raise InvalidError(f"dimensions must be between 1 and {self.encoder.hidden_size}, got {dimensions!r}")
        return size

    def _refuse_longer(self, texts: Sequence[TokenizedText]) -> None:
        for index, text in enumerate(texts):
            if text.truncated:
                raise InvalidError(
                    f"text {index} must have at most {self.encoder.spec.max_length} tokens when it is not to be cut, "
                    f"got {text.total_tokens}; shorten or split it, or allow truncation"
                )


def _next_part(texts: Sequence[str], start: int) -> Sequence[str]:
    """Give the texts from `start` on that are tokenised together: at least one, and never long for all."""
    end, characters = start, 0
    while end < min(len(texts), start + TEXTS_AT_ONCE) and (end == start or characters < CHARACTERS_OF_TEXTS_AT_ONCE):
        characters += len(texts[end]) if isinstance(texts[end], str) else 0
        end += 1
    return texts[start:end]


def _finish(
    rows: Sequence[Float32[np.ndarray, " hidden"]], hidden_size: int, size: int, *, normalize: bool
) -> Float32[np.ndarray, "texts dimensions"]:
    vectors = np.array(rows, dtype=np.float32).reshape(-1, hidden_size)[:, :size]
    if not normalize:
        return vectors
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    if not lengths.all():
        raise ModelError(
            f"the vector of text {np.argmin(lengths)} has length 0 and cannot be normalised; "
            "ask for more dimensions, or for vectors that are not normalised"
        )
    vectors /= lengths
    return vectors
