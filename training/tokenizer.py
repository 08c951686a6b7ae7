"""A vocabulary of word pieces, learned from text; the same bytes each time."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from encoder.config import EncoderConfig
from encoder.files import whole_directory
from encoder.model_dir import ModelSpec
from training.config import RunError, Shape
from training.data import DataError

_UNKNOWN = "[UNK]"
SPECIAL_TOKENS = ("[PAD]", _UNKNOWN, "[CLS]", "[SEP]", "[MASK]")
_MOST_CHARACTERS = 600
"""Rarer ones are unknown: a vocabulary spent on single signs has fewer words."""


def train_tokenizer(read: Callable[[], Iterable[str]], out: Path, *, vocab_size: int) -> None:
    """Learn a lower-cased WordPiece vocabulary and write tokenizer.json, tokenizer_config.json and vocab.txt.

    Args:
        read: Opens the texts; called twice, and no more than a few texts are in memory at once.
        out: The directory; must not exist yet.
        vocab_size: Entries, the five special ones included.

    Raises:
        RunError: `out` exists, or the vocabulary would not hold the characters.
        DataError: The texts hold nothing.

    Source: Wu et al. 2016, arXiv:1609.08144, as BERT uses it.
    """
    if out.exists():
        raise RunError(f"{out} must not exist yet; remove it or choose another --out")
    characters = _characters(read())
    if not characters:
        raise DataError("the corpora must hold text to learn a vocabulary from, got none")
    if vocab_size <= len(SPECIAL_TOKENS) + 2 * len(characters):
        raise RunError(
            f"vocab_size must be above {len(SPECIAL_TOKENS) + 2 * len(characters)} (special tokens, and each of "
            f"{len(characters)} characters twice: at the beginning and inside of words), got {vocab_size}"
        )
    tokenizer = _learn(read(), characters, vocab_size)
    settings = {
        "tokenizer_class": "BertTokenizer",
        "do_lower_case": True,
        "strip_accents": None,
        "tokenize_chinese_chars": True,
        **{f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")},
    }
    ids = tokenizer.get_vocab()
    with whole_directory(out) as partial:
        (partial / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        (partial / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        (partial / "vocab.txt").write_text(
            "".join(f"{token}\n" for token in sorted(ids, key=ids.__getitem__)), encoding="utf-8"
        )


def _learn(texts: Iterable[str], characters: Sequence[str], vocab_size: int) -> Tokenizer:
    # tokenizers numbers the inner characters as a hash map yields them, another order each time, and ties between
    # merges are broken by number. Given in front, as special tokens, they have a fixed one.
    learner = _tokenizer(models.WordPiece(unk_token=_UNKNOWN))
    inner = [f"##{char}" for char in characters if len(learner.pre_tokenizer.pre_tokenize_str(f"a{char}")) == 1]
    learner.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[*SPECIAL_TOKENS, *inner],
            initial_alphabet=list(characters),
            limit_alphabet=len(characters),
            show_progress=False,
        ),
    )
    ids = learner.get_vocab()
    vocabulary = {token: index for index, token in enumerate(sorted(ids, key=ids.__getitem__))}
    tokenizer = _tokenizer(models.WordPiece(vocabulary, unk_token=_UNKNOWN))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocabulary[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def new_spec(tokenizer_dir: Path, shape: Shape) -> ModelSpec:
    """Describe a new model around a tokenizer.

    Raises:
        RunError: The directory holds no tokenizer, or one that cannot be read.
    """
    try:
        tokenizer_json = (tokenizer_dir / "tokenizer.json").read_text(encoding="utf-8")
        settings = json.loads((tokenizer_dir / "tokenizer_config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise RunError(
            f"{tokenizer_dir} must hold a tokenizer ({error.strerror}); make one with nearsense-train tokenizer"
        ) from error
    except ValueError as error:
        raise RunError(f"{tokenizer_dir} must hold a tokenizer whose files are JSON in UTF-8: {error}") from error
    try:
        vocab_size = Tokenizer.from_str(tokenizer_json).get_vocab_size()
    except Exception as error:  # tokenizers raises no narrower class
        raise RunError(f"{tokenizer_dir / 'tokenizer.json'} is not one that tokenizers can read: {error}") from error
    config = EncoderConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
    )
    return ModelSpec(
        config=config,
        pooling="mean",
        normalize=True,
        max_length=shape.max_positions,
        tokenizer_json=tokenizer_json,
        tokenizer_config=settings,
    )


def _characters(texts: Iterable[str]) -> list[str]:
    counted = Counter[str]()
    normalizer = normalizers.BertNormalizer(lowercase=True)
    for text in texts:
        counted.update(normalizer.normalize_str(text))
    frequent = sorted((char for char in counted if not char.isspace()), key=lambda char: (-counted[char], char))
    return sorted(frequent[:_MOST_CHARACTERS])


def _tokenizer(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer
