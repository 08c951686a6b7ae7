"""nearsense-train finetune: from a pretrained encoder to a sentence encoder."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from encoder.checkpoint import load_encoder, load_masked_language_model, save
from encoder.config import ModelDirectoryError
from encoder.heads import LanguageModelHead
from encoder.model import Encoder
from encoder.model_dir import ModelSpec, read_spec
from training.batches import Position, Sampler, hold_out
from training.config import AnyObjective, FinetuneRun, RunError
from training.distributed import World
from training.loop import Batch, move, train
from training.prepare import prepare_items
from training.pretrain import training_operations
from training.progress import make_record
from training.resume import fingerprint
from training.tasks import (
    ClassesTask,
    DenoiseTask,
    DistillTask,
    Embedder,
    MaskedTask,
    PairsTask,
    ScoredTask,
    Task,
)

logger = logging.getLogger(__name__)

_KINDS: dict[str, type[Task]] = {
    "distill": DistillTask,
    "pairs": PairsTask,
    "scored": ScoredTask,
    "classes": ClassesTask,
    "denoise": DenoiseTask,
    "masked": MaskedTask,
}


def finetune(run: FinetuneRun, *, data: Path, model: Path, out: Path, world: World, fresh: bool = False) -> Path:
    """Finetune an encoder, or go on with a run that was interrupted, and give its model directory, `out`/model.

    Args:
        run: What to do.
        data: What the corpora's paths are relative to.
        model: The directory to begin from; left as it is.
        out: Where everything of this run goes.
        world: This process and its companions.
        fresh: Begin from random weights of that directory's shape instead; for comparison.

    Raises:
        RunError: `out` holds a finished model or another run's state, or an objective asks for what is not there.
        DataError: A corpus cannot be read.
        ModelDirectoryError: `model`, or a teacher, is no model directory.
        TrainingError: The loss is not finite.
    """
    model_dir = out / "model"
    if model_dir.exists():
        raise RunError(f"{model_dir} exists, so this run is finished; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    spec = read_spec(model)
    if run.max_length > spec.config.max_position_embeddings:
        raise RunError(f"max_length must fit {spec.config.max_position_embeddings} positions, got {run.max_length}")
    spec = replace(spec, max_length=run.max_length, pooling=run.pooling, normalize=True)
    torch.manual_seed(run.loop.seed)
    encoder, head = _load(model, spec, fresh=fresh)
    tasks = [_task(objective, run, spec, encoder, head, data, out, world) for objective in run.objectives]
    work = _Finetuning(run, spec, encoder, tasks, world)
    described = run.model_dump(mode="json") | {
        "model": str(model.resolve()),
        "fresh": fresh,
        "content of the corpora": [fingerprint(*task.content()) for task in tasks],
    }
    train(work, run.loop, run.optimizer, out, world, run=described)
    if world.leads:
        record = make_record("finetune", run.model_dump(mode="json"), out, began_with=None if fresh else model)
        kept = head.cpu() if work.keeps_head else None
        save(model_dir, spec, encoder.cpu(), kept, precision="float16", record=record)
    world.wait()
    return model_dir


def _load(model: Path, spec: ModelSpec, *, fresh: bool) -> tuple[Encoder, LanguageModelHead]:
    if fresh:
        return Encoder(spec.config), LanguageModelHead(spec.config)
    try:
        return load_masked_language_model(model)
    except ModelDirectoryError:
        return load_encoder(model), LanguageModelHead(spec.config)


def _task(
    objective: AnyObjective,
    run: FinetuneRun,
    spec: ModelSpec,
    encoder: Encoder,
    head: LanguageModelHead,
    data: Path,
    out: Path,
    world: World,
) -> Task:
    kind = _KINDS[objective.kind]
    store = prepare_items(
        objective, run.data, data, out / "prepared", spec, sides=kind.sides, valued=kind.valued, world=world
    )
    heldout, rest = hold_out(len(store))
    sampler = Sampler(
        store.lengths(),
        rest,
        batch_size=objective.batch_size,
        batch_tokens=objective.batch_tokens,
        seed=run.loop.seed,
        rank=world.rank,
        ranks=world.ranks,
    )
    logger.info("%s: %d items, %d tokens", objective.kind, len(store), len(store.ids))
    wanted: dict[str, Any] = {}
    if kind in (DistillTask, ClassesTask, DenoiseTask, MaskedTask):
        wanted["spec"] = spec
    if kind is DenoiseTask:
        wanted["encoder"] = encoder
    if kind is MaskedTask:
        wanted["head"] = head
    task = kind(objective, store, sampler, run, **wanted)
    task.heldout = heldout
    return task


class _Objectives(nn.Module):
    """All objectives over one encoder; what it is given in a step, it sums by weight."""

    def __init__(self, encoder: Encoder, spec: ModelSpec, tasks: dict[str, Task]) -> None:
        super().__init__()
        self.embed = Embedder(encoder, spec)
        self.parts = nn.ModuleList(tasks.values())
        self._tasks = tasks

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        figures: dict[str, Tensor] = {}
        losses = []
        for name, given in inputs.items():
            task = self._tasks[name]
            for key, value in task.loss(self.embed, given).items():
                figures[f"{name}_{key}"] = value
                if key == "loss":
                    losses.append(task.objective.weight * value)
        return {"loss": torch.stack(losses).sum(), **figures}


class _Finetuning:
    """The work that `loop.train` does; see its protocol."""

    def __init__(self, run: FinetuneRun, spec: ModelSpec, encoder: Encoder, tasks: list[Task], world: World) -> None:
        kinds = [objective.kind for objective in run.objectives]
        # "classes" if there is one of a kind, else "classes1", "classes2"
        names = [
            kind if kinds.count(kind) == 1 else f"{kind}{kinds[: place + 1].count(kind)}"
            for place, kind in enumerate(kinds)
        ]
        self._tasks = dict(zip(names, tasks, strict=True))
        self.module = _Objectives(encoder, spec, self._tasks)
        self._run, self._spec, self._world = run, spec, world
        self.keeps_head = any(isinstance(task, MaskedTask) for task in tasks)
        """Whether the head was trained on, so that it still fits the encoder."""
        if all(task.objective.every > 1 for task in tasks):
            raise RunError("one objective must have every = 1, or some steps would have nothing to learn")

    def draw(self, step: int, part: int) -> Batch:
        generator = np.random.default_rng((self._run.loop.seed, step, part * self._world.ranks + self._world.rank))
        pad_id = self._spec.config.pad_token_id
        inputs = {
            name: task.draw(generator, pad_id) for name, task in self._tasks.items() if step % task.objective.every == 0
        }
        tokens, scored = _count(inputs)
        positions = {name: dict(vars(task.sampler.position)) for name, task in self._tasks.items()}
        return Batch(inputs, tokens, training_operations(self._spec.config, tokens, scored), positions)

    def restore(self, positions: dict[str, Any]) -> None:
        for name, position in positions.items():
            self._tasks[name].sampler.position = Position(**position)

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure each objective on items that it never draws, the same each time."""
        del step
        figures: dict[str, float] = {}
        for name, task in self._tasks.items():
            if len(task.heldout):
                inputs = task.inputs(task.heldout, np.random.default_rng(0), self._spec.config.pad_token_id)
                losses = self.module(**move({name: inputs}, self._world.device))
                figures |= {key: float(value) for key, value in losses.items() if key != "loss"}
        return figures


def _count(inputs: Any) -> tuple[int, int]:
    """Count real tokens, and those scored against the vocabulary."""
    if not isinstance(inputs, dict):
        return 0, 0
    counts = [_count(value) for value in inputs.values()]
    tokens, scored = sum(count for count, _ in counts), sum(count for _, count in counts)
    if "attention_mask" in inputs:
        tokens += int(inputs["attention_mask"].sum())
    return tokens, scored + (len(inputs["positions"]) if "positions" in inputs else 0)
