"""From one vector per token to one vector per sentence."""

from jaxtyping import Bool, Float
from torch import Tensor


def mean_pool(
    hidden_states: Float[Tensor, "batch seq hidden"], attention_mask: Bool[Tensor, "batch seq"]
) -> Float[Tensor, "batch hidden"]:
    """Average the real tokens of each sentence.

    Each row is divided by its own token count, so padding changes nothing.

    Args:
        hidden_states: Last layer; the result keeps its dtype.
        attention_mask: At least one True per row, or the row becomes NaN.

    Source: Reimers & Gurevych 2019, section 3, arXiv:1908.10084.
    """
    weights = attention_mask.unsqueeze(-1).to(hidden_states.dtype)
    return (hidden_states * weights).sum(dim=1) / weights.sum(dim=1)


def cls_pool(hidden_states: Float[Tensor, "batch seq hidden"]) -> Float[Tensor, "batch hidden"]:
    """Take the first token of each sentence, [CLS].

    Source: Devlin et al. 2018, section 4, arXiv:1810.04805.
    """
    return hidden_states[:, 0]
