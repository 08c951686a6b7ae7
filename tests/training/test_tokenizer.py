"""A vocabulary learned from text: the same bytes each time, and others read it alike."""

import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from encoder import TextTokenizer
from training.config import RunError, Shape
from training.data import DataError
from training.tokenizer import SPECIAL_TOKENS, new_spec, train_tokenizer

SHAPE = Shape(hidden_size=14, num_layers=3, num_heads=2, intermediate_size=31, max_positions=23, dropout=0.1)
FABLES = Path(__file__).parent.parent.parent / "training" / "runs" / "tiny" / "fables.txt"
SIZE = 701
HARD = [
    "The Fox and the GRAPES!",
    "Café NAÏVE Ünïcode, “quoted” — dashed…",
    "日本語 and 한국어 and العربية",
    "🍕 emoji 👩‍👩‍👧",
    "un\u00adhyphen\u200bated \x00 control \t\n\r spaces \u3000",
    "[MASK] of [CLS] and [SEP], [UNK] [PAD]",
    "[mask] in small letters",
    "don't snake_case 3.14 a@b.c x²",
    "a" * 150,
    "",
    "   ",
    "ﬁ ǅ ß İ",
]


def fables() -> Iterator[str]:
    yield from FABLES.read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer(fables, out, vocab_size=SIZE)
    return out


@pytest.fixture(scope="module")
def tokenizer(learned: Path) -> Tokenizer:
    return Tokenizer.from_file(str(learned / "tokenizer.json"))


def test_the_files_are_the_same_bytes_in_every_process(learned: Path, tmp_path: Path) -> None:
    code = f"""
        import os
        from pathlib import Path
        from training.tokenizer import train_tokenizer
        texts = Path({str(FABLES)!r}).read_text(encoding="utf-8").splitlines()
        out = Path({str(tmp_path)!r}) / os.environ["NAME"]
        train_tokenizer(lambda: iter(texts), out, vocab_size={SIZE})
    """
    for name, settings in {
        "first": {"PYTHONHASHSEED": "1"},
        "second": {"PYTHONHASHSEED": "2"},
        "third": {"PYTHONHASHSEED": "2", "RAYON_NUM_THREADS": "1"},
    }.items():
        environment = os.environ | settings | {"NAME": name}
        subprocess.run([sys.executable, "-c", dedent(code)], check=True, env=environment, timeout=300)
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == sorted(
            path.name for path in learned.iterdir()
        )
        for path in learned.iterdir():
            assert (tmp_path / name / path.name).read_bytes() == path.read_bytes(), (name, path.name)


