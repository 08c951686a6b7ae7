"""What the encoder learns from: losses on token ids, embeddings and pairs of embeddings. No files, no optimiser."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor, nn
from torch.nn import functional

from encoder.heads import LanguageModelHead
from encoder.model import Decoder, Encoder


def mask_tokens(
    input_ids: Int64[np.ndarray, "batch seq"],
    *,
    rate: float,
    special_ids: Sequence[int],
    mask_id: int,
    vocab_size: int,
    generator: np.random.Generator,
) -> tuple[Int64[np.ndarray, "batch seq"], Int64[np.ndarray, " masked"]]:
    """Choose tokens to be predicted and hide them: 80 % become [MASK], 10 % another word, 10 % stay.

    Args:
        input_ids: Left as they are.
        rate: Share of the tokens that are not special, in (0, 1); at least one is chosen.
        special_ids: Never chosen, and never put in another's place.
        mask_id: Of [MASK].
        vocab_size: Words to draw from.
        generator: Draws.

    Returns:
        The ids with tokens hidden, and where these stand in the flattened batch, ascending.

    Source: Devlin et al. 2018, section 3.1, arXiv:1810.04805.
    """
    flat = input_ids.ravel()
    candidates = np.flatnonzero(~np.isin(flat, special_ids))
    count = max(1, round(rate * len(candidates)))
    chosen = np.sort(generator.choice(candidates, count, replace=False))
    hidden = flat.copy()
    fate = generator.random(count)
    words = np.setdiff1d(np.arange(vocab_size), special_ids)
    hidden[chosen[fate < 0.8]] = mask_id
    replaced = chosen[fate >= 0.9]
    hidden[replaced] = generator.choice(words, len(replaced))
    return hidden.reshape(input_ids.shape), chosen


def documents_mask(starts: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch 1 seq seq"]:
    """Let each token of a packed sequence see those of its own document.

    Args:
        starts: True at the first token of each document.
    """
    document = starts.cumsum(dim=1)
    return document[:, None, :, None] == document[:, None, None, :]


def encode(
    encoder: Encoder, input_ids: Int[Tensor, "batch seq"], mask: Bool[Tensor, "..."] | None
) -> Float[Tensor, "batch seq hidden"]:
    """Run the encoder under any mask that broadcasts against "batch heads query_len key_len"."""
    hidden_states = encoder.embeddings(input_ids)
    for layer in encoder.layers:
        hidden_states = layer(hidden_states, mask=mask)
    return hidden_states


def masked_token_loss(
    head: LanguageModelHead,
    word_vectors: Float[Tensor, "vocab hidden"],
    hidden_states: Float[Tensor, "batch seq hidden"],
    positions: Int64[Tensor, " masked"],
    targets: Int64[Tensor, " masked"],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Give the mean cross-entropy of the hidden tokens, in nats, and the share of them that is predicted right.

    Only the chosen positions are scored against the vocabulary: scoring all would cost more than the encoder.
    """
    logits = head(hidden_states.flatten(0, 1)[positions], word_vectors).float()
    accuracy = (logits.detach().argmax(dim=1) == targets).float().mean()
    return functional.cross_entropy(logits, targets), accuracy


def denoising_loss(
    decoder: Decoder,
    head: LanguageModelHead,
    embeddings: Float[Tensor, "batch hidden"],
    input_ids: Int64[Tensor, "batch seq"],
    positions: Int64[Tensor, " predicted"],
) -> Float[Tensor, ""]:
    """Give the cross-entropy of each next token, read from the sentence's embedding alone and what stands before.

    Args:
        decoder: Has cross-attention, to a context of one vector: the embedding.
        head: Scores the vocabulary.
        embeddings: Of what was left of the sentences.
        input_ids: The whole sentences.
        positions: Where the tokens to be predicted stand in the flattened batch less its first column.

    Source: Wang et al. 2021 (TSDAE), arXiv:2104.06979.
    """
    hidden_states = decoder(input_ids[:, :-1], embeddings[:, None, :])
    logits = head(hidden_states.flatten(0, 1)[positions], decoder.embeddings.word.weight).float()
    return functional.cross_entropy(logits, input_ids[:, 1:].flatten()[positions])


