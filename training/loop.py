"""The loop that all training shares: batches in, steps, figures, states, and back again after a kill."""

import logging
import math
import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.config import Loop, Optimizer, RunError
from training.distributed import World
from training.optimizer import Stepper
from training.progress import Report, TrainingError, choose_precision, measure_matrix_rate
from training.resume import differences, load_state, save_state

logger = logging.getLogger(__name__)

_PREPARED_BATCHES = 4


@dataclass
class Batch:
    """What one pass reads, and what it costs."""

    inputs: dict[str, Any]
    """For the module; its tensors are moved to the device."""
    tokens: int
    operations: float
    """Floating-point operations of forward and backward pass, the products alone."""
    positions: dict[str, Any]
    """Where the samplers stand after it; JSON."""


@runtime_checkable
class Work(Protocol):
    """What a kind of training brings to the loop."""

    @property
    def module(self) -> nn.Module:
        """Called with a batch's inputs, gives the loss as "loss" and its parts by name."""
        ...

    def draw(self, step: int, part: int) -> Batch:
        """Make the next batch. What is random in it depends on step and part alone, and on where the samplers stand."""

    def restore(self, positions: dict[str, Any]) -> None:
        """Let the samplers stand where they stood after some batch."""

    def evaluate(self, step: int) -> dict[str, float]:
        """Measure, after so many steps, on what is not trained on.

        The module is in evaluation mode, with the weights that will be saved.
        """


def train(work: Work, settings: Loop, optimizer: Optimizer, out: Path, world: World, *, run: dict[str, Any]) -> None:
    """Train to the end, from the start or from the last state in `out`.

    Interrupted and uninterrupted runs give the same weights, on a CPU to the bit.

    Args:
        work: Module, batches, evaluation. Its module ends with the weights to be saved: averaged, if that is on.
        settings: How long, how precisely.
        optimizer: Its settings.
        out: Where states and figures go.
        world: This process and its companions.
        run: The whole run file; a state of another run is refused.

    Raises:
        RunError: `out` holds the state of another run.
        TrainingError: The loss is not finite.
    """
    work.module.to(world.device).train()
    stepper = Stepper(work.module, optimizer, steps=settings.steps)
    progress = _resume(work, stepper, out / "state", run)
    begin = int(progress["step"])
    precision = choose_precision(settings.precision, world.device)
    if settings.compile:
        work.module.compile()
    module = world.wrap(work.module)
    rate = measure_matrix_rate(world.device, precision) * world.ranks if world.leads else 0.0
    report = Report(out, steps=settings.steps, begin=begin, matrix_rate=rate) if world.leads else None
    meter = _Meter(world, report, progress.get("figures"))
    try:
        drawn = _prefetch(work, settings, begin, world)
        for step in range(begin, settings.steps):
            torch.manual_seed(hash((settings.seed, step, world.rank)) % 2**63)  # dropout, the same after a restart
            positions = _step(module, stepper, drawn, settings, step, precision, meter)
            done = step + 1
            intervals = (settings.log_every, settings.evaluate_every, settings.save_every)
            tells, measures, saves = (done % every == 0 or done == settings.steps for every in intervals)
            if tells or measures or saves:
                meter.settle(done)
            if tells:
                meter.tell(done, stepper.rate(step))
            if measures:
                _evaluate(work, stepper, report, done)
            if saves and world.leads:
                progress = {"step": done, "positions": positions, "figures": meter.state(), "run": run}
                save_state(out / "state", stepper.state(), progress)
    finally:
        if report is not None:
            report.close()
    stepper.take_average()
    work.module.eval()


def _step(
    module: nn.Module,
    stepper: Stepper,
    drawn: Iterator[Batch],
    settings: Loop,
    step: int,
    precision: torch.dtype,
    meter: "_Meter",
) -> dict[str, Any]:
    """Do one step, and give where the samplers stand after it. Nothing in it waits for a GPU."""
    positions: dict[str, Any] = {}
    for part in range(settings.accumulate):
        batch = next(drawn)
        last = part == settings.accumulate - 1
        context: AbstractContextManager[Any] = nullcontext()
        if not last and isinstance(module, DistributedDataParallel):
            context = module.no_sync()
        with context:
            device = meter.device.type
            with torch.autocast(device, dtype=precision, enabled=precision != torch.float32):
                losses = module(**batch.inputs)
            (losses["loss"] / settings.accumulate).backward()
        meter.add(losses, batch)
        positions = batch.positions
    stepper.step(step)
    return positions