def test_the_vocabulary_has_the_size_asked_for_and_special_tokens_first(learned: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == SIZE
    assert [tokenizer.id_to_token(token_id) for token_id in range(5)] == list(SPECIAL_TOKENS)
    listed = (learned / "vocab.txt").read_text(encoding="utf-8").split("\n")
    assert listed == [*(tokenizer.id_to_token(token_id) for token_id in range(SIZE)), ""]
    assert {"the", "fox", "##ing", "a", "##a"} <= set(listed)


def test_every_word_is_in_small_letters_without_accents(tokenizer: Tokenizer) -> None:
    for token in tokenizer.get_vocab().keys() - set(SPECIAL_TOKENS):
        assert token == token.lower()
        assert not any(unicodedata.combining(char) for char in unicodedata.normalize("NFD", token))
    for text in ("The Fox", "THE FOX", "thé föx"):
        assert tokenizer.encode(text).tokens == ["[CLS]", "the", "fox", "[SEP]"]
    pair = tokenizer.encode("the", "fox")
    assert (pair.tokens, pair.type_ids) == (["[CLS]", "the", "[SEP]", "fox", "[SEP]"], [0, 0, 0, 1, 1])


def test_known_characters_are_never_unknown(tokenizer: Tokenizer) -> None:
    """Each also inside a word, however rare."""
    letters = "".join(sorted({char for char in "".join(fables()).lower() if "a" <= char <= "z"}))
    assert letters == "abcdefghijklmnopqrstuvwxyz"
    assert tokenizer.token_to_id("[UNK]") not in tokenizer.encode(f"{letters} {letters[::-1]} zzz").ids
    assert "[UNK]" in tokenizer.encode("日").tokens


@pytest.mark.parametrize("name", ["AutoTokenizer", "BertTokenizerFast"])
def test_transformers_gives_the_same_ids(name: str, learned: Path, tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = getattr(transformers, name).from_pretrained(learned, local_files_only=True)
    ours = TextTokenizer(new_spec(learned, SHAPE))
    for text in [*HARD, *fables()]:
        expected = tokenizer.encode(text).ids
        assert theirs(text)["input_ids"] == expected, text
        assert list(ours.encode([text], cut=False)[0].input_ids) == expected, text
    assert [theirs.pad_token, theirs.unk_token, theirs.cls_token, theirs.sep_token, theirs.mask_token] == list(
        SPECIAL_TOKENS
    )
    assert theirs.decode(tokenizer.encode("The fox runs.").ids, skip_special_tokens=True) in (
        "the fox runs.",
        "the fox runs .",
    )


def test_a_bert_tokenizer_made_of_the_vocabulary_alone_gives_the_same_ids(learned: Path, tokenizer: Tokenizer) -> None:
    """Which is what programs without tokenizer.json do."""
    from tokenizers import BertWordPieceTokenizer

    theirs = BertWordPieceTokenizer(str(learned / "vocab.txt"), lowercase=True)
    for text in [*HARD, *fables()]:
        assert theirs.encode(text).ids == tokenizer.encode(text).ids, text


@given(st.text(st.characters(codec="utf-8"), max_size=80))
def test_any_text_has_ids_of_the_vocabulary(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert (ids[0], ids[-1]) == (2, 3)
    assert all(0 <= token_id < SIZE for token_id in ids)


def test_rare_characters_do_not_fill_the_vocabulary(tmp_path: Path) -> None:
    """Of 1000 signs the 600 most frequent are known."""
    signs = [chr(0x4E00 + number) for number in range(1000)]
    texts = [" ".join(signs[:600]), " ".join(signs)]
    train_tokenizer(lambda: iter(texts), tmp_path / "tokenizer", vocab_size=1300)
    vocabulary = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json")).get_vocab()
    assert set(signs) & vocabulary.keys() == set(signs[:600])


def test_a_vocabulary_that_could_not_hold_the_characters_is_refused(tmp_path: Path) -> None:
    """5 special tokens, and a, b, c each at the beginning and inside of words: 11, and nothing learned yet."""
    with pytest.raises(RunError, match=r"vocab_size must be above 11 .*3 characters twice.*got 11"):
        train_tokenizer(lambda: ["abc cab"], tmp_path / "tokenizer", vocab_size=11)
    train_tokenizer(lambda: ["abc cab abc"], tmp_path / "tokenizer", vocab_size=12)
    assert len((tmp_path / "tokenizer" / "vocab.txt").read_text().split()) == 12


@pytest.mark.parametrize("texts", [[], [""], [" \n\t"]])
def test_no_text_is_no_vocabulary(texts: list[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must hold text to learn a vocabulary from, got none"):
        train_tokenizer(lambda: texts, tmp_path / "tokenizer", vocab_size=100)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(RunError, match="tokenizer must not exist yet; remove it or choose another --out"):
        train_tokenizer(fables, tmp_path / "tokenizer", vocab_size=SIZE)
    assert list((tmp_path / "tokenizer").iterdir()) == []


def test_texts_that_break_off_leave_nothing(tmp_path: Path) -> None:
    readings = 0

    def read() -> Iterator[str]:
        nonlocal readings
        readings += 1
        yield from fables()
        if readings == 2:
            raise DataError("the disk is gone")

    with pytest.raises(DataError, match="the disk is gone"):
        train_tokenizer(read, tmp_path / "tokenizer", vocab_size=SIZE)
    assert readings == 2
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------------------------------------------- new models


def test_a_new_model_has_the_words_of_its_tokenizer_and_the_sizes_of_its_run(learned: Path) -> None:
    spec = new_spec(learned, SHAPE)
    assert spec.config.vocab_size == SIZE
    assert (spec.config.hidden_size, spec.config.num_hidden_layers, spec.config.num_attention_heads) == (14, 3, 2)
    assert (spec.config.intermediate_size, spec.config.max_position_embeddings, spec.max_length) == (31, 23, 23)
    assert spec.config.hidden_dropout_prob == spec.config.attention_probs_dropout_prob == 0.1
    assert (spec.pooling, spec.normalize) == ("mean", True)
    assert spec.tokenizer_config == json.loads((learned / "tokenizer_config.json").read_text())


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("tokenizer.json", None, r"must hold a tokenizer \(No such file or directory\); make one with nearsense-train"),
        (
            "tokenizer_config.json",
            None,
            r"must hold a tokenizer \(No such file or directory\); make one with nearsense",
        ),
        ("tokenizer.json", b"{}", r"tokenizer\.json is not one that tokenizers can read"),
        ("tokenizer.json", b'{"version": "1.0", ', r"tokenizer\.json is not one that tokenizers can read"),
        ("tokenizer.json", b"\xff", "must hold a tokenizer whose files are JSON in UTF-8: 'utf-8' codec"),
        ("tokenizer_config.json", b"{", "must hold a tokenizer whose files are JSON in UTF-8: Expecting"),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(
    name: str, content: bytes | None, rule: str, learned: Path, tmp_path: Path
) -> None:
    for path in learned.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunError, match=rule) as refused:
        new_spec(tmp_path, SHAPE)
    assert str(tmp_path) in str(refused.value)