def distillation_loss(
    student: Float[Tensor, "batch prefix"],
    target: Float[Tensor, "batch prefix"],
    teacher: Float[Tensor, "batch teacher"],
    *,
    cosine: float,
    contrast: float,
    similarity: float,
    temperature: float,
) -> Float[Tensor, ""]:
    """Let the student's vectors lie where the teacher's do, and be as near to one another.

    Args:
        student: Embeddings, of any length.
        target: The teacher's vectors in as many dimensions (its principal components).
        teacher: The teacher's vectors, whole and of length 1.
        cosine: Weight of 1 − cos(student, target).
        contrast: Weight of finding one's own target among those of the batch.
        similarity: Weight of the mean squared difference of the two matrices of cosines.
        temperature: Of the contrast.

    Source: Reimers & Gurevych 2020, arXiv:2004.09813 (vectors); Tung & Mori 2019, arXiv:1907.09682 (similarities);
    Tian et al. 2019, arXiv:1910.10699 (contrast).
    """
    student = functional.normalize(student, dim=1)
    target = functional.normalize(target, dim=1)
    loss = cosine * (1 - (student * target).sum(dim=1).mean())
    if contrast:
        scores = student @ target.T / temperature
        loss = loss + contrast * functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
    if similarity:
        loss = loss + similarity * functional.mse_loss(student @ student.T, teacher @ teacher.T)
    return loss


def contrastive_loss(
    first: Float[Tensor, "batch prefix"],
    second: Float[Tensor, "batch prefix"],
    same_first: Bool[Tensor, "batch batch"],
    same_second: Bool[Tensor, "batch batch"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Let each text of a pair find its partner among all of the batch, both ways (InfoNCE).

    Where a text stands in several pairs of a batch its other partners are no negatives: they are left out.

    Args:
        first: Embeddings of the first texts, row by row partners of `second`.
        second: Embeddings of the second texts.
        same_first: True where two first texts are the same.
        same_second: True where two second texts are the same.
        temperature: Divides the cosines.

    Source: van den Oord et al. 2018, arXiv:1807.03748; Chen et al. 2020, arXiv:2002.05709.
    """
    scores = functional.normalize(first, dim=1) @ functional.normalize(second, dim=1).T / temperature
    others = ~torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill((same_first | same_second) & others, -torch.inf)
    partners = torch.arange(len(scores), device=scores.device)
    return (functional.cross_entropy(scores, partners) + functional.cross_entropy(scores.T, partners)) / 2


def ranking_loss(
    first: Float[Tensor, "batch prefix"],
    second: Float[Tensor, "batch prefix"],
    scores: Float[Tensor, " batch"],
    *,
    temperature: float,
) -> Float[Tensor, ""]:
    """Let the cosines of pairs stand in the order of their scores (CoSENT): log(1 + Σ exp((cos j − cos i) / τ)).

    The sum is over all i, j where pair i has the higher score. Source: Su 2022, kexue.fm/archives/8847.
    """
    cosines = functional.cosine_similarity(first, second) / temperature
    differences = cosines[None, :] - cosines[:, None]  # of row i: cos j − cos i
    wrong = scores[:, None] > scores[None, :]
    exponents = differences.masked_fill(~wrong, -torch.inf).flatten()
    return torch.logsumexp(torch.cat([exponents.new_zeros(1), exponents]), dim=0)


class LabelHead(nn.Module):
    """A linear classifier on embeddings of length 1, thrown away after training."""

    def __init__(self, hidden_size: int, labels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, labels)
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(
        self, embeddings: Float[Tensor, "batch hidden"], labels: Int64[Tensor, " batch"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
        """Give the cross-entropy and the share that is right."""
        logits = self.linear(self.scale * functional.normalize(embeddings, dim=1))
        return functional.cross_entropy(logits, labels), (logits.argmax(dim=1) == labels).float().mean()
