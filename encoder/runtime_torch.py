"""The reference runtime: the torch modules of this package, on a CPU or a GPU."""

from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from encoder.checkpoint import encoder_from_weights
from encoder.model_dir import ModelSpec
from encoder.pooling import cls_pool, mean_pool
from encoder.tokenizer import TokenBatch
from encoder.weights import Weights

Precision = Literal["float32", "bfloat16"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchRuntime:
    """Runs an encoder with torch; arguments as in `SentenceEncoder.load`. Any number of threads may share one.

    Pooling is float32 in any case.

    Raises:
        ValueError: Another precision.
        RuntimeError: torch does not know the device or cannot reach it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        precision: Precision = "float32",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        if precision not in _DTYPES:
            raise ValueError(f"precision must be one of {', '.join(_DTYPES)}, got {precision!r}")
        if threads is not None:
            torch.set_num_threads(threads)
        self._pooling = spec.pooling
        self._device = torch.device(device)
        self._encoder = encoder_from_weights(spec.config, weights).to(self._device, _DTYPES[precision])
        if self._device.type == "cpu" and precision == "float32" and torch.backends.mkldnn.is_available():
            _use_onednn(self._encoder)

    def embed(self, batch: TokenBatch) -> Float32[np.ndarray, "batch hidden"]:
        """Give one vector per sentence, not normalised."""
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            hidden_states = self._run(batch)
            if self._pooling == "cls":
                return cls_pool(hidden_states).cpu().numpy()
            return mean_pool(hidden_states, self._tensor(batch.attention_mask)).cpu().numpy()

    def embed_tokens(self, batch: TokenBatch) -> Float32[np.ndarray, "batch seq hidden"]:
        """Give one vector per token; what stands at padding is meaningless."""
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            return self._run(batch).cpu().numpy()

    def _run(self, batch: TokenBatch) -> Float[Tensor, "batch seq hidden"]:
        # Attention is faster without a mask, and batches of one length need none.
        mask = None if batch.attention_mask.all() else self._tensor(batch.attention_mask)
        hidden_states: Tensor = self._encoder(self._tensor(batch.input_ids), mask)
        return hidden_states.float()

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _OneDnnLinear(nn.Module):
    """A linear map through oneDNN: torch's own goes to MKL, which stops at AVX2 unless Intel made the processor.

    oneDNN uses what the processor has; benchmarks/README.md tells what that gave.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._weight = linear.weight.detach().to_mkldnn()
        self._bias = linear.bias.detach().to_mkldnn()

    def forward(self, inputs: Float[Tensor, "*tokens inputs"]) -> Float[Tensor, "*tokens outputs"]:
        return functional.linear(inputs.to_mkldnn(), self._weight, self._bias).to_dense()


def _use_onednn(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, _OneDnnLinear(child))
        else:
            _use_onednn(child)
