"""Between model directories and torch modules, both ways.

The table below is the whole correspondence between transformers' names and ours.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from encoder.config import EncoderConfig
from encoder.heads import LanguageModelHead
from encoder.model import Encoder
from encoder.model_dir import ModelSpec, read_config
from encoder.model_writer import Precision, write_model_dir
from encoder.weights import Weights, read_weights

_EMBEDDINGS = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
}
_LAYER = {
    "attention.query": "attention.self.query",
    "attention.key": "attention.self.key",
    "attention.value": "attention.self.value",
    "attention.output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "feed_forward.up": "intermediate.dense",
    "feed_forward.down": "output.dense",
    "feed_forward_norm": "output.LayerNorm",
}
_HEAD = {"transform": "cls.predictions.transform.dense", "norm": "cls.predictions.transform.LayerNorm"}


def load_encoder(path: Path) -> Encoder:
    """Load the encoder of any Hugging Face `BertModel` or `BertForMaskedLM` directory, in evaluation mode, as float32.

    Raises:
        ModelDirectoryError: The directory is not BERT mathematics or does not hold exactly the tensors it should.
    """
    config = read_config(path)
    return encoder_from_weights(config, read_weights(path, config))


def load_masked_language_model(path: Path) -> tuple[Encoder, LanguageModelHead]:
    """Load the encoder and the masked-token head of a `BertForMaskedLM` directory, in evaluation mode, as float32.

    Raises:
        ModelDirectoryError: As `load_encoder`; or there is no head, or its decoder is not tied to the word vectors.
    """
    config = read_config(path)
    weights = read_weights(path, config, head=True)
    with torch.device("meta"):
        head = LanguageModelHead(config)
    _assign(head, _HEAD, weights)
    return encoder_from_weights(config, weights), head


def encoder_from_weights(config: EncoderConfig, weights: Weights) -> Encoder:
    """Build an encoder around weights that `read_weights` checked, in evaluation mode."""
    with torch.device("meta"):  # draws no random weights only to overwrite them
        encoder = Encoder(config)
    _assign(encoder, _encoder_names(config), weights)
    return encoder


def save(
    destination: Path,
    spec: ModelSpec,
    encoder: Encoder,
    head: LanguageModelHead | None = None,
    *,
    precision: Precision = "float32",
) -> None:
    """Write the modules as a model directory; arguments, promises and errors are those of `write_model_dir`.

    A head, if given, is stored beside the encoder, tied to its word vectors.
    """
    weights = dict(_extract(encoder, _encoder_names(encoder.config)))
    if head is not None:
        weights |= _extract(head, _HEAD)
    write_model_dir(destination, spec, weights, precision=precision)


def _encoder_names(config: EncoderConfig) -> dict[str, str]:
    """Map the module paths of an `Encoder` to canonical names."""
    layers = {
        f"layers.{index}.{ours}": f"encoder.layer.{index}.{theirs}"
        for index in range(config.num_hidden_layers)
        for ours, theirs in _LAYER.items()
    }
    return _EMBEDDINGS | layers


def _canonical(parameter: str, names: dict[str, str]) -> str:
    module, _, kind = parameter.rpartition(".")
    return f"{names[module]}.{kind}" if module else f"cls.predictions.{kind}"


def _assign(module: nn.Module, names: dict[str, str], weights: Weights) -> None:
    state = {ours: torch.from_numpy(weights[_canonical(ours, names)]) for ours in module.state_dict()}
    module.load_state_dict(state, assign=True)
    module.requires_grad_(True).eval()


def _extract(module: nn.Module, names: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    for ours, tensor in module.state_dict().items():
        yield _canonical(ours, names), tensor.detach().float().cpu().numpy()
