"""The objectives of finetuning at work: each draws its batches and computes its loss."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from encoder.attention import padding_mask
from encoder.heads import LanguageModelHead
from encoder.model import Decoder, Encoder
from encoder.model_dir import ModelSpec
from encoder.pooling import cls_pool, mean_pool
from training.batches import Sampler, pad
from training.config import Classes, Denoise, Distill, FinetuneRun, Masked, Objective, Pairs, RunError, Scored
from training.objectives import (
    LabelHead,
    contrastive_loss,
    denoising_loss,
    distillation_loss,
    encode,
    masked_token_loss,
    ranking_loss,
)
from training.pretrain import Masker
from training.store import TokenStore
from training.teacher import principal_axes

Inputs = dict[str, Any]


class Embedder(nn.Module):
    """An encoder with its pooling: token ids to sentence embeddings, in float32, not normalised."""

    def __init__(self, encoder: Encoder, spec: ModelSpec) -> None:
        super().__init__()
        self.encoder = encoder
        self._pooling = spec.pooling

    def forward(self, input_ids: Tensor, attention_mask: Tensor, *, padded: bool) -> Tensor:
        """Embed a batch."""
        hidden_states = self.encode(input_ids, attention_mask, padded=padded).float()
        return cls_pool(hidden_states) if self._pooling == "cls" else mean_pool(hidden_states, attention_mask)

    def encode(self, input_ids: Tensor, attention_mask: Tensor, *, padded: bool) -> Tensor:
        """Give the hidden states; attention is faster without a mask, and batches of one length need none."""
        return encode(self.encoder, input_ids, padding_mask(attention_mask) if padded else None)


class Task(nn.Module):
    """One objective: draws batches of its store and gives its loss. Subclasses hold what else is learned for it."""

    sides = 1
    valued = False

    def __init__(self, objective: Objective, store: TokenStore, sampler: Sampler, run: FinetuneRun) -> None:
        super().__init__()
        self.objective, self.store, self.sampler = objective, store, sampler
        self.heldout = np.zeros(0, dtype=np.int64)
        """Items that the sampler does not draw, for measuring."""
        self._prefixes = run.prefixes

    def content(self) -> list[np.ndarray]:
        """Give all that is learned from, but for a teacher's vectors."""
        return [self.store.ids, self.store.ends, *([self.store.column("values")] if self.valued else [])]

    def draw(self, generator: np.random.Generator, pad_id: int) -> Inputs:
        """Make the next batch's inputs."""
        items = self.sampler.next()
        return self.inputs(items, generator, pad_id)

    def inputs(self, items: np.ndarray, generator: np.random.Generator, pad_id: int) -> Inputs:
        """Give the items' token ids, one matrix a side."""
        del generator
        return {f"side{side}": self.padded(items, side, pad_id) for side in range(self.sides)}

    def padded(self, items: np.ndarray, side: int, pad_id: int) -> Inputs:
        """Pad the texts of one side to one length."""
        return pad([self.store.text(int(item), side) for item in items], pad_id)

    def loss(self, embed: Embedder, inputs: Inputs) -> dict[str, Tensor]:
        """Give the loss as "loss", and what else should be told."""
        raise NotImplementedError

    def over_prefixes(self, loss: Any, *embeddings: Tensor) -> Tensor:
        """Give the mean of a loss over the whole embeddings and their prefixes."""
        sizes = self.sizes(embeddings[0].shape[1])
        total: Tensor = torch.stack([loss(*(each[:, :size] for each in embeddings)) for size in sizes]).mean()
        return total

    def sizes(self, hidden_size: int) -> list[int]:
        """Give the lengths of embeddings that must be good, the whole last."""
        return [*(size for size in self._prefixes if size < hidden_size), hidden_size]


