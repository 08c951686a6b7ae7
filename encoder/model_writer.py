"""Write a model directory that nearsense, sentence-transformers and transformers read. Needs no torch."""

import json
import os
import shutil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy

from encoder.config import ModelDirectoryError
from encoder.model_dir import POOLING_FLAGS, ModelSpec
from encoder.weights import WEIGHTS_FILE, Weights, encoder_shapes, head_shapes

Precision = Literal["float32", "float16"]
_MODULES = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]


def write_model_dir(destination: Path, spec: ModelSpec, weights: Weights, *, precision: Precision = "float32") -> None:
    """Write a directory, whole or not at all: beside its destination, flushed to disk, then renamed.

    Args:
        destination: Must not exist yet.
        spec: Everything but the weights.
        weights: By canonical name; with those of the language-model head the directory is a `BertForMaskedLM`.
        precision: How the weights are stored; read back they are float32.

    Raises:
        ModelDirectoryError: The destination exists, a tensor is missing, unknown or of another shape, or a weight is
            not finite in that precision.
    """
    if destination.exists():
        raise ModelDirectoryError(f"{destination} must not exist yet; remove it or choose another name")
    with_head = any(name.startswith("cls.") for name in weights)
    tensors = _stored_tensors(spec, weights, precision, with_head=with_head)
    partial = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        # Not save_file, which makes a file that only its owner may read.
        (partial / WEIGHTS_FILE).write_bytes(safetensors.numpy.save(tensors, metadata={"format": "pt"}))
        for name, content in _text_files(spec, with_head=with_head).items():
            file = partial / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(content, encoding="utf-8")
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    _flush(destination.parent)


def _stored_tensors(
    spec: ModelSpec, weights: Weights, precision: Precision, *, with_head: bool
) -> dict[str, np.ndarray]:
    shapes = encoder_shapes(spec.config) | (head_shapes(spec.config) if with_head else {})
    tensors = {}
    for name in sorted(shapes.keys() | weights.keys()):
        found = weights[name].shape if name in weights else None
        if found != shapes.get(name):
            raise ModelDirectoryError(f"{name} must have shape {shapes.get(name)} by the config, got {found}")
        with np.errstate(over="ignore"):  # reported below, by name
            tensor = np.ascontiguousarray(weights[name], dtype=precision)
        if not np.isfinite(tensor).all():
            raise ModelDirectoryError(f"{name} holds values that are not finite in {precision}")
        # transformers names the encoder's tensors with a prefix exactly when a head stands beside them.
        tensors["bert." + name if with_head and not name.startswith("cls.") else name] = tensor
    return tensors


def _text_files(spec: ModelSpec, *, with_head: bool) -> dict[str, str]:
    tokenizer = json.loads(spec.tokenizer_json)
    tokenizer_config = {
        "tokenizer_class": "BertTokenizer",
        **spec.tokenizer_config,
        "model_max_length": spec.max_length,
    }
    files: dict[str, Any] = {
        # Without a dtype sentence-transformers runs float16 weights in float16, which is very slow on a CPU.
        "config.json": {
            "architectures": ["BertForMaskedLM" if with_head else "BertModel"],
            "dtype": "float32",
            "tie_word_embeddings": True,
            **spec.config.to_dict(),
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config,
        "special_tokens_map.json": {
            name: token for name, token in tokenizer_config.items() if name.endswith("_token") and token is not None
        },
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
        vocab: dict[str, int] = tokenizer["model"]["vocab"]
        texts["vocab.txt"] = "".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__))
    return texts


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
