"""The weights of a model directory as NumPy arrays, under one canonical set of names. Needs no torch.

Canonical names are those of transformers' `BertModel` without a prefix; the language-model head keeps its own
(`cls.predictions.…`). Every runtime reads the weights here, so every runtime is equally strict.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import safetensors
from jaxtyping import Float32

from encoder.config import EncoderConfig, ModelDirectoryError

WEIGHTS_FILE = "model.safetensors"
Weights = Mapping[str, Float32[np.ndarray, "..."]]

# Present in BERT checkpoints and no part of a sentence encoder: the pooler and the next-sentence head were trained for
# another task, position_ids is a constant, and the language-model head is read when it is asked for.
_PASSED_OVER = ("pooler.", "cls.seq_relationship.", "cls.predictions.", "embeddings.position_ids")
_TIED = {
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_DTYPES = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


def encoder_shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Give the name and shape of every tensor of an encoder."""
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (config.vocab_size, hidden),
        "embeddings.position_embeddings.weight": (config.max_position_embeddings, hidden),
        "embeddings.token_type_embeddings.weight": (config.type_vocab_size, hidden),
        **_norm("embeddings.LayerNorm", hidden),
    }
    for index in range(config.num_hidden_layers):
        layer = f"encoder.layer.{index}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{layer}.attention.{name}", hidden, hidden)
        shapes |= _norm(f"{layer}.attention.output.LayerNorm", hidden)
        shapes |= _linear(f"{layer}.intermediate.dense", hidden, wide)
        shapes |= _linear(f"{layer}.output.dense", wide, hidden)
        shapes |= _norm(f"{layer}.output.LayerNorm", hidden)
    return shapes


def head_shapes(config: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Give the name and shape of every tensor of the language-model head, less the tied word vectors."""
    return {
        "cls.predictions.bias": (config.vocab_size,),
        **_linear("cls.predictions.transform.dense", config.hidden_size, config.hidden_size),
        **_norm("cls.predictions.transform.LayerNorm", config.hidden_size),
    }


def read_weights(path: Path, config: EncoderConfig, *, head: bool = False) -> dict[str, Float32[np.ndarray, "..."]]:
    """Read the weights of a directory, with those of the language-model head if asked, as float32.

    Raises:
        ModelDirectoryError: No such file; a tensor is missing, unexpected, of another shape, not floating point or not
            finite; or the head's decoder is not tied to the word vectors. The message names the tensor.
    """
    expected = encoder_shapes(config) | (head_shapes(config) if head else {})
    tied = {name: expected[source] for name, source in _TIED.items()} if head else {}
    weights: dict[str, np.ndarray] = {}
    for stored_name, shape, dtype, data in _stored_tensors(path):
        name = _canonical(stored_name)
        required = (expected | tied).get(name)
        if required is not None:
            if name in weights:
                raise ModelDirectoryError(f"{path / WEIGHTS_FILE} holds {name} twice, the second as {stored_name}")
            if shape != required:
                raise ModelDirectoryError(f"{stored_name} must have shape {required} by the config, got {shape}")
            weights[name] = _as_float32(stored_name, shape, dtype, data)
        elif not name.startswith(_PASSED_OVER):
            raise ModelDirectoryError(f"{path / WEIGHTS_FILE} holds {stored_name}, no part of the model in config.json")
    if missing := sorted(expected.keys() - weights.keys()):
        raise ModelDirectoryError(f"{path / WEIGHTS_FILE} lacks {len(missing)} tensors, the first of them {missing[0]}")
    for name in tied.keys() & weights.keys():
        if not np.array_equal(weights.pop(name), weights[_TIED[name]]):
            raise ModelDirectoryError(f"{name} must be tied to {_TIED[name]}, and differs from it")
    return weights


def _stored_tensors(path: Path) -> Iterator[tuple[str, tuple[int, ...], str, bytes | bytearray]]:
    file = path / WEIGHTS_FILE
    if not file.is_file():
        found = sorted(other.name for other in path.glob("*model*"))
        raise ModelDirectoryError(
            f"{file} is missing (found: {found}); pickled and split weights are not read, transformers can convert them"
        )
    try:
        # Not safetensors.numpy: it cannot read bfloat16.
        tensors = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelDirectoryError(f"{file} is not a complete, readable safetensors file: {error}") from error
    for name, tensor in tensors:
        yield name, tuple(tensor["shape"]), tensor["dtype"], tensor["data"]


def _canonical(name: str) -> str:
    name = name.removeprefix("bert.")
    for old, new in _OLD_NAMES.items():
        name = name.replace(old, new)
    return name


def _as_float32(name: str, shape: tuple[int, ...], dtype: str, data: bytes | bytearray) -> Float32[np.ndarray, "..."]:
    if dtype == "BF16":  # the upper half of a float32
        array = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    elif dtype in _DTYPES:
        array = np.frombuffer(data, _DTYPES[dtype]).astype(np.float32)
    else:
        raise ModelDirectoryError(f"{name} must be stored as F16, BF16, F32 or F64, got {dtype}")
    if not np.isfinite(array).all():
        raise ModelDirectoryError(f"{name} holds {np.count_nonzero(~np.isfinite(array))} values that are not finite")
    return array.reshape(shape)


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}
