"""Between model directories and torch modules, both ways.

The table below is the whole correspondence between transformers' names and ours.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
import torch
from torch import nn

from encoder.config import EncoderConfig, ModelDirectoryError
from encoder.files import whole_directory
from encoder.heads import LanguageModelHead
from encoder.model import Encoder
from encoder.model_dir import POOLING_FLAGS, ModelSpec, read_config
from encoder.weights import WEIGHTS_FILE, Weights, read_weights

Precision = Literal["float32", "float16"]
RECORD_FILE = "training.json"

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

_SPECIAL_TOKENS = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "bos_token", "eos_token")
_MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]


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
    destination: Path | str,
    spec: ModelSpec,
    encoder: Encoder,
    head: LanguageModelHead | None = None,
    *,
    precision: Precision = "float32",
    record: Mapping[str, Any] | None = None,
) -> None:
    """Write a directory that nearsense, sentence-transformers and transformers read, whole or not at all.

    Args:
        destination: Must not exist yet; written beside it, flushed to disk, then renamed.
        spec: Everything but the weights; its config must be the encoder's.
        encoder: Whose weights to store.
        head: Stored beside the encoder if given, tied to its word vectors, as a `BertForMaskedLM`.
        precision: How the weights are stored; read back they are float32.
        record: How the model was made, for training.json; nothing reads it but people.

    Raises:
        ModelDirectoryError: The destination exists, or a weight is not finite in that precision.
        ValueError: Another precision, or another config.
    """
    destination = Path(destination)
    if spec.config != encoder.config:
        raise ValueError(f"the spec must have the encoder's config, {encoder.config}, got {spec.config}")
    # transformers names the encoder's tensors with a prefix exactly when a head stands beside them.
    tensors = dict(_extract(encoder, _encoder_names(encoder.config), precision, prefix="bert." if head else ""))
    if head is not None:
        tensors |= _extract(head, _HEAD, precision)
    with whole_directory(destination) as partial:
        # Not save_file, which makes a file that only its owner may read.
        (partial / WEIGHTS_FILE).write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))
        (partial / "1_Pooling").mkdir()
        for name, content in _text_files(spec, with_head=head is not None).items():
            (partial / name).write_text(content, encoding="utf-8")
        if record is not None:
            text = json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
            (partial / RECORD_FILE).write_text(f"{text}\n", encoding="utf-8")


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


def _extract(
    module: nn.Module, names: dict[str, str], precision: Precision, *, prefix: str = ""
) -> Iterator[tuple[str, np.ndarray]]:
    if precision not in ("float32", "float16"):
        raise ValueError(f"precision must be float32 or float16, got {precision!r}")
    for ours, tensor in module.state_dict().items():
        name = prefix + _canonical(ours, names)
        with np.errstate(over="ignore"):  # reported below, by name
            array = np.ascontiguousarray(tensor.detach().float().cpu().numpy(), dtype=precision)
        if not np.isfinite(array).all():
            raise ModelDirectoryError(f"{name} holds values that are not finite in {precision}")
        yield name, array


def _text_files(spec: ModelSpec, *, with_head: bool) -> dict[str, str]:
    tokenizer = json.loads(spec.tokenizer_json)
    settings = {"tokenizer_class": "BertTokenizer", **spec.tokenizer_config, "model_max_length": spec.max_length}
    files: dict[str, Any] = {
        # Without a dtype sentence-transformers runs float16 weights in float16, which is very slow on a CPU.
        "config.json": {
            "architectures": ["BertForMaskedLM" if with_head else "BertModel"],
            "dtype": "float32",
            **spec.config.to_dict(),
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "special_tokens_map.json": {name: settings[name] for name in _SPECIAL_TOKENS if settings.get(name)},
        "modules.json": [
            # The oldest type paths are the most widely understood: every release of sentence-transformers reads them.
            {"idx": index, "name": str(index), "path": folder, "type": f"sentence_transformers.models.{kind}"}
            for index, (folder, kind) in enumerate(_MODULES[: 3 if spec.normalize else 2])
        ],
        "sentence_bert_config.json": {"max_seq_length": spec.max_length, "do_lower_case": spec.lowercase},
        "config_sentence_transformers.json": {
            "model_type": "SentenceTransformer",
            "prompts": dict(spec.prompts),
            "default_prompt_name": spec.default_prompt,
            "similarity_fn_name": "cosine",
        },
        "1_Pooling/config.json": {
            # sentence-transformers knows pooling_mode since 2.x and writes no flags since 5.4; TEI needs the flags; and
            # the newer embedding_dimension is an error in sentence-transformers 3.
            "word_embedding_dimension": spec.config.hidden_size,
            **{flag: mode == spec.pooling for flag, mode in POOLING_FLAGS.items()},
            "pooling_mode": spec.pooling,
            "include_prompt": True,
        },
    }
    texts = {name: json.dumps(content, indent=2, ensure_ascii=False) + "\n" for name, content in files.items()}
    if tokenizer["model"].get("type") == "WordPiece":
        tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
        if [token_id for _, token_id in tokens] == list(range(len(tokens))):  # a line has no other number than its own
            texts["vocab.txt"] = "".join(f"{token}\n" for token, _ in tokens)
    return texts
