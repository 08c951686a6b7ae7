"""The encoder, and the decoder that trains it."""

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from encoder.attention import causal_mask, padding_mask
from encoder.config import EncoderConfig
from encoder.layers import DecoderLayer, Embeddings, EncoderLayer


class Encoder(nn.Module):
    """Text in, one context-aware vector per token out: each token has looked at all others, both ways.

    Fresh weights are random. Source: Devlin et al. 2018, arXiv:1810.04805.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_hidden_layers))
        initialize_weights(self, config)

    def forward(
        self,
        input_ids: Int[Tensor, "batch seq"],
        attention_mask: Bool[Tensor, "batch seq"] | None = None,
        token_type_ids: Int[Tensor, "batch seq"] | None = None,
    ) -> Float[Tensor, "batch seq hidden"]:
        """Encode a batch.

        Args:
            input_ids: Token ids, padded to one length.
            attention_mask: True at real tokens, which see one another and no padding; None when nothing is padded.
                What comes out at padding is meaningless.
            token_type_ids: Segments; None means segment 0 throughout.

        Raises:
            ValueError: The sequence is longer than `max_position_embeddings`.
        """
        mask = None if attention_mask is None else padding_mask(attention_mask)
        hidden_states = self.embeddings(input_ids, token_type_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask=mask)
        return hidden_states


class Decoder(nn.Module):
    """Text in, one vector per token out, each made from what stands before it: for predicting the next token.

    Without cross-attention this is a decoder-only language model. With it, each layer also reads a context: the tokens
    of an encoder (sequence to sequence), or one sentence embedding as a context of length 1 (denoising training).
    """

    def __init__(self, config: EncoderConfig, *, cross_attention: bool = False) -> None:
        super().__init__()
        self.config = config
        self.cross_attention = cross_attention
        self.embeddings = Embeddings(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, cross_attention=cross_attention) for _ in range(config.num_hidden_layers)
        )
        initialize_weights(self, config)

    def forward(
        self,
        input_ids: Int[Tensor, "batch query_len"],
        context: Float[Tensor, "batch key_len hidden"] | None = None,
        context_mask: Bool[Tensor, "batch key_len"] | None = None,
    ) -> Float[Tensor, "batch query_len hidden"]:
        """Read a batch from left to right.

        Padding belongs at the end, where no real token can see it.

        Args:
            input_ids: Token ids.
            context: What to read beside them; given exactly when the decoder has cross-attention.
            context_mask: True at real context tokens; None when all are.

        Raises:
            ValueError: A context without cross-attention, cross-attention without a context, or a sequence longer than
                `max_position_embeddings`.
        """
        if (context is not None) != self.cross_attention:
            raise ValueError(
                "a context must be given exactly when the decoder has cross-attention; "
                f"cross_attention is {self.cross_attention}, a context was {'not ' * (context is None)}given"
            )
        mask = causal_mask(input_ids.shape[1], device=input_ids.device)
        visible = None if context_mask is None else padding_mask(context_mask)
        hidden_states = self.embeddings(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states, context, mask=mask, context_mask=visible)
        return hidden_states


def initialize_weights(module: nn.Module, config: EncoderConfig) -> None:
    """Draw fresh weights as BERT does: normal with deviation `initializer_range`, biases and padding's vector 0."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=config.initializer_range)
            nn.init.zeros_(part.bias)
        elif isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=config.initializer_range)
            if part.padding_idx is not None:
                nn.init.zeros_(part.weight[part.padding_idx])
