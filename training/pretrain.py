"""nearsense-train pretrain: masked-token prediction from random weights."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from encoder.checkpoint import save
from encoder.config import EncoderConfig
from encoder.heads import LanguageModelHead
from encoder.model import Encoder
from encoder.model_dir import ModelSpec
from training.batches import Position, Windows
from training.config import PretrainRun, RunError
from training.distributed import World
from training.loop import Batch, move, train
from training.objectives import documents_mask, encode, mask_tokens, masked_token_loss
from training.prepare import prepare_documents
from training.progress import make_record
from training.resume import fingerprint
from training.store import TokenStore
from training.tokenizer import SPECIAL_TOKENS, new_spec

logger = logging.getLogger(__name__)

_HELD_OUT_TOKENS = 65_536
_STUCK_AFTER = 0.2
_STUCK_NATS = 0.05


def pretrain(run: PretrainRun, *, data: Path, tokenizer: Path, out: Path, world: World) -> Path:
    """Pretrain an encoder, or go on with one that was interrupted, and give its model directory, `out`/model.

    Args:
        run: What to do.
        data: What the corpora's paths are relative to.
        tokenizer: A directory that `nearsense-train tokenizer` made.
        out: Where everything of this run goes.
        world: This process and its companions.

    Raises:
        RunError: `out` holds a finished model or another run's state, or the tokenizer is missing.
        DataError: A corpus cannot be read.
        TrainingError: The loss is not finite.
    """
    model_dir = out / "model"
    if model_dir.exists():
        raise RunError(f"{model_dir} exists, so this run is finished; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    spec = new_spec(tokenizer, run.model)
    stores = prepare_documents(run.corpora, run.data, data, out / "prepared", spec, heldout=run.heldout, world=world)
    torch.manual_seed(run.loop.seed)
    work = _Pretraining(run, spec, *stores, world)
    described = run.model_dump(mode="json") | {
        "content of the corpora": fingerprint(*(store.ids for store in stores)),
        "tokenizer": fingerprint(np.frombuffer(spec.tokenizer_json.encode(), dtype=np.uint8)),
    }
    train(work, run.loop, run.optimizer, out, world, run=described)
    if world.leads:
        encoder, head = work.module.encoder.cpu(), work.module.head.cpu()
        record = make_record("pretrain", run.model_dump(mode="json"), out)
        save(model_dir, spec, encoder, head, precision="float16", record=record)
    world.wait()
    return model_dir


class MaskedLanguageModel(nn.Module):
    """An encoder and the head that predicts its hidden tokens."""

    def __init__(self, encoder: Encoder, head: LanguageModelHead) -> None:
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(
        self, input_ids: Tensor, starts: Tensor | None, positions: Tensor, targets: Tensor
    ) -> dict[str, Tensor]:
        """Give the loss and the accuracy; `starts` is None where no sequence holds two documents."""
        mask = None if starts is None else documents_mask(starts)
        hidden_states = encode(self.encoder, input_ids, mask)
        loss, accuracy = masked_token_loss(
            self.head, self.encoder.embeddings.word.weight, hidden_states, positions, targets
        )
        return {"loss": loss, "accuracy": accuracy}


class Masker:
    """Cuts windows out of a row of tokens and hides some of them."""

    def __init__(self, spec: ModelSpec, *, rate: float) -> None:
        tokenizer = Tokenizer.from_str(spec.tokenizer_json)
        vocabulary = tokenizer.get_vocab()
        if missing := [token for token in SPECIAL_TOKENS if token not in vocabulary]:
            raise RunError(f"the tokenizer must have the tokens {', '.join(SPECIAL_TOKENS)}; it lacks {missing[0]}")
        ids = [vocabulary[token] for token in SPECIAL_TOKENS]
        self.special_ids = ids
        self._start, self._mask = ids[2], ids[4]
        self._words, self._rate = spec.config.vocab_size, rate

    def hide(self, input_ids: np.ndarray, generator: np.random.Generator) -> dict[str, Tensor]:
        """Give what `masked_token_loss` wants to know of a batch."""
        hidden, positions = mask_tokens(
            input_ids,
            rate=self._rate,
            special_ids=self.special_ids,
            mask_id=self._mask,
            vocab_size=self._words,
            generator=generator,
        )
        return {
            "input_ids": torch.from_numpy(hidden),
            "positions": torch.from_numpy(positions),
            "targets": torch.from_numpy(input_ids.ravel()[positions]),
        }

    def starts(self, input_ids: np.ndarray) -> Tensor | None:
        """Tell where documents start within windows; None if none does after a window's beginning."""
        starts = input_ids == self._start
        return torch.from_numpy(starts) if starts[:, 1:].any() else None


