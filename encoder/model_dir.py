"""Model directories on disk: read one, and name it by its fingerprint. Needs no torch.

The layout is sentence-transformers' own. Nothing is guessed: what is missing or contradictory is an error.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from encoder.config import EncoderConfig, ModelDirectoryError
from encoder.weights import Weights, encoder_shapes

Pooling = Literal["mean", "cls"]

_MODULES = re.compile(r"^(?:sentence_transformers\.(?!sparse_encoder|cross_encoder)(?:[\w.]+\.)?(\w+)|.*)$", re.DOTALL)
_WITHOUT_INFLUENCE = ("hidden_dropout_prob", "attention_probs_dropout_prob", "initializer_range", "pad_token_id")
# What sentence-transformers writes into sentence_bert_config.json by itself; anything else would change the model.
_SETTINGS = {"max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name"}
_OTHER_SETTINGS = re.compile(r"sentence_(?!bert_)\w+_config\.json|adapter_config\.json")
# What transformers' BertTokenizer builds its normaliser from: key in tokenizer.json, in tokenizer_config.json, default.
_NORMALIZER = (
    ("lowercase", "do_lower_case", True),
    ("strip_accents", "strip_accents", None),
    ("handle_chinese_chars", "tokenize_chinese_chars", True),
)
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All of a sentence encoder but its weights.

    Raises:
        ModelDirectoryError: `max_length` does not fit the table of positions, or the default prompt does not exist.
    """

    config: EncoderConfig
    pooling: Pooling
    normalize: bool
    """Whether the directory ends in a Normalize module."""
    max_length: int
    """Longest text in tokens, special tokens included."""
    tokenizer_json: str
    """For `tokenizers.Tokenizer.from_str`; neither truncates nor pads."""
    lowercase: bool = False
    """Whether text is lower-cased before the tokenizer's own normalisation."""
    tokenizer_config: Mapping[str, Any] = field(default_factory=dict)
    """What transformers wants to know beside `tokenizer_json`; changes nothing here."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Text put before the input, by name."""
    default_prompt: str | None = None
    """Name of the prompt that is used when none is asked for."""

    def __post_init__(self) -> None:
        limit = self.config.max_position_embeddings
        if not 3 <= self.max_length <= limit:
            raise ModelDirectoryError(f"max_seq_length must be in [3, {limit} positions], got {self.max_length}")
        if self.default_prompt is not None and self.default_prompt not in self.prompts:
            raise ModelDirectoryError(f"default_prompt_name must be in {[*self.prompts]}, got {self.default_prompt!r}")


def read_config(path: Path) -> EncoderConfig:
    """Read `config.json` of any BERT directory.

    Raises:
        ModelDirectoryError: No such file, or not BERT mathematics.
    """
    return EncoderConfig.from_dict(_read_json(path / "config.json"))


def read_spec(path: Path) -> ModelSpec:
    """Read a sentence-transformers directory with a BERT encoder.

    Raises:
        ModelDirectoryError: A file is missing or contradictory, or asks for something that is not computed here.
    """
    config = read_config(path)
    pooling_path, normalize = _read_modules(path)
    settings = _read_settings(path)
    tokenizer = _read_json(path / "tokenizer.json")
    tokenizer_config = _read_json(path / "tokenizer_config.json", optional=True)
    _check_tokenizer(tokenizer, tokenizer_config)
    prompts, default_prompt = _read_prompts(path / "config_sentence_transformers.json")
    return ModelSpec(
        config=config,
        pooling=_read_pooling(path / pooling_path / "config.json", config),
        normalize=normalize,
        max_length=_read_max_length(settings, tokenizer_config, config),
        # Many directories ship with truncation and padding to some length baked in; both are ours to decide.
        tokenizer_json=json.dumps(tokenizer | {"truncation": None, "padding": None}, ensure_ascii=False),
        lowercase=settings.get("do_lower_case", False),
        tokenizer_config=tokenizer_config,
        prompts=prompts,
        default_prompt=default_prompt,
    )


def fingerprint(spec: ModelSpec, weights: Weights) -> str:
    """Give the SHA-256 of all that decides an embedding, in hexadecimal.

    Key order, precision on disk (float16 weights and their float32 copies are one model), dropouts, padding, empty
    prompts, and a language-model head make no difference.
    """
    config = spec.config.to_dict()
    for without_influence in _WITHOUT_INFLUENCE:
        del config[without_influence]
    described = {
        "config": config,
        "pooling": spec.pooling,
        "normalize": spec.normalize,
        "max_length": spec.max_length,
        "tokenizer": json.loads(spec.tokenizer_json),
        "lowercase": spec.lowercase,
        "prompts": {name: prompt for name, prompt in spec.prompts.items() if prompt},
        "default_prompt": spec.prompts[spec.default_prompt] if spec.default_prompt is not None else "",
    }
    digest = hashlib.sha256(b"nearsense model 1\n")
    digest.update(json.dumps(described, sort_keys=True).encode())
    for name in sorted(encoder_shapes(spec.config)):
        array = np.ascontiguousarray(weights[name], dtype="<f4")
        digest.update(f"\n{name} {array.shape}\n".encode())
        digest.update(array.data)
    return digest.hexdigest()


def default_model_dir() -> Path:
    """Give the model that comes with this package, and is used when none is named."""
    return Path(__file__).parent / "pretrained" / "nearsense-en-small"


