"""The formula against a plain one, and against the worked numbers of two published walk-throughs.

"write a poem" is StatQuest's example (Josh Starmer, "Attention in Transformers: Concepts and Code in PyTorch", 2025);
"Life is short, eat dessert first" is Sebastian Raschka's ("Understanding and Coding Self-Attention", 2024).
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from encoder.attention import MultiHeadAttention, causal_mask, padding_mask, scaled_dot_product_attention


def plain_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """The formula as it is written, weights and all."""
    return plain_weights(query, key, mask) @ value


def plain_weights(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.exp(scores) / torch.exp(scores).sum(-1, keepdim=True)


def weights_of(query: Tensor, key: Tensor, mask: Tensor | None = None) -> Tensor:
    """Our attention's weights: values that are the identity matrix are handed over as they are weighted."""
    return scaled_dot_product_attention(query, key, torch.eye(key.shape[-2]), mask)


def scores_of(query: Tensor, key: Tensor) -> Tensor:
    """Our attention's unscaled scores, up to the constant per query that softmax takes away: here their mean is 0."""
    logarithms = torch.log(weights_of(query, key)) * math.sqrt(query.shape[-1])
    return logarithms - logarithms.mean(-1, keepdim=True)


def assert_printed(actual: Tensor, expected: list) -> None:
    """Equal to what was printed with four decimals."""
    assert_close(actual, torch.tensor(expected), atol=5.1e-5, rtol=0, check_dtype=False)


class TestWriteAPoem:
    encodings = torch.tensor([[[1.16, 0.23], [0.57, 1.36], [4.41, -2.16]]])

    @pytest.fixture
    def attention(self) -> MultiHeadAttention:
        """One head with the walk-through's three maps, and an output projection that changes nothing."""
        torch.manual_seed(42)
        query, key, value = (nn.Linear(2, 2, bias=False) for _ in range(3))
        attention = MultiHeadAttention(2, 1)
        for ours, theirs in zip((attention.query, attention.key, attention.value), (query, key, value), strict=True):
            ours.weight, ours.bias = theirs.weight, nn.Parameter(torch.zeros(2))
        attention.output.weight, attention.output.bias = nn.Parameter(torch.eye(2)), nn.Parameter(torch.zeros(2))
        return attention

    def test_weights(self, attention: MultiHeadAttention) -> None:
        weights = weights_of(attention.query(self.encodings)[0], attention.key(self.encodings)[0])
        assert_printed(weights[0], [0.3573, 0.4011, 0.2416])

    def test_weights_from_the_scores_worked_out_by_hand(self) -> None:
        """By hand, from rounded weights, the scores of "write" come out a little off, and so do the percents."""
        scores = torch.tensor([[-0.09, 0.06, -0.61]])
        query, key = torch.tensor([[1.0, 0.0]]), torch.cat([scores, torch.zeros(1, 3)]).T
        assert_close(scores_of(query, key), scores - scores.mean(), atol=1e-6, rtol=0)
        assert_close(weights_of(query, key)[0], torch.tensor([0.36, 0.40, 0.24]), atol=0.01, rtol=0)

    def test_self_attention(self, attention: MultiHeadAttention) -> None:
        expected = [[1.0100, 1.0641], [0.2040, 0.7057], [3.4989, 2.2427]]
        assert_printed(attention(self.encodings)[0], expected)

    def test_causal_self_attention(self, attention: MultiHeadAttention) -> None:
        expected = [[0.6038, 0.7434], [-0.0062, 0.6072], [3.4989, 2.2427]]
        assert_printed(attention(self.encodings, mask=causal_mask(3))[0], expected)

    def test_cross_attention_to_itself_is_self_attention(self, attention: MultiHeadAttention) -> None:
        assert_close(attention(self.encodings, self.encodings), attention(self.encodings), atol=0, rtol=0)