class DistillTask(Task):
    """Vectors and similarities of a teacher."""

    objective: Distill

    def __init__(
        self, objective: Distill, store: TokenStore, sampler: Sampler, run: FinetuneRun, *, spec: ModelSpec
    ) -> None:
        super().__init__(objective, store, sampler, run)
        vectors = store.column("vectors")
        if len(vectors) != len(store):
            raise RunError(
                f"there must be one vector for each text, got {len(vectors)} for {len(store)}. This is a bug."
            )
        self._vectors = vectors
        self.register_buffer(
            "projection", torch.from_numpy(principal_axes(vectors, spec.config.hidden_size)), persistent=False
        )

    def inputs(self, items: np.ndarray, generator: np.random.Generator, pad_id: int) -> Inputs:
        """Give what `loss` wants."""
        inputs = super().inputs(items, generator, pad_id)
        rows = np.sort(items)  # a memory map is read in order
        vectors = self._vectors[rows][np.searchsorted(rows, items)]
        return inputs | {"teacher": torch.from_numpy(vectors.astype(np.float32))}

    def loss(self, embed: Embedder, inputs: Inputs) -> dict[str, Tensor]:
        """Give the loss and what else should be told."""
        embeddings = embed(**inputs["side0"])
        with torch.autocast(embeddings.device.type, enabled=False):
            teacher = inputs["teacher"]
            targets = teacher @ self.projection
            settings = self.objective
            loss = self.over_prefixes(
                lambda student, target: distillation_loss(
                    student,
                    target,
                    teacher,
                    cosine=settings.cosine,
                    contrast=settings.contrast,
                    similarity=settings.similarity,
                    temperature=settings.temperature,
                ),
                embeddings,
                targets,
            )
            cosine = nn.functional.cosine_similarity(embeddings.detach(), targets).mean()
        return {"loss": loss, "cosine": cosine}


class PairsTask(Task):
    """Pairs against the others of the batch."""

    objective: Pairs
    sides = 2

    def loss(self, embed: Embedder, inputs: Inputs) -> dict[str, Tensor]:
        """Give the loss and what else should be told."""
        sides = [inputs["side0"], inputs["side1"]]
        embeddings = [embed(**side) for side in sides]
        same = [(side["input_ids"][:, None] == side["input_ids"][None]).all(dim=-1) for side in sides]
        with torch.autocast(embeddings[0].device.type, enabled=False):
            temperature = self.objective.temperature
            return {
                "loss": self.over_prefixes(
                    lambda first, second: contrastive_loss(first, second, *same, temperature=temperature), *embeddings
                )
            }


class ScoredTask(Task):
    """Pairs in the order of their scores."""

    objective: Scored
    sides = 2
    valued = True

    def __init__(self, objective: Scored, store: TokenStore, sampler: Sampler, run: FinetuneRun) -> None:
        super().__init__(objective, store, sampler, run)
        try:
            self._scores = store.column("values").astype(np.float32)
        except ValueError as error:
            raise RunError(f"the scores of {objective.corpora[0].path} must be numbers: {error}") from error

    def inputs(self, items: np.ndarray, generator: np.random.Generator, pad_id: int) -> Inputs:
        """Give what `loss` wants."""
        return super().inputs(items, generator, pad_id) | {"scores": torch.from_numpy(self._scores[items])}

    def loss(self, embed: Embedder, inputs: Inputs) -> dict[str, Tensor]:
        """Give the loss and what else should be told."""
        embeddings = [embed(**inputs["side0"]), embed(**inputs["side1"])]
        with torch.autocast(embeddings[0].device.type, enabled=False):
            scores, temperature = inputs["scores"], self.objective.temperature
            return {
                "loss": self.over_prefixes(
                    lambda first, second: ranking_loss(first, second, scores, temperature=temperature), *embeddings
                )
            }


