"""What the encoder and the decoder are stacked from."""

from jaxtyping import Bool, Float, Int
from torch import Tensor, arange, nn, zeros_like

from encoder.attention import MultiHeadAttention
from encoder.config import EncoderConfig


class Embeddings(nn.Module):
    """Turn token ids into vectors: word + position + token type, normalised.

    Without the position vectors attention could not tell "squatch eats pizza" from "pizza eats squatch".
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, input_ids: Int[Tensor, "batch seq"], token_type_ids: Int[Tensor, "batch seq"] | None = None
    ) -> Float[Tensor, "batch seq hidden"]:
        """Look up and add the three vectors of each token.

        Args:
            input_ids: In [0, vocab_size).
            token_type_ids: Which segment a token belongs to; None means segment 0 throughout.

        Raises:
            ValueError: The sequence is longer than the table of positions.
        """
        length, limit = input_ids.shape[1], self.position.num_embeddings
        if length > limit:
            raise ValueError(f"a sequence may have {limit} tokens (max_position_embeddings), got {length}; cut it")
        token_types = self.token_type(zeros_like(input_ids) if token_type_ids is None else token_type_ids)
        positions = self.position(arange(length, device=input_ids.device))
        return self.dropout(self.norm(self.word(input_ids) + positions + token_types))


class FeedForward(nn.Module):
    """Two linear maps with an exact GELU between them, applied to each token by itself."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.activation = nn.GELU()

    def forward(self, hidden_states: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        """Widen, bend, narrow."""
        return self.down(self.activation(self.up(hidden_states)))


class EncoderLayer(nn.Module):
    """Self-attention, then a feed-forward net; after each a residual sum and a norm."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = _attention(config)
        self.attention_norm = _norm(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_norm = _norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self, hidden_states: Float[Tensor, "batch seq hidden"], *, mask: Bool[Tensor, "..."] | None = None
    ) -> Float[Tensor, "batch seq hidden"]:
        """Let the tokens look at one another, where the mask is True, then work on each."""
        return self._work(self._look(hidden_states, mask))

    def _look(
        self, hidden_states: Float[Tensor, "batch seq hidden"], mask: Bool[Tensor, "..."] | None
    ) -> Float[Tensor, "batch seq hidden"]:
        return self.attention_norm(hidden_states + self.dropout(self.attention(hidden_states, mask=mask)))

    def _work(self, hidden_states: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch seq hidden"]:
        return self.feed_forward_norm(hidden_states + self.dropout(self.feed_forward(hidden_states)))


class DecoderLayer(EncoderLayer):
    """An encoder layer with optional cross-attention to a context between the two."""

    def __init__(self, config: EncoderConfig, *, cross_attention: bool) -> None:
        super().__init__(config)
        if cross_attention:
            self.cross_attention = _attention(config)
            self.cross_attention_norm = _norm(config)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch query_len hidden"],
        context: Float[Tensor, "batch key_len hidden"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        context_mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "batch query_len hidden"]:
        """Look back, where the causal mask is True, then at the context if there is one, then work on each token."""
        hidden_states = self._look(hidden_states, mask)
        if context is not None:
            attended = self.cross_attention(hidden_states, context, mask=context_mask)
            hidden_states = self.cross_attention_norm(hidden_states + self.dropout(attended))
        return self._work(hidden_states)


def _attention(config: EncoderConfig) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.hidden_size, config.num_attention_heads, dropout=config.attention_probs_dropout_prob
    )


def _norm(config: EncoderConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
