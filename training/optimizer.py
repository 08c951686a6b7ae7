"""AdamW with warm-up and cosine, clipping, and a moving average of the weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from training.config import Optimizer


class Stepper:
    """Steps the weights of a module.

    Args:
        module: What is trained.
        settings: Of the optimiser.
        steps: Length of the schedule.

    Source: Loshchilov & Hutter 2017, arXiv:1711.05101; averaging: Polyak & Juditsky 1992.
    """

    def __init__(self, module: nn.Module, settings: Optimizer, *, steps: int) -> None:
        self._settings, self._steps = settings, steps
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        # Norms, biases and rows of tables are no matrices: to pull them to 0 regularises nothing.
        tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
        decayed = [p for p in named.values() if p.ndim > 1 and id(p) not in tables]
        others = [p for p in named.values() if p.ndim <= 1 or id(p) in tables]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self.parameters = named
        self._optimizer = torch.optim.AdamW(
            groups, lr=torch.tensor(settings.rate), betas=settings.betas, fused=True, eps=1e-8
        )
        self._average = {name: p.detach().clone() for name, p in named.items()} if settings.average else {}

    def step(self, number: int) -> Tensor:
        """Clip the gradients, step, forget them, and give the norm that they had.

        Args:
            number: Of the step, from 0.
        """
        parameters = list(self.parameters.values())
        norm = nn.utils.clip_grad_norm_(parameters, self._settings.clip, foreach=True)
        for group in self._optimizer.param_groups:
            group["lr"].fill_(self.rate(number))
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._average:
            # A young average forgets fast, or it would still hold the random weights.
            decay = min(self._settings.average, (1 + number) / (10 + number))
            torch._foreach_lerp_(list(self._average.values()), [p.detach() for p in parameters], 1 - decay)
        return norm

    def rate(self, number: int) -> float:
        """Give the learning rate of a step: a linear rise, then a cosine down to `final_rate` of it."""
        settings = self._settings
        if number < settings.warmup_steps:
            return settings.rate * (number + 1) / settings.warmup_steps
        done = (number - settings.warmup_steps) / max(self._steps - settings.warmup_steps, 1)
        return settings.rate * (settings.final_rate + (1 - settings.final_rate) * (1 + math.cos(math.pi * done)) / 2)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Let the module have the averaged weights, if any, within the block."""
        if not self._average:
            yield
            return
        last = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._copy(self._average)
        try:
            yield
        finally:
            self._copy(last)

    def take_average(self) -> None:
        """Give the module the averaged weights, if any, for good."""
        if self._average:
            self._copy(self._average)

    def state(self) -> dict[str, Tensor]:
        """Give all that a restart needs, by flat names."""
        tensors = {f"weight/{name}": parameter.detach() for name, parameter in self.parameters.items()}
        tensors |= {f"average/{name}": tensor for name, tensor in self._average.items()}
        for name, parameter in self.parameters.items():
            tensors |= {f"{key}/{name}": tensor for key, tensor in self._optimizer.state[parameter].items()}
        return tensors

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `state` gave."""
        self._copy({name: tensors[f"weight/{name}"] for name in self.parameters})
        for name, tensor in self._average.items():
            tensor.copy_(tensors[f"average/{name}"])
        for name, parameter in self.parameters.items():
            moments = ("step", "exp_avg", "exp_avg_sq")
            # "step" lives where the optimiser wants it, the moments beside the weights.
            self._optimizer.state[parameter] = {
                key: tensors[f"{key}/{name}"].to(parameter.device).clone() for key in moments
            }

    def _copy(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(tensors[name])
