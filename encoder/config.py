"""The shape of an encoder, under BERT's own field names."""

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

# What else transformers saves of BERT (a classifier, say) has a head that would silently be lost here.
BERT_ARCHITECTURES = ("BertModel", "BertForMaskedLM", "BertForPreTraining")

# Keys that change the mathematics, with the only value this encoder computes.
_FIXED_KEYS = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
}


class ModelDirectoryError(ValueError):
    """A model directory is missing something, contradicts itself, or is not BERT mathematics."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Sizes and constants of a BERT encoder.

    The mathematics is fixed: learned absolute positions, token types, layer normalisation after each residual sum,
    exact (erf) GELU. Source: Devlin et al. 2018, arXiv:1810.04805.

    Raises:
        ModelDirectoryError: A size is not a positive whole number, `hidden_size` is not a multiple of
            `num_attention_heads`, a probability is outside [0, 1), or `pad_token_id` is not in the vocabulary.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    """Added to the variance before the root."""
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    initializer_range: float = 0.02
    """Standard deviation of freshly drawn weights."""
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name == "pad_token_id" else 1
            if item.type is int and value < least:
                raise ModelDirectoryError(f"{item.name} must be at least {least}, got {value}")
            if item.type is float and not 0 <= value < 1:
                raise ModelDirectoryError(f"{item.name} must be in [0, 1), got {value}")
        if self.hidden_size % self.num_attention_heads:
            heads = self.num_attention_heads
            raise ModelDirectoryError(f"hidden_size must be a multiple of {heads} heads, got {self.hidden_size}")
        if self.pad_token_id >= self.vocab_size:
            raise ModelDirectoryError(f"pad_token_id must be below {self.vocab_size} words, got {self.pad_token_id}")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "EncoderConfig":
        """Read the content of a Hugging Face `config.json`.

        Keys that do not concern the encoder are passed over. `layer_norm_eps`, the dropouts, `initializer_range`,
        `type_vocab_size` and `pad_token_id` may be absent, as in Google's first BERT files, and then have the values
        that BERT was published with.

        Raises:
            ModelDirectoryError: Another architecture, another mathematics, a missing or impossible size.
        """
        model_type = raw.get("model_type", "bert")
        if model_type != "bert":
            raise ModelDirectoryError(f"model_type must be 'bert', got {model_type!r}: no other is computed here")
        architectures = raw.get("architectures") or []
        for architecture in architectures if isinstance(architectures, list) else [architectures]:
            if architecture not in BERT_ARCHITECTURES:
                raise ModelDirectoryError(f"architectures must be in {BERT_ARCHITECTURES}, got {architecture!r}")
        for key, only in _FIXED_KEYS.items():
            if raw.get(key, only) != only:
                raise ModelDirectoryError(f"{key} must be {only!r}, got {raw[key]!r}: this encoder computes no other")
        given: dict[str, Any] = {}
        for item in fields(cls):
            value = raw.get(item.name)
            if value is None and item.default is MISSING:
                raise ModelDirectoryError(f"config.json must give the sizes of the encoder; it lacks {item.name}")
            if value is not None:
                if type(value) is not int and type(value) is not item.type:
                    kind = "a whole number" if item.type is int else "a number"
                    raise ModelDirectoryError(f"{item.name} must be {kind}, got {value!r}")
                given[item.name] = value if item.type is int else float(value)
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Give the content of a `config.json` that transformers reads as this encoder."""
        return {"model_type": "bert", **_FIXED_KEYS, **asdict(self)}
