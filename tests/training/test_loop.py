import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]
from torch import Tensor, nn

from training.config import Loop, Optimizer
from training.data import DataError
from training.distributed import World
from training.loop import Batch, train
from training.progress import TrainingError
from training.resume import load_state

ALONE = World(0, 1, torch.device("cpu"))
ROWS = 6


class Regression(nn.Module):
    """A linear map to a known one, and the loss of being elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, points: Tensor) -> dict[str, Tensor]:
        error = self.linear(points) - points.sum(dim=1, keepdim=True)
        return {"loss": error.square().mean(), "distance": error.detach().abs().mean()}


class Fitting:
    """The work of fitting it, in batches that the step decides; each is cut into `parts`."""

    def __init__(self, *, parts: int = 1, broken_at: int | None = None, poisoned_at: int | None = None) -> None:
        torch.manual_seed(0)
        self.module = Regression()
        self.drawn = 0
        self.measured: list[tuple[int, bool, Tensor]] = []
        self._parts, self._broken_at, self._poisoned_at = parts, broken_at, poisoned_at

    def points(self, step: int) -> Tensor:
        points = np.random.default_rng(step).standard_normal((ROWS, 3)).astype(np.float32)
        if step == self._poisoned_at:
            points[0, 0] = np.nan
        return torch.from_numpy(points)

    def draw(self, step: int, part: int) -> Batch:
        if step == self._broken_at:
            raise DataError("the disk is gone")
        assert self.drawn == step * self._parts + part, "samplers do not stand where they should"
        self.drawn += 1
        rows = self.points(step).chunk(self._parts)[part]
        return Batch({"points": rows}, tokens=len(rows), operations=18.0 * len(rows), positions={"drawn": self.drawn})

    def restore(self, positions: dict[str, Any]) -> None:
        self.drawn = positions["drawn"]

    def evaluate(self, step: int) -> dict[str, float]:
        weight = self.module.linear.weight.detach().clone()
        self.measured.append((step, self.module.training, weight))
        return {"loss": float((weight - 1).square().sum())}


def fit(
    work: Fitting, out: Path, *, average: float = 0.0, rate: float = 0.05, clip: float = 1.0, **settings: Any
) -> None:
    out.mkdir(exist_ok=True)
    chosen: dict[str, Any] = {
        "steps": 10,
        "log_every": 4,
        "evaluate_every": 5,
        "save_every": 3,
        "precision": "float32",
    } | settings
    optimizer = Optimizer(rate=rate, warmup_steps=2, average=average, clip=clip)
    train(work, Loop(**chosen), optimizer, out, ALONE, run={"rate": rate})


def rows_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def curve(out: Path) -> list[dict[str, float]]:
    """Give all that a restart must not change: not how long it took."""
    return [{k: v for k, v in row.items() if k not in ("tokens_per_s", "matrix_share")} for row in rows_of(out)]


def test_the_figures_are_those_of_the_steps(tmp_path: Path) -> None:
    """Means over all steps since the last figures, by an AdamW of a few lines."""
    work = Fitting()
    fit(work, tmp_path)
    torch.manual_seed(0)
    module = Regression()
    adamw = torch.optim.AdamW(
        [
            {"params": [module.linear.weight], "weight_decay": 0.01},
            {"params": [module.linear.bias], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
    )
    losses, distances, rates = [], [], []
    for step in range(10):
        figures = module(work.points(step))
        losses.append(float(figures["loss"].detach()))
        distances.append(float(figures["distance"]))
        adamw.zero_grad()
        figures["loss"].backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        rate = (
            0.05 * min((step + 1) / 2, 1)
            if step < 2
            else 0.05 * (0.02 + 0.98 * (1 + np.cos(np.pi * (step - 2) / 8)) / 2)
        )
        for group in adamw.param_groups:
            group["lr"] = rate
        rates.append(rate)
        adamw.step()

    trained = [row for row in rows_of(tmp_path) if "loss" in row]
    assert [row["step"] for row in trained] == [4, 8, 10]
    spans = (slice(0, 4), slice(4, 8), slice(8, 10))
    assert [row["loss"] for row in trained] == pytest.approx([np.mean(losses[span]) for span in spans], rel=1e-5)
    assert [row["distance"] for row in trained] == pytest.approx([np.mean(distances[s]) for s in spans], rel=1e-5)
    assert [row["rate"] for row in trained] == pytest.approx([rates[3], rates[7], rates[9]])
    assert all(row["tokens_per_s"] > 0 and row["matrix_share"] > 0 for row in trained)
    torch.testing.assert_close(work.module.linear.weight, module.linear.weight)
    assert losses[-1] < losses[0]

    measured = [row for row in rows_of(tmp_path) if "heldout_loss" in row]
    assert [row["step"] for row in measured] == [5, 10]
    assert [step for step, _, _ in work.measured] == [5, 10]
    assert not any(training for _, training, _ in work.measured)
    assert measured[1]["heldout_loss"] == pytest.approx(float((module.linear.weight.detach() - 1).square().sum()))


def test_two_halves_of_a_batch_make_the_step_of_the_whole(tmp_path: Path) -> None:
    whole, halves, one_half = Fitting(), Fitting(parts=2), Fitting(parts=2)
    fit(whole, tmp_path / "whole", clip=1e9)
    fit(halves, tmp_path / "halves", clip=1e9, accumulate=2)
    states = [load_state(tmp_path / name / "state") for name in ("whole", "halves")]
    assert states[0] is not None
    assert states[1] is not None
    for name, tensor in states[0][0].items():  # the moments too: Adam's step alone would hide a wrong scale
        torch.testing.assert_close(tensor, states[1][0][name], atol=1e-6, rtol=1e-5)
    for once, twice in zip(curve(tmp_path / "whole"), curve(tmp_path / "halves"), strict=True):
        assert once == pytest.approx(twice, rel=1e-5)
    # for contrast: half the rows alone have another loss
    losses = [one_half.module(points)["loss"].item() for points in (whole.points(0)[:3], whole.points(0))]
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("broken_at", [4, 9])
@pytest.mark.parametrize("average", [0.0, 0.6])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, broken_at: int, average: float) -> None:
    """Broken between states and between figures, so that both reach back over the break."""
    uninterrupted = Fitting()
    fit(uninterrupted, tmp_path / "whole", average=average)
    with pytest.raises(DataError, match="the disk is gone"):
        fit(Fitting(broken_at=broken_at), tmp_path / "broken", average=average)
    saved = load_state(tmp_path / "broken" / "state")
    assert saved is not None
    assert saved[1]["step"] == broken_at // 3 * 3
    resumed = Fitting()
    fit(resumed, tmp_path / "broken", average=average)
    assert resumed.drawn == 10
    assert curve(tmp_path / "broken") == curve(tmp_path / "whole")
    for name, weight in uninterrupted.module.named_parameters():
        assert torch.equal(weight, dict(resumed.module.named_parameters())[name]), name
    assert scalars(tmp_path / "broken", "loss") == scalars(tmp_path / "whole", "loss")


def test_the_averaged_weights_are_measured_and_kept(tmp_path: Path) -> None:
    plain, averaged = Fitting(), Fitting()
    fit(plain, tmp_path / "plain")
    fit(averaged, tmp_path / "averaged", average=0.9)
    assert [row["loss"] for row in curve(tmp_path / "plain") if "loss" in row] == [
        row["loss"] for row in curve(tmp_path / "averaged") if "loss" in row
    ]  # which does not change what is trained
    kept = averaged.module.linear.weight.detach()
    assert torch.equal(kept, averaged.measured[-1][2])
    saved = load_state(tmp_path / "averaged" / "state")
    assert saved is not None
    assert torch.equal(kept, saved[0]["average/linear.weight"])
    assert torch.equal(plain.module.linear.weight.detach(), saved[0]["weight/linear.weight"])
    assert not torch.equal(kept, plain.module.linear.weight.detach())


@pytest.mark.parametrize(("intervals", "noticed"), [((1, 10), 5), ((10, 5), 5), ((10, 10), 6)])
def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path, intervals: tuple[int, int], noticed: int) -> None:
    """At the next figures, measurement or state, whichever is first, and before it stands in any of them."""
    with pytest.raises(TrainingError) as caught:
        fit(Fitting(poisoned_at=4), tmp_path, log_every=intervals[0], evaluate_every=intervals[1])
    message = str(caught.value)
    assert f"step {noticed}" in message
    for remedy in ("another --out", "optimizer.rate", "optimizer.warmup_steps", "loop.precision = 'float32'"):
        assert remedy in message
    saved = load_state(tmp_path / "state")
    assert saved is not None
    assert saved[1]["step"] == 3
    assert all(tensor.isfinite().all() for tensor in saved[0].values())
    assert all(np.isfinite(list(row.values())).all() for row in rows_of(tmp_path))


def test_a_loss_that_is_infinite_ends_the_run(tmp_path: Path) -> None:
    work = Fitting()
    with torch.no_grad():
        work.module.linear.bias.fill_(1e30)
    with pytest.raises(TrainingError, match="the loss is inf"):
        fit(work, tmp_path)


def test_a_state_written_before_figures_were_kept_in_it_is_taken(tmp_path: Path) -> None:
    """So that a run begun with a former version can go on; its first figures are those of the steps since."""
    with pytest.raises(DataError):
        fit(Fitting(broken_at=5), tmp_path)
    [state] = (tmp_path / "state").glob("*/state.json")
    progress = json.loads(state.read_text())
    assert progress.pop("figures")["counts"] == {"loss": 3, "distance": 3}
    state.write_text(json.dumps(progress))
    resumed = Fitting()
    fit(resumed, tmp_path)
    uninterrupted = Fitting()
    fit(uninterrupted, tmp_path / "whole")
    assert torch.equal(resumed.module.linear.weight, uninterrupted.module.linear.weight)


def scalars(out: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_has_the_figures(tmp_path: Path) -> None:
    fit(Fitting(), tmp_path)
    rows = rows_of(tmp_path)
    names = {name for row in rows for name in row} - {"step"}
    assert names == {"loss", "distance", "rate", "tokens_per_s", "matrix_share", "heldout_loss"}
    for name in names:
        expected = [(row["step"], float(np.float32(row[name]))) for row in rows if name in row]
        assert scalars(tmp_path, name) == expected


def test_the_plot_is_a_picture_of_the_losses(tmp_path: Path) -> None:
    fit(Fitting(), tmp_path)
    with Image.open(tmp_path / "loss.png") as image:
        assert image.format == "PNG"
        assert min(image.size) > 400
        pixels = np.asarray(image.convert("RGB")).reshape(-1, 3).astype(int)
    # one line of the losses and one of those held out: coloured, where all else is grey
    assert (np.ptp(pixels, axis=1) > 60).sum() > 500


def test_a_run_that_fails_has_its_plot_too(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fit(Fitting(broken_at=9), tmp_path)
    with Image.open(tmp_path / "loss.png") as image:
        image.verify()


def test_a_line_that_a_kill_cut_off_is_dropped(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fit(Fitting(broken_at=9), tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    fit(Fitting(), tmp_path)
    fit(Fitting(), tmp_path / "whole")
    assert curve(tmp_path) == curve(tmp_path / "whole")