class ClassesTask(Task):
    """Labels, read from the embedding by a linear map."""

    objective: Classes
    valued = True

    def __init__(
        self, objective: Classes, store: TokenStore, sampler: Sampler, run: FinetuneRun, *, spec: ModelSpec
    ) -> None:
        super().__init__(objective, store, sampler, run)
        labels, numbers = np.unique(store.column("values"), return_inverse=True)
        if len(labels) < 2:
            raise RunError(f"{objective.corpora[0].path} must have two labels or more, got {labels.tolist()}")
        self._numbers = numbers.astype(np.int64)
        self._sizes = self.sizes(spec.config.hidden_size)
        self.heads = nn.ModuleList(LabelHead(size, len(labels)) for size in self._sizes)

    def inputs(self, items: np.ndarray, generator: np.random.Generator, pad_id: int) -> Inputs:
        """Give what `loss` wants."""
        return super().inputs(items, generator, pad_id) | {"labels": torch.from_numpy(self._numbers[items])}

    def loss(self, embed: Embedder, inputs: Inputs) -> dict[str, Tensor]:
        """Give the loss and what else should be told."""
        embeddings = embed(**inputs["side0"])
        with torch.autocast(embeddings.device.type, enabled=False):
            read = [
                head(embeddings[:, :size], inputs["labels"]) for size, head in zip(self._sizes, self.heads, strict=True)
            ]
            return {"loss": torch.stack([loss for loss, _ in read]).mean(), "accuracy": read[-1][1]}


class DenoiseTask(Task):
    """The sentence, rebuilt from the embedding of some of its words."""

    objective: Denoise

    def __init__(
        self,
        objective: Denoise,
        store: TokenStore,
        sampler: Sampler,
        run: FinetuneRun,
        *,
        spec: ModelSpec,
        encoder: Encoder,
    ) -> None:
        super().__init__(objective, store, sampler, run)
        config = type(spec.config)(**{**vars(spec.config), "num_hidden_layers": objective.num_layers})
        self.decoder = Decoder(config, cross_attention=True)
        self.decoder.embeddings.word = encoder.embeddings.word  # one table, learned by both
        self.head = LanguageModelHead(config)
        self._special = np.array(Masker(spec, rate=0.15).special_ids)

    def inputs(self, items: np.ndarray, generator: np.random.Generator, pad_id: int) -> Inputs:
        """Give what `loss` wants."""
        whole = [self.store.text(int(item)) for item in items]
        left = []
        for text in whole:
            keep = np.isin(text, self._special) | (generator.random(len(text)) >= self.objective.delete)
            if keep.sum() <= 2 < len(text):
                keep[1 + generator.integers(len(text) - 2)] = True  # nothing can be rebuilt from nothing
            left.append(text[keep])
        ids = pad(whole, pad_id)
        positions = torch.from_numpy(np.flatnonzero(ids["attention_mask"][:, 1:].numpy()))
        return {"left": pad(left, pad_id), "whole": {"input_ids": ids["input_ids"], "positions": positions}}

    def loss(self, embed: Embedder, inputs: Inputs) -> dict[str, Tensor]:
        """Give the loss and what else should be told."""
        embeddings = embed(**inputs["left"])
        return {"loss": denoising_loss(self.decoder, self.head, embeddings, **inputs["whole"])}


class MaskedTask(Task):
    """Masked tokens, on single texts."""

    objective: Masked

    def __init__(
        self,
        objective: Masked,
        store: TokenStore,
        sampler: Sampler,
        run: FinetuneRun,
        *,
        spec: ModelSpec,
        head: LanguageModelHead,
    ) -> None:
        super().__init__(objective, store, sampler, run)
        self._masker = Masker(spec, rate=objective.masking_rate)
        self.head = head

    def inputs(self, items: np.ndarray, generator: np.random.Generator, pad_id: int) -> Inputs:
        """Give what `loss` wants."""
        padded = self.padded(items, 0, pad_id)
        hidden = self._masker.hide(padded["input_ids"].numpy(), generator)
        return padded | hidden

    def loss(self, embed: Embedder, inputs: Inputs) -> dict[str, Tensor]:
        """Give the loss and what else should be told."""
        hidden_states = embed.encode(inputs["input_ids"], inputs["attention_mask"], padded=inputs["padded"])
        words = embed.encoder.embeddings.word.weight
        loss, accuracy = masked_token_loss(self.head, words, hidden_states, inputs["positions"], inputs["targets"])
        return {"loss": loss, "accuracy": accuracy}