class _Meter:
    """Sums losses on the device, so that a step need not wait for them.

    Args:
        world: Whose losses are averaged.
        report: Where they are told.
        former: What `state` gave before a kill, so that the next mean is of all its steps.
    """

    def __init__(self, world: World, report: Report | None, former: dict[str, Any] | None) -> None:
        self.device = world.device
        self._world, self._report = world, report
        former = former or {"sums": {}, "counts": {}, "tokens": 0, "operations": 0.0}
        self._sums: dict[str, Tensor] = {
            name: torch.tensor(total, device=world.device) for name, total in former["sums"].items()
        }
        self._counts: dict[str, int] = dict(former["counts"])
        self._tokens, self._operations = former["tokens"], former["operations"]

    def add(self, losses: dict[str, Tensor], batch: Batch) -> None:
        for name, value in losses.items():
            former = self._sums.get(name)
            self._sums[name] = value.detach() if former is None else former + value.detach()
            self._counts[name] = self._counts.get(name, 0) + 1
        self._tokens += batch.tokens
        self._operations += batch.operations

    def settle(self, step: int) -> None:
        """Average over all ranks. What is not finite is refused here, before it is measured or saved."""
        self._sums = self._world.average(self._sums)
        means = self._means()
        if not math.isfinite(means.get("loss", 0.0)):
            raise _diverged(step, means)

    def state(self) -> dict[str, Any]:
        sums = {name: float(total) for name, total in self._sums.items()}
        return {"sums": sums, "counts": self._counts, "tokens": self._tokens, "operations": self._operations}

    def tell(self, step: int, rate: float) -> None:
        means = self._means()
        ranks = self._world.ranks
        if self._report is not None:
            self._report.log(
                step, losses=means, tokens=self._tokens * ranks, operations=self._operations * ranks, rate=rate
            )
        self._sums, self._counts, self._tokens, self._operations = {}, {}, 0, 0.0

    def _means(self) -> dict[str, float]:
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}


def _evaluate(work: Work, stepper: Stepper, report: Report | None, step: int) -> None:
    if report is None:
        return
    work.module.eval()
    with stepper.averaged(), torch.inference_mode():
        figures = work.evaluate(step)
    if not all(map(math.isfinite, figures.values())):
        raise _diverged(step, {f"heldout_{name}": value for name, value in figures.items()})
    report.evaluation(step, figures)
    work.module.train()


def _diverged(step: int, figures: dict[str, float]) -> TrainingError:
    broken = next(name for name, value in figures.items() if not math.isfinite(value))
    return TrainingError(
        f"the {broken} is {figures[broken]} at step {step} or shortly before: {figures}. Start anew, with another "
        "--out and a lower optimizer.rate, more optimizer.warmup_steps, or loop.precision = 'float32'"
    )


def _resume(work: Work, stepper: Stepper, directory: Path, run: dict[str, Any]) -> dict[str, Any]:
    found = load_state(directory)
    if found is None:
        return {"step": 0}
    tensors, progress = found
    former = progress["run"]  # of a former version it may lack keys, of which it then says nothing
    if changed := list(differences(former, {key: run.get(key) for key in former})):
        raise RunError(
            f"{directory} holds the state of another run: {'; '.join(changed)}. Choose another --out, or remove it"
        )
    stepper.restore(tensors)
    work.restore(progress["positions"])
    logger.info("going on from step %d", progress["step"])
    return progress


def _prefetch(work: Work, settings: Loop, begin: int, world: World) -> Iterator[Batch]:
    """Draw batches on a thread of their own, a few ahead, and bring them to the device."""
    ready: queue.Queue[Batch | BaseException] = queue.Queue(_PREPARED_BATCHES)
    stopped = threading.Event()

    def fill() -> None:
        try:
            for step in range(begin, settings.steps):
                for part in range(settings.accumulate):
                    batch = work.draw(step, part)
                    if stopped.is_set():
                        return
                    ready.put(batch)
        except BaseException as error:  # noqa: BLE001 - it is raised where the batch is wanted
            ready.put(error)

    threading.Thread(target=fill, name="batches", daemon=True).start()
    try:
        while True:
            batch = ready.get()
            if isinstance(batch, BaseException):
                raise batch
            batch.inputs = move(batch.inputs, world.device)
            yield batch
    finally:
        stopped.set()


def move(inputs: Any, device: torch.device) -> Any:
    """Bring tensors, however nested in dictionaries, to the device, without waiting for the copy."""
    if isinstance(inputs, dict):
        return {name: move(value, device) for name, value in inputs.items()}
    if isinstance(inputs, Tensor) and device.type == "cuda":
        return inputs.pin_memory().to(device, non_blocking=True)
    return inputs
