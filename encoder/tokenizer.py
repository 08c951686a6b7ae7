"""From text to token ids, and back to the characters they came from. Needs no torch."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from jaxtyping import Bool, Int64
from tokenizers import Tokenizer, normalizers

from encoder.config import ModelDirectoryError
from encoder.model_dir import ModelSpec

Span = tuple[int, int]
_TEXTS_AT_ONCE = 512  # what tokenizers returns for a text takes six times the memory of what is kept of it
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """One text as token ids, with an account of what was lost on the way."""

    input_ids: Sequence[int]
    """What the encoder reads: at most the maximum length, special tokens included."""
    total_tokens: int
    """What the whole text takes, special tokens included."""
    unknown_share: float
    """Share of what the encoder reads that the vocabulary lacks, in [0, 1]; 0 for an empty text."""
    spans: Sequence[Span] = ()
    """Where each token stands in the text, in characters, end exclusive; (0, 0) for special ones. Only if asked for."""

    @property
    def truncated(self) -> bool:
        """Whether the end of the text was cut off."""
        return self.total_tokens > len(self.input_ids)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Texts padded to one length, for one pass through the encoder; each row has at least one real token (True)."""

    input_ids: Int64[np.ndarray, "batch seq"]
    attention_mask: Bool[np.ndarray, "batch seq"]

    @classmethod
    def collate(cls, texts: Sequence[TokenizedText], *, pad_token_id: int) -> "TokenBatch":
        """Pad at the end, to the longest of the texts."""
        lengths = np.array([len(text.input_ids) for text in texts])
        attention_mask = np.arange(lengths.max()) < lengths[:, None]
        input_ids = np.full(attention_mask.shape, pad_token_id, dtype=np.int64)
        input_ids[attention_mask] = [token for text in texts for token in text.input_ids]
        return cls(input_ids, attention_mask)


class TextTokenizer:
    """A model's tokenizer, cut to the model's length. Immutable, so any number of threads may share one.

    A `tokenizers.Tokenizer` refuses work ("Already borrowed") when one thread changes its truncation or padding while
    another uses it. Here both are off for good: cutting is done by us, which also tells how much was cut.

    Raises:
        ModelDirectoryError: The tokenizer cannot be read, adds no special tokens, makes several segments of a text, or
            knows ids that the encoder has no vector for.
    """

    def __init__(self, spec: ModelSpec) -> None:
        try:
            self._tokenizer = Tokenizer.from_str(spec.tokenizer_json)
        except Exception as error:  # tokenizers raises no narrower class
            raise ModelDirectoryError(f"tokenizer.json is not one that tokenizers can read: {error}") from error
        if spec.lowercase:
            inner = self._tokenizer.normalizer
            lowercase = [normalizers.Lowercase()]
            self._tokenizer.normalizer = normalizers.Sequence(lowercase if inner is None else [*lowercase, inner])
        self.max_length = spec.max_length
        self._unknown_id = _unknown_id(self._tokenizer, spec.tokenizer_json)
        self._special, self._suffix = self._check(spec)

    def encode(self, texts: Sequence[str], *, spans: bool = False, cut: bool = True) -> list[TokenizedText]:
        """Turn texts into token ids. The order is kept; longer texts are cut at their end, and say so.

        An empty text, or one of white space alone, is its special tokens. Characters that the tokenizer drops (NUL and
        other control characters, for BERT's) count as not there.

        Args:
            texts: Any Unicode text but lone surrogates.
            spans: Whether to tell where each token stands in its text.
            cut: False keeps them whole.

        Raises:
            TypeError: An entry is not a str. The message names its index.
            ValueError: An entry holds a lone surrogate, which is no character. The message names index and position.
        """
        if isinstance(texts, str):
            raise TypeError("texts must be a list of str, got one str; put it into a list")
        listed = list(texts)
        for index, text in enumerate(listed):
            _check_text(index, text)
        return [
            TokenizedText(
                input_ids=(input_ids := self._cut(encoding.ids, cut)),
                total_tokens=len(encoding.ids),
                unknown_share=input_ids.count(self._unknown_id) / max(len(input_ids) - self._special, 1),
                spans=self._cut(encoding.offsets, cut) if spans else (),
            )
            for start in range(0, len(listed), _TEXTS_AT_ONCE)
            for encoding in self._tokenizer.encode_batch(listed[start : start + _TEXTS_AT_ONCE])
        ]

    def tokens(self, input_ids: Iterable[int]) -> list[str]:
        """Give the vocabulary's entries, as "##ing" for a piece inside a word.

        Raises:
            ValueError: An id is not in the vocabulary.
        """
        tokens = []
        for token_id in input_ids:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                raise ValueError(f"token ids must be in the vocabulary, got {token_id}")
            tokens.append(token)
        return tokens

    def decode(self, input_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Give the text of token ids, as far as the vocabulary tells it. Raises what `tokens` does."""
        self.tokens(input_ids)
        return self._tokenizer.decode(input_ids, skip_special_tokens=skip_special_tokens)

    def _cut(self, per_token: list[T], cut: bool) -> list[T]:
        """Keep the beginning of a text and the special tokens at its end."""
        if not cut or len(per_token) <= self.max_length:
            return per_token
        return per_token[: self.max_length - self._suffix] + per_token[len(per_token) - self._suffix :]

    def _check(self, spec: ModelSpec) -> tuple[int, int]:
        """Refuse a tokenizer that does not fit, and count the special tokens it adds, in all and at the end."""
        highest = max(self._tokenizer.get_vocab().values())
        words = spec.config.vocab_size
        if highest >= words:
            raise ModelDirectoryError(f"tokenizer.json has id {highest}, config.json only {words} words")
        probe = self._tokenizer.encode("a")
        if any(probe.type_ids):
            raise ModelDirectoryError(f"the tokenizer must put a single text in segment 0, got {probe.type_ids}")
        special = probe.special_tokens_mask
        if not 0 < sum(special) < self.max_length:
            raise ModelDirectoryError(f"the tokenizer must add 1 to {self.max_length - 1} tokens, got {sum(special)}")
        return sum(special), [*reversed(special), 0].index(0)


def _check_text(index: int, text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"text {index} must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        raise ValueError(f"text {index} must be Unicode text, got {found}; replace it, say by U+FFFD") from error


def _unknown_id(tokenizer: Tokenizer, tokenizer_json: str) -> int:
    """Give the id of the unknown token, or -1 where the vocabulary needs none (bytes cover everything)."""
    model = json.loads(tokenizer_json)["model"]
    token, unknown = model.get("unk_token"), model.get("unk_id")
    if token is not None:
        unknown = tokenizer.token_to_id(token)
        if unknown is None:
            raise ModelDirectoryError(f"unk_token must be in the vocabulary of tokenizer.json, got {token!r}")
    return -1 if unknown is None else unknown
