"""What stands on top of the hidden states."""

from jaxtyping import Float
from torch import Tensor, nn, zeros
from torch.nn import functional

from encoder.config import EncoderConfig
from encoder.model import initialize_weights


class LanguageModelHead(nn.Module):
    """Score every word of the vocabulary for each hidden state: BERT's masked-token head, tied to the word vectors.

    The same head predicts masked tokens on an `Encoder` and next tokens on a `Decoder`. The word vectors are an
    argument of the call, not a second name for the same weights, so nothing can come untied.

    Source: Devlin et al. 2018, arXiv:1810.04805; Press & Wolf 2016 for the tie, arXiv:1608.05859.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.transform = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(zeros(config.vocab_size))
        initialize_weights(self, config)

    def forward(
        self, hidden_states: Float[Tensor, "*tokens hidden"], word_vectors: Float[Tensor, "vocab hidden"]
    ) -> Float[Tensor, "*tokens vocab"]:
        """Give the logits.

        Args:
            hidden_states: Only the positions to be predicted; scoring all of them costs more than the encoder itself.
            word_vectors: `embeddings.word.weight` of the model that made the hidden states.
        """
        transformed = self.norm(functional.gelu(self.transform(hidden_states)))
        return functional.linear(transformed, word_vectors, self.bias)
