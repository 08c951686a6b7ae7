import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encoder.heads import LanguageModelHead
from encoder.model import Encoder
from encoder.model_dir import ModelSpec
from training.config import Optimizer
from training.optimizer import Stepper
from training.pretrain import MaskedLanguageModel
from training.resume import load_state, save_state


class Line(nn.Module):
    """One weight a component: what a step does to it can be reckoned by hand."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, size + 1))

    def give_gradient(self, *values: float) -> None:
        self.weight.grad = torch.tensor(values)


def make(module: nn.Module, *, steps: int = 10, **settings: object) -> Stepper:
    chosen: dict[str, object] = {"rate": 0.1, "warmup_steps": 0, "weight_decay": 0.0}
    return Stepper(module, Optimizer(**{**chosen, **settings}), steps=steps)  # type: ignore[arg-type]


def test_the_rate_rises_in_a_line_and_falls_in_a_cosine() -> None:
    stepper = make(Line(), rate=2.0, warmup_steps=4, final_rate=0.1, steps=24)
    assert [stepper.rate(step) for step in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert stepper.rate(14) == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half-way down
    assert stepper.rate(4 + 5) == pytest.approx(2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2))
    assert stepper.rate(24) == pytest.approx(2.0 * 0.1)
    rates = [stepper.rate(step) for step in range(4, 25)]
    assert rates == sorted(rates, reverse=True)


def test_a_run_shorter_than_its_warm_up_never_has_more_than_the_rate() -> None:
    stepper = make(Line(), rate=2.0, warmup_steps=300, steps=5)
    assert [stepper.rate(step) for step in range(5)] == pytest.approx([2.0 * (step + 1) / 300 for step in range(5)])
    stepper = make(Line(), rate=2.0, warmup_steps=5, steps=5)
    assert max(stepper.rate(step) for step in range(5)) == pytest.approx(2.0)


def test_a_step_is_adamw_at_the_rate_of_its_number() -> None:
    line = Line()
    stepper = make(line, rate=0.5, betas=(0.8, 0.9), warmup_steps=2, clip=100.0)
    first, second, eps = [3.0, -4.0], [1.0, 2.0], 1e-8
    expected = [1.0, 2.0]
    mean, square = [0.0, 0.0], [0.0, 0.0]
    for number, gradient in enumerate((first, second)):
        line.give_gradient(*gradient)
        stepper.step(number)
        assert line.weight.grad is None
        for i in range(2):
            mean[i] = 0.8 * mean[i] + 0.2 * gradient[i]
            square[i] = 0.9 * square[i] + 0.1 * gradient[i] ** 2
            corrected = mean[i] / (1 - 0.8 ** (number + 1)), square[i] / (1 - 0.9 ** (number + 1))
            expected[i] -= (0.25, 0.5)[number] * corrected[0] / (math.sqrt(corrected[1]) + eps)
    assert line.weight.tolist() == pytest.approx(expected, rel=1e-5)


def test_long_gradients_are_clipped_and_short_ones_left() -> None:
    line = Line()
    stepper = make(line, clip=2.0, betas=(0.9, 0.98))
    line.give_gradient(30.0, -40.0)
    assert float(stepper.step(0)) == pytest.approx(50)  # as it was before
    assert stepper.state()["exp_avg/weight"].tolist() == pytest.approx([0.1 * 1.2, 0.1 * -1.6], rel=1e-4)

    line = Line()
    stepper = make(line, clip=2.0, betas=(0.9, 0.98))
    line.give_gradient(0.3, -0.4)
    assert float(stepper.step(0)) == pytest.approx(0.5)
    assert stepper.state()["exp_avg/weight"].tolist() == pytest.approx([0.03, -0.04], rel=1e-5)


def test_weights_decay_but_not_norms_biases_and_tables(tiny_spec: ModelSpec) -> None:
    """With gradients of 0 nothing but the decay moves a weight."""
    torch.manual_seed(0)
    module = MaskedLanguageModel(Encoder(tiny_spec.config), LanguageModelHead(tiny_spec.config))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5)  # so that there is something to decay in each
            parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    make(module, rate=0.1, weight_decay=0.3).step(0)
    decayed = set()
    for name, parameter in module.named_parameters():
        if not torch.equal(parameter, before[name]):
            torch.testing.assert_close(parameter.detach(), before[name] * (1 - 0.1 * 0.3))
            decayed.add(name)
    matrices = {
        f"{name}.weight" for name, part in module.named_modules() if isinstance(part, nn.Linear)
    }  # all of them, and nothing else
    assert len(matrices) == 3 * 6 + 1
    assert decayed == matrices


def test_the_average_follows_by_hand() -> None:
    """Its decay is (1 + n) / (10 + n) at first, and the setting's from there on."""
    line = Line()
    stepper = make(line, average=0.15, steps=100)
    expected = [1.0, 2.0]
    for number, decay in enumerate((1 / 10, 0.15, 0.15)):
        line.give_gradient(1.0, -1.0)
        stepper.step(number)
        expected = [decay * old + (1 - decay) * new for old, new in zip(expected, line.weight.tolist(), strict=True)]
    last = line.weight.tolist()
    with stepper.averaged():
        assert line.weight.tolist() == pytest.approx(expected, rel=1e-6)
        assert line.weight.tolist() != pytest.approx(last, rel=1e-3)
    assert line.weight.tolist() == last
    stepper.take_average()
    assert line.weight.tolist() == pytest.approx(expected, rel=1e-6)


def test_without_averaging_the_last_weights_are_kept() -> None:
    line = Line()
    stepper = make(line)
    line.give_gradient(1.0, -1.0)
    stepper.step(0)
    last = line.weight.tolist()
    with stepper.averaged():
        assert line.weight.tolist() == last
    stepper.take_average()
    assert line.weight.tolist() == last
    assert last != [1.0, 2.0]


def go_on(module: Line, stepper: Stepper, steps: range) -> list[Tensor]:
    for number in steps:
        module.give_gradient(math.sin(number), math.cos(3 * number))
        stepper.step(number)
    with stepper.averaged():
        averaged = module.weight.detach().clone()
    return [module.weight.detach().clone(), averaged]


def test_its_state_goes_through_a_file_to_the_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"average": 0.7, "weight_decay": 0.1, "warmup_steps": 5}
    line = Line()
    stepper = make(line, **settings)
    go_on(line, stepper, range(4))
    save_state(tmp_path / "state", stepper.state(), {"step": 4})
    uninterrupted = go_on(line, stepper, range(4, 9))

    found = load_state(tmp_path / "state")
    assert found is not None
    tensors, progress = found
    assert progress == {"step": 4}
    other = Line()
    restored = make(other, **settings)
    with torch.no_grad():
        other.weight.fill_(77)
    restored.restore(tensors)
    interrupted = go_on(other, restored, range(4, 9))
    assert all(torch.equal(*pair) for pair in zip(uninterrupted, interrupted, strict=True))
    assert not torch.equal(*uninterrupted)  # the average is not the weights

    fresh = Line()  # and it is the moments that make it so, not the weights alone
    forgetful = make(fresh, **settings)
    with torch.no_grad():
        fresh.weight.copy_(tensors["weight/weight"])
    assert not torch.equal(go_on(fresh, forgetful, range(4, 9))[0], uninterrupted[0])