class TestLifeIsShort:
    @pytest.fixture
    def embedded(self) -> Tensor:
        torch.manual_seed(123)
        return nn.Embedding(50_000, 3)(torch.tensor([0, 4, 5, 2, 1, 3])).detach()

    @pytest.fixture
    def projections(self) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(123)
        return torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 4)

    def test_embedding(self, embedded: Tensor) -> None:
        expected = [
            [0.3374, -0.1778, -0.3035],
            [0.1794, 1.8951, 0.4954],
            [0.2692, -0.0770, -1.0205],
            [-0.2196, -0.3792, 0.7671],
            [-0.5880, 0.3486, 0.6603],
            [-1.1925, 0.6984, -1.4097],
        ]
        assert_printed(embedded, expected)

    def test_scores_weights_and_context_vectors(self, embedded: Tensor, projections: tuple[Tensor, ...]) -> None:
        query, key, value = (embedded @ projection for projection in projections)
        scores = torch.tensor([-0.6004, 3.4707, -1.5023, 0.4991, 1.2903, -1.3374])
        assert_close((query @ key.T)[1], scores, atol=5.1e-5, rtol=0)
        assert_close(scores_of(query, key)[1], scores - scores.mean(), atol=1e-4, rtol=0)
        assert_printed(weights_of(query, key)[1], [0.0386, 0.6870, 0.0204, 0.0840, 0.1470, 0.0229])
        context_vectors = scaled_dot_product_attention(query, key, value)
        assert_printed(context_vectors[1], [0.5313, 1.3607, 0.7891, 1.3110])
        assert_printed(context_vectors[0], [-0.1564, 0.1028, -0.0763, -0.0764])

    def test_four_heads(self, embedded: Tensor) -> None:
        torch.manual_seed(123)
        heads = [(torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 1)) for _ in range(4)]
        query, key, value = (embedded @ torch.stack(weights) for weights in zip(*heads, strict=True))
        joined = scaled_dot_product_attention(query, key, value).squeeze(-1).T
        assert joined.shape == (6, 4)
        assert_printed(joined[0], [-0.0185, 0.0170, 0.1999, -0.0860])

    def test_cross_attention(self, embedded: Tensor, projections: tuple[Tensor, ...]) -> None:
        context = torch.rand(8, 3)  # drawn right after the projections
        query, key, value = embedded @ projections[0], context @ projections[1], context @ projections[2]
        mixed = scaled_dot_product_attention(query, key, value)
        assert mixed.shape == (6, 4)
        assert_printed(mixed[0], [0.4231, 0.8665, 0.6503, 1.0042])

    def test_causal_weights(self, embedded: Tensor, projections: tuple[Tensor, ...]) -> None:
        query, key = embedded @ projections[0], embedded @ projections[1]
        weights = weights_of(query, key, causal_mask(6))
        assert weights[0].tolist() == [1, 0, 0, 0, 0, 0]
        assert_printed(weights[1], [0.0532, 0.9468, 0, 0, 0, 0])
        assert torch.equal(weights.triu(1), torch.zeros(6, 6))
        assert_close(weights[-1], weights_of(query, key)[-1])


@given(
    heads=st.integers(1, 5),
    head_dim=st.integers(1, 11),
    query_len=st.integers(1, 13),
    key_len=st.integers(1, 17),
    value_dim=st.integers(1, 7),
    seed=st.integers(0, 10**6),
)
def test_equals_the_plain_formula(
    heads: int, head_dim: int, query_len: int, key_len: int, value_dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(2, heads, query_len, head_dim, generator=generator)
    key = torch.randn(2, heads, key_len, head_dim, generator=generator)
    value = torch.randn(2, heads, key_len, value_dim, generator=generator)
    mask = torch.rand(2, 1, query_len, key_len, generator=generator) < 0.5
    mask[..., 0] = True
    assert_close(scaled_dot_product_attention(query, key, value), plain_attention(query, key, value))
    assert_close(scaled_dot_product_attention(query, key, value, mask), plain_attention(query, key, value, mask))


def test_masked_keys_have_exactly_no_influence() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(14, 7)
    hidden_states, context = torch.randn(3, 5, 14), torch.randn(3, 11, 14)
    attention_mask = torch.arange(11) < torch.tensor([[11], [4], [1]])
    before = attention(hidden_states, context, mask=padding_mask(attention_mask))
    context[~attention_mask] = 1e4 * torch.randn(17, 14)
    assert torch.equal(before, attention(hidden_states, context, mask=padding_mask(attention_mask)))


def test_dropout_acts_in_training_only() -> None:
    torch.manual_seed(0)
    attention = MultiHeadAttention(6, 3, dropout=0.5)
    hidden_states = torch.randn(2, 7, 6)
    assert not torch.equal(attention(hidden_states), attention(hidden_states))
    attention.eval()
    assert torch.equal(attention(hidden_states), attention(hidden_states))


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"hidden_size must be a multiple of num_heads \(4\), got 10"):
        MultiHeadAttention(10, 4)


def test_shapes_are_enforced() -> None:
    with pytest.raises(TypeError, match=r"(?s)key.*Float\[Tensor, 'batch key_len hidden'\]|context"):
        MultiHeadAttention(6, 3)(torch.randn(2, 7, 6), torch.randn(3, 5, 6))
