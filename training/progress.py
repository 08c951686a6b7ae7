"""What a person sees of a run: a progress bar or log lines, a TensorBoard log, a table of figures and its plot."""

import json
import logging
import math
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.utils.tensorboard import SummaryWriter

from encoder.checkpoint import RECORD_FILE

logger = logging.getLogger(__name__)

FIGURES = "metrics.jsonl"
_PLOT_INCHES = (9, 5)


class TrainingError(RuntimeError):
    """A run cannot go on: its loss is not finite, or its state is gone."""


class Report:
    """Tells people and files how a run goes.

    Args:
        directory: Where `metrics.jsonl`, `loss.png` and the TensorBoard log go.
        steps: Of the whole run.
        begin: The step it goes on from; later figures of an interrupted run are dropped.
        matrix_rate: Measured floating-point operations per second of this machine, for the share that is used.
    """

    def __init__(self, directory: Path, *, steps: int, begin: int, matrix_rate: float) -> None:
        self._directory, self._steps, self._matrix_rate = directory, steps, matrix_rate
        self._figures = directory / FIGURES
        former = read_figures(self._figures)
        kept = [figures for figures in former if figures["step"] <= begin]
        partial = self._figures.with_suffix(".partial")
        partial.write_text("".join(json.dumps(figures) + "\n" for figures in kept))
        partial.replace(self._figures)
        self._writer = SummaryWriter(str(directory / "tensorboard"), purge_step=begin + 1 if begin else None)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[tail]}"),
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("training", total=steps, completed=begin, tail="")
        self._bar.start()
        self._since, self._since_step = time.monotonic(), begin

    def log(self, step: int, *, losses: dict[str, float], tokens: int, operations: float, rate: float) -> None:
        """Tell the mean losses since the last call.

        Args:
            step: Steps done.
            losses: By name; "loss" is their weighted sum.
            tokens: Read since the last call, on all ranks.
            operations: Floating-point operations for them.
            rate: Learning rate.
        """
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)
        left_s = (self._steps - step) * seconds / max(step - self._since_step, 1)
        self._since, self._since_step = now, step
        share = operations / seconds / self._matrix_rate if self._matrix_rate else math.nan
        figures = {**losses, "tokens_per_s": tokens / seconds, "matrix_share": share, "rate": rate}
        self._write(step, {name: value for name, value in figures.items() if math.isfinite(value)})
        parts = " ".join(f"{name} {value:.4f}" for name, value in losses.items())
        tail = (
            f"{parts} | {tokens / seconds:,.0f} tokens/s | {share:.0%} of the matrix rate | {left_s / 60:.0f} min left"
        )
        self._bar.update(self._task, completed=step, tail=tail)
        if self._bar.disable:
            logger.info("step %d/%d %s", step, self._steps, tail)

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Tell what the held-out texts say, if there are any."""
        if not figures:
            return
        named = {f"heldout_{name}": value for name, value in figures.items()}
        self._write(step, named)
        logger.info("step %d held out: %s", step, " ".join(f"{name} {value:.4f}" for name, value in figures.items()))

    def close(self) -> None:
        """Finish the bar and the log, and draw the plot."""
        self._bar.stop()
        self._writer.close()
        plot(self._figures, self._directory / "loss.png")

    def _write(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        with self._figures.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")


def make_record(command: str, run: dict[str, Any], out: Path, *, began_with: Path | None = None) -> dict[str, Any]:
    """Tell how a model was made, for its training.json.

    Args:
        command: What made it.
        run: The whole run file.
        out: Where the run's figures are.
        began_with: The model directory it began from, whose own record becomes part of this one.
    """
    measured = [row for row in read_figures(out / FIGURES) if any(name.startswith("heldout_") for name in row)]
    former = None if began_with is None else began_with / RECORD_FILE
    return {
        "command": command,
        "run": run,
        "figures": measured[-1] if measured else {},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "nearsense": version("nearsense"),
        },
        "began_with": json.loads(former.read_text(encoding="utf-8")) if former and former.is_file() else None,
    }


def read_figures(path: Path) -> list[dict[str, Any]]:
    """Give the rows of a `metrics.jsonl`; a last line that a kill cut off is dropped."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            logger.warning("%s ends in a torn line, which is dropped", path)
    return rows


def plot(figures: Path, out: Path) -> None:
    """Draw losses, trained and held out, over steps."""
    rows = read_figures(figures)
    figure = Figure(figsize=_PLOT_INCHES, layout="tight")
    axes = figure.subplots()
    names = sorted({name for row in rows for name in row if "loss" in name})
    for name in names:
        points = [(row["step"], row[name]) for row in rows if name in row]
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1, marker="o" if len(points) < 3 else None)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if names:
        axes.legend()
    figure.savefig(out, dpi=110)


def choose_precision(wanted: str, device: torch.device) -> torch.dtype:
    """Give the precision of the products; "auto" is bfloat16 where the processor computes in it, else float32."""
    if wanted != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted]
    # Without such instructions bfloat16 is emulated: 59 GFLOP/s where float32 has 280, on a Xeon with AVX-512. Of a CPU
    # torch has no public name for it.
    has = torch.cuda.is_bf16_supported() if device.type == "cuda" else torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if has else torch.float32


def measure_matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Give the floating-point operations per second that a large product reaches here: what 100 % means."""
    sizes = (1024, 1024, 1024) if device.type == "cpu" else (8192, 8192, 8192)
    rows, inner, columns = sizes
    left = torch.randn(rows, inner, device=device, dtype=dtype)
    right = torch.randn(inner, columns, device=device, dtype=dtype)
    best = math.inf
    for _ in range(6):
        _synchronize(device)
        begun = time.perf_counter()
        for _ in range(2):
            left @ right
        _synchronize(device)
        best = min(best, (time.perf_counter() - begun) / 2)
    return 2 * rows * inner * columns / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