class _Pretraining:
    """The work that `loop.train` does; see its protocol."""

    def __init__(self, run: PretrainRun, spec: ModelSpec, store: TokenStore, heldout: TokenStore, world: World) -> None:
        self.module = MaskedLanguageModel(Encoder(spec.config), LanguageModelHead(spec.config))
        self._run, self._spec, self._store, self._heldout, self._world = run, spec, store, heldout, world
        self._masker = Masker(spec, rate=run.masking_rate)
        self._windows = [
            Windows(
                len(store.ids),
                phase.length,
                batch_size=max(1, phase.batch_tokens // phase.length),
                seed=run.loop.seed,
                rank=world.rank,
                ranks=world.ranks,
            )
            for phase in run.phases
        ]
        self._entropy = _unigram_entropy(store.ids, spec.config.vocab_size, self._masker.special_ids)
        logger.info("%d training tokens, unigram entropy %.3f nats", len(store.ids), self._entropy)

    def draw(self, step: int, part: int) -> Batch:
        phase = self._phase(step)
        windows = self._windows[phase]
        starts = windows.next()
        length = self._run.phases[phase].length
        ids = np.stack([self._store.ids[start : start + length] for start in starts]).astype(np.int64)
        generator = np.random.default_rng((self._run.loop.seed, step, part * self._world.ranks + self._world.rank))
        hidden = self._masker.hide(ids, generator)
        operations = training_operations(self._spec.config, ids.size, len(hidden["positions"]))
        positions = {str(index): dict(vars(each.position)) for index, each in enumerate(self._windows)}
        return Batch({**hidden, "starts": self._masker.starts(ids)}, ids.size, operations, positions)

    def restore(self, positions: dict[str, Any]) -> None:
        for key, position in positions.items():
            self._windows[int(key)].position = Position(**position)

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure on the same held-out windows with the same hidden tokens each time."""
        length = self._run.phases[-1].length
        ids = self._heldout.ids[:_HELD_OUT_TOKENS].astype(np.int64)
        ids = np.resize(ids, (max(1, len(ids) // length), length))
        generator = np.random.default_rng(self._run.loop.seed)
        losses, accuracies = [], []
        for rows in np.array_split(ids, math.ceil(ids.size / 8192)):
            inputs = {**self._masker.hide(rows, generator), "starts": self._masker.starts(rows)}
            figures = self.module(**move(inputs, self._world.device))
            losses.append(float(figures["loss"]))
            accuracies.append(float(figures["accuracy"]))
        loss = float(np.mean(losses))
        self._check_stuck(loss, step)
        perplexity = math.exp(min(loss, 700.0))  # beyond that there is no such float
        return {"loss": loss, "perplexity": perplexity, "accuracy": float(np.mean(accuracies))}

    def _check_stuck(self, loss: float, step: int) -> None:
        done = step / self._run.loop.steps
        if done >= _STUCK_AFTER and loss > self._entropy - _STUCK_NATS:
            logger.warning(
                "ALARM: the held-out loss %.3f is no better than guessing by frequency (%.3f nats) after %.0f %% of "
                "the run; try a lower optimizer.rate or more warmup_steps, or look at the corpus",
                loss,
                self._entropy,
                100 * done,
            )

    def _phase(self, step: int) -> int:
        ends = np.cumsum([phase.share for phase in self._run.phases])
        return int(np.searchsorted(ends, (step + 0.5) / self._run.loop.steps).clip(0, len(ends) - 1))


def training_operations(config: EncoderConfig, tokens: int, scored: int) -> float:
    """Count the floating-point operations of a training pass, forward and backward.

    6 for each token and weight of the layers, 6 for each scored position and component of the word vectors. Attention's
    own products, which grow with the length, are left out.
    """
    layer = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    return 6.0 * (config.num_hidden_layers * layer * tokens + config.hidden_size * config.vocab_size * scored)


def _unigram_entropy(ids: np.ndarray, words: int, special_ids: list[int]) -> float:
    """Give the loss, in nats, of guessing each token by how frequent it is."""
    counts = np.zeros(words)
    for start in range(0, len(ids), 1 << 24):
        counts += np.bincount(ids[start : start + (1 << 24)], minlength=words)
    counts[special_ids] = 0
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