def _read_json(file: Path, *, optional: bool = False) -> Any:
    if optional and not os.path.lexists(file):  # a link to nowhere is damage, not absence
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelDirectoryError(f"a model directory must hold {file.name}; {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelDirectoryError(f"{file} is not JSON in UTF-8: {error}") from error
    expected = list if file.name == "modules.json" else dict
    if not isinstance(content, expected):
        raise ModelDirectoryError(f"{file} must hold a JSON {expected.__name__}, got {type(content).__name__}")
    return content


def _read_modules(path: Path) -> tuple[str, bool]:
    """Give the folder of the pooling module and whether a Normalize module follows."""
    if not (path / "modules.json").exists():
        raise ModelDirectoryError(f"{path} has no modules.json, so nothing says how it pools; save it with its pooling")
    modules = _read_json(path / "modules.json")
    try:
        kinds = [_MODULES.sub(r"\1", module["type"]) for module in modules]
        folders = [Path(module["path"]) for module in modules]
    except (TypeError, KeyError, ValueError) as error:
        raise ModelDirectoryError(f"each entry of {path / 'modules.json'} must have a type and a path") from error
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise ModelDirectoryError(f"{path} must be Transformer, Pooling and optionally Normalize, got {kinds}")
    if folders[0] != Path() or len(folders[1].parts) != 1 or folders[1] == Path(".."):
        raise ModelDirectoryError(
            f"the modules must lie in {path} itself and a folder in it, got {folders[0]}, {folders[1]}"
        )
    return folders[1].name, len(kinds) == 3


def _read_pooling(file: Path, config: EncoderConfig) -> Pooling:
    raw = _read_json(file)
    flagged = [mode for flag, mode in POOLING_FLAGS.items() if raw.get(flag)]
    named = raw.get("pooling_mode", flagged)
    named = named if isinstance(named, list) else [named]
    if named != flagged and not POOLING_FLAGS.keys().isdisjoint(raw):
        raise ModelDirectoryError(f"{file} contradicts itself: pooling_mode says {named}, the flags say {flagged}")
    if named not in (["mean"], ["cls"]):
        raise ModelDirectoryError(f"the pooling must be mean or cls, got {named} in {file}")
    if raw.get("include_prompt", True) is not True:
        raise ModelDirectoryError(f"include_prompt must be true, got {raw['include_prompt']!r} in {file}")
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if raw.get(key, config.hidden_size) != config.hidden_size:
            raise ModelDirectoryError(f"{key} must be hidden_size ({config.hidden_size}), got {raw[key]!r} in {file}")
    return "mean" if named == ["mean"] else "cls"


def _read_max_length(settings: Mapping[str, Any], tokenizer_config: Mapping[str, Any], config: EncoderConfig) -> int:
    stated = settings.get("max_seq_length")
    if stated is None:  # since 5.4 sentence-transformers states it in the tokenizer's file, where 10³⁰ means no limit
        stated = tokenizer_config.get("model_max_length", config.max_position_embeddings)
        if isinstance(stated, int | float) and stated > config.max_position_embeddings:
            stated = config.max_position_embeddings
    if type(stated) is not int:
        raise ModelDirectoryError(f"max_seq_length must be a whole number, got {stated!r}")
    return stated


def _read_prompts(file: Path) -> tuple[dict[str, str], str | None]:
    described = _read_json(file, optional=True)
    if described.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise ModelDirectoryError(f"model_type must be SentenceTransformer, got {described['model_type']!r} in {file}")
    prompts, default = described.get("prompts") or {}, described.get("default_prompt_name")
    names = [] if default is None else [default]
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in [*prompts.values(), *names]):
        raise ModelDirectoryError(f"prompts must map names to texts and default_prompt_name be a name in {file}")
    return prompts, default


def _read_settings(path: Path) -> Any:
    others = [file.name for file in path.iterdir() if _OTHER_SETTINGS.fullmatch(file.name)]
    settings = _read_json(path / "sentence_bert_config.json", optional=True)
    unknown = sorted({*others, *(key for key, value in settings.items() if value and key not in _SETTINGS)})
    if unknown or settings.get("transformer_task", "feature-extraction") != "feature-extraction":
        raise ModelDirectoryError(f"{path} asks for what is not computed here: {', '.join(unknown) or 'another task'}")
    if type(settings.get("do_lower_case", False)) is not bool:
        raise ModelDirectoryError(f"do_lower_case must be true or false, got {settings['do_lower_case']!r}")
    return settings


def _check_tokenizer(tokenizer: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> None:
    """Refuse settings of transformers' that would change what tokenizer.json says."""
    direction = (tokenizer.get("truncation") or {}).get("direction", "Right")
    if direction != "Right" or tokenizer_config.get("truncation_side", "right") != "right":
        raise ModelDirectoryError("truncation must be on the right; save the tokenizer with truncation_side='right'")
    if tokenizer_config.get("split_special_tokens"):
        raise ModelDirectoryError("split_special_tokens must be false in tokenizer_config.json")
    if tokenizer_config.get("tokenizer_class", "BertTokenizer") not in ("BertTokenizer", "BertTokenizerFast"):
        return  # only this one is built from the settings
    normalizer = tokenizer.get("normalizer") or {}
    for ours, theirs, default in _NORMALIZER:
        if normalizer.get(ours) != tokenizer_config.get(theirs, default):
            said = f"{normalizer.get(ours)} in tokenizer.json, {tokenizer_config.get(theirs, default)} beside it"
            raise ModelDirectoryError(f"{theirs} contradicts itself: {said}; keep what the model was trained with")
