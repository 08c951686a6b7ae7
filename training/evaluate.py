"""nearsense-train evaluate: what a model is worth, beside another."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from training.config import RunError
from training.measures import Evaluator, Figure
from training.suite import EvaluationRun

logger = logging.getLogger(__name__)


def evaluate(
    run: EvaluationRun, model: Path, *, against: Path | None = None, data: Path, out: Path | None = None
) -> str:
    """Measure a model, and perhaps a reference on the same tasks.

    Args:
        run: What to measure.
        model: Its directory.
        against: The reference's directory, or the JSON file that its own evaluation made.
        data: What the tasks' paths are relative to.
        out: A JSON file for all figures of `model`; must not exist yet.

    Returns:
        A table in Markdown, a row for each figure: of each model the value and its 95 % interval, and what share of
        the reference's the model's is.

    Raises:
        RunError: `out` exists, a task's data does not fit it, or `against` is a file without figures.
        DataError: A task's data cannot be read.
        ModelDirectoryError: A model cannot be used.
    """
    if out is not None and out.exists():
        raise RunError(f"{out} must not exist yet; remove it or choose another --out")
    columns: list[tuple[str, list[Figure]]] = []
    if against is not None:
        columns.append(_read_figures(against) if against.is_file() else _measure(run, against, data))
    name, figures = _measure(run, model, data)
    columns.insert(0, (name, figures))
    if out is not None:
        listed = [asdict(figure) for figure in figures]
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"model": name, "figures": listed}, indent=1) + "\n", encoding="utf-8")
    return make_table([name for name, _ in columns], [figures for _, figures in columns])


def _measure(run: EvaluationRun, model: Path, data: Path) -> tuple[str, list[Figure]]:
    evaluator = Evaluator(model, data)
    figures: list[Figure] = []
    for task in run.tasks:
        found = evaluator.measure(task)
        figures += found
        for figure in found[:1]:
            logger.info("%s: %s %.4f", figure.task, figure.metric, figure.value)
    return model.absolute().name, figures


def _read_figures(path: Path) -> tuple[str, list[Figure]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return str(content["model"]), [Figure(**figure) for figure in content["figures"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} must be a file of figures that evaluate made: {error}") from error


def make_table(names: Sequence[str], measured: Sequence[Sequence[Figure]]) -> str:
    """Lay the figures of one model, or of two, side by side, in Markdown."""
    columns = ["task", "rows", "metric", *names] + ["share"] * (len(names) > 1)
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    by_key = [{(figure.task, figure.metric): figure for figure in figures} for figures in measured]
    for key in dict.fromkeys(key for figures in by_key for key in figures):
        found = [figures.get(key) for figures in by_key]
        first = next(figure for figure in found if figure is not None)
        cells = [key[0], f"{first.rows:,}", key[1], *(_cell(figure) for figure in found)]
        if len(found) > 1:
            own, reference = found[0], found[1]
            cells.append(f"{own.value / reference.value:.2f}" if own and reference and reference.value else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "—"
    digits = 1 if figure.value >= 10 else 4
    return f"{figure.value:.{digits}f} ({figure.low:.{digits}f}–{figure.high:.{digits}f})"
