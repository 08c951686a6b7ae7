"""From text to token ids: what comes of every kind of text, and what is reported."""

import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from encoder import ModelDirectoryError, ModelSpec, SentenceEncoder, TextTokenizer, TokenizedText
from encoder.model_dir import read_spec
from encoder.tokenizer import TokenBatch

CLS, SEP, UNK = 101, 102, 100


@pytest.fixture(scope="module")
def tokenizer(minilm: SentenceEncoder) -> TextTokenizer:
    return minilm.tokenizer


@pytest.fixture(scope="module")
def reference(minilm_dir: Path) -> Tokenizer:
    reference = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    reference.no_padding()
    reference.enable_truncation(256)
    return reference


def one(tokenizer: TextTokenizer, text: str) -> TokenizedText:
    return tokenizer.encode([text], spans=True)[0]


def test_baked_in_truncation_and_padding_are_off(minilm_dir: Path, tokenizer: TextTokenizer) -> None:
    baked = json.loads((minilm_dir / "tokenizer.json").read_text())
    assert baked["truncation"]["max_length"] == baked["padding"]["strategy"]["Fixed"] == 128
    assert len(one(tokenizer, "word " * 200).input_ids) == 202
    assert one(tokenizer, "word").input_ids == [CLS, 2773, SEP]


def test_truncation_keeps_the_beginning_and_the_last_special_token(tokenizer: TextTokenizer) -> None:
    text = one(tokenizer, "word " * 300)
    assert text.input_ids == [CLS, *[2773] * 254, SEP]
    assert text.total_tokens == 302
    assert text.truncated
    assert text.spans[0] == text.spans[-1] == (0, 0)
    assert text.spans[254] == (253 * 5, 253 * 5 + 4)
    exact = one(tokenizer, "word " * 254)
    assert not exact.truncated
    assert len(exact.input_ids) == 256


@given(st.text(st.characters(codec="utf-8"), max_size=2000))
def test_equals_the_reference_on_any_text(tokenizer: TextTokenizer, reference: Tokenizer, text: str) -> None:
    assert one(tokenizer, text).input_ids == reference.encode(text).ids


def test_a_prefix_of_equal_tokens_is_told_apart_by_the_report(tokenizer: TextTokenizer) -> None:
    first, second = tokenizer.encode(["word " * 300 + "one", "word " * 300 + "two"])
    assert first.input_ids == second.input_ids
    assert first.truncated
    assert second.truncated


@pytest.mark.parametrize("text", ["", " ", "\t\n  \r\n", "\0", "\x00\x00 \x01", "\u200b", "\ufeff"])
def test_what_holds_no_text_is_its_special_tokens(tokenizer: TextTokenizer, text: str) -> None:
    result = one(tokenizer, text)
    assert result.input_ids == [CLS, SEP]
    assert result.total_tokens == 2
    assert result.unknown_share == 0
    assert not result.truncated


def test_one_text_is_no_list_of_texts(tokenizer: TextTokenizer) -> None:
    with pytest.raises(TypeError, match="put it into a list"):
        tokenizer.encode("hello")
    assert tokenizer.encode([]) == []


def test_nul_counts_as_not_there(tokenizer: TextTokenizer) -> None:
    assert one(tokenizer, "piz\0za").input_ids == one(tokenizer, "pizza").input_ids
    assert one(tokenizer, "piz\0za").spans[1] == (0, 6)


def test_a_megabyte_without_a_space_is_one_unknown_token(tokenizer: TextTokenizer) -> None:
    result = one(tokenizer, "a" * 2**20)
    assert result.input_ids == [CLS, UNK, SEP]
    assert result.unknown_share == 1
    assert result.spans[1] == (0, 2**20)


def test_a_megabyte_of_words_is_counted_whole(tokenizer: TextTokenizer) -> None:
    result = one(tokenizer, "pizza " * 2**18)
    assert len(result.input_ids) == 256
    assert result.total_tokens == 2**18 + 2


def test_every_unicode_plane_is_taken_and_the_unknown_counted(tokenizer: TextTokenizer) -> None:
    for plane in range(17):
        start = plane << 16
        characters = [chr(code) for code in range(start, start + 2**16) if not 0xD800 <= code < 0xE000]
        # 37 is prime to the block sizes of Unicode, so each plane is sampled throughout.
        for result in tokenizer.encode([" ".join(characters[offset::3700]) for offset in range(0, 3700, 37)]):
            assert result.input_ids[0] == CLS
            assert result.input_ids[-1] == SEP
            assert 0 <= result.unknown_share <= 1
    assert one(tokenizer, "pizza \U0002f00f").unknown_share == 0.5


def test_ids_are_decoded(tokenizer: TextTokenizer) -> None:
    assert tokenizer.decode([CLS, 7861, 8270, 4667, 2015, SEP]) == "embeddings"
    assert tokenizer.decode([CLS, 10733, SEP], skip_special_tokens=False) == "[CLS] pizza [SEP]"
    assert tokenizer.decode([]) == ""
    for unknown in (-1, 30522, 2**32, 2**70):
        with pytest.raises(ValueError, match=f"must be in the vocabulary, got {unknown}"):
            tokenizer.decode([CLS, unknown])


def test_texts_may_be_kept_whole(tokenizer: TextTokenizer) -> None:
    (whole,) = tokenizer.encode(["pizza " * 300], spans=True, cut=False)
    assert len(whole.input_ids) == len(whole.spans) == whole.total_tokens == 302
    assert not whole.truncated


@pytest.mark.parametrize("text", ["\ud83d", "pizza \udfff", "a" * 1000 + "\ud800"])
def test_a_lone_surrogate_is_refused_by_index_and_position(tokenizer: TextTokenizer, text: str) -> None:
    position = len(text) - 1
    with pytest.raises(ValueError, match=rf"text 1 .* lone surrogate U\+D[89DF].. at character {position};"):
        tokenizer.encode(["fine", text])
    assert one(tokenizer, "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16")).total_tokens == 3


@pytest.mark.parametrize("entry", ["None", "1", "1.5", "float('nan')", "b'bytes'", "['nested']"])
def test_what_is_not_a_text_is_refused_by_index(entry: str, run_python: Callable[[str], str]) -> None:
    printed = run_python(f"""
        from encoder import TextTokenizer, default_model_dir
        from encoder.model_dir import read_spec
        try:
            TextTokenizer(read_spec(default_model_dir())).encode(["one", "two", {entry}])
        except TypeError as error:
            print(error)
    """)
    assert printed == f"text 2 must be a str, got {type(eval(entry)).__name__}"


@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=40), max_size=5))
def test_spans_point_at_the_characters(tokenizer: TextTokenizer, texts: list[str]) -> None:
    for text, result in zip(texts, tokenizer.encode(texts, spans=True), strict=True):
        spans = result.spans[1:-1]
        assert all(0 <= start < end <= len(text) for start, end in spans)
        assert [start for start, _ in spans] == sorted(start for start, _ in spans)


def test_spans_are_characters_not_bytes(tokenizer: TextTokenizer) -> None:
    text = "Žižek 😀 ate Käsespätzle"
    result = one(tokenizer, text)
    whole = "".join(text[start:end] for start, end in result.spans)
    assert whole == "Žižek😀ateKäsespätzle"


def test_one_tokenizer_serves_64_threads(tokenizer: TextTokenizer, minilm_dir: Path) -> None:
    """With another length for every second thread, as a shared `tokenizers.Tokenizer` would refuse."""
    short = TextTokenizer(replace(read_spec(minilm_dir), max_length=7))
    texts = [f"{'pizza ' * (index % 300)}{index}" for index in range(640)]
    expected = {7: short.encode(texts), 256: tokenizer.encode(texts)}

    def work(thread: int) -> bool:
        shared = (short, tokenizer)[thread % 2]
        rows = range(thread, 640, 64)
        return all(shared.encode([texts[row]])[0] == expected[shared.max_length][row] for row in rows)

    previous = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(64) as pool:
            assert all(pool.map(work, range(64)))
    finally:
        sys.setswitchinterval(previous)


def test_tokens_are_the_vocabularys_entries(tokenizer: TextTokenizer) -> None:
    assert tokenizer.tokens(one(tokenizer, "embeddings").input_ids) == [
        "[CLS]",
        "em",
        "##bed",
        "##ding",
        "##s",
        "[SEP]",
    ]
    with pytest.raises(ValueError, match=r"must be in the vocabulary, got .*30522"):
        tokenizer.tokens([101, 30522])


def test_lower_casing_that_the_directory_asks_for_is_done(tiny_spec: ModelSpec) -> None:
    tree = json.loads(tiny_spec.tokenizer_json)
    tree["normalizer"]["lowercase"] = False
    cased = replace(tiny_spec, tokenizer_json=json.dumps(tree))
    assert one(TextTokenizer(cased), "PIZZA").unknown_share == 1
    assert one(TextTokenizer(replace(cased, lowercase=True)), "PIZZA").unknown_share == 0
    tree["normalizer"] = None
    bare = replace(cased, tokenizer_json=json.dumps(tree), lowercase=True)
    assert one(TextTokenizer(bare), "PIZZA").unknown_share == 0


def test_a_tokenizer_that_does_not_fit_the_encoder_is_refused(tiny_spec: ModelSpec) -> None:
    with pytest.raises(ModelDirectoryError, match=r"has id 25, config.json only 25 words"):
        TextTokenizer(replace(tiny_spec, config=replace(tiny_spec.config, vocab_size=25)))
    tree = json.loads(tiny_spec.tokenizer_json)
    with pytest.raises(ModelDirectoryError, match="must add 1 to 10 tokens, got 0"):
        TextTokenizer(replace(tiny_spec, tokenizer_json=json.dumps(tree | {"post_processor": None})))
    tree["post_processor"]["single"][1]["Sequence"]["type_id"] = 1
    with pytest.raises(ModelDirectoryError, match="segment 0"):
        TextTokenizer(replace(tiny_spec, tokenizer_json=json.dumps(tree)))
    tree = json.loads(tiny_spec.tokenizer_json)
    tree["model"]["unk_token"] = "<unk>"
    with pytest.raises(
        ModelDirectoryError, match=r"unk_token must be in the vocabulary of tokenizer\.json, got '<unk>'"
    ):
        TextTokenizer(replace(tiny_spec, tokenizer_json=json.dumps(tree)))
    with pytest.raises(ModelDirectoryError, match=r"tokenizer\.json is not one that tokenizers can read"):
        TextTokenizer(replace(tiny_spec, tokenizer_json="{}"))


def test_a_batch_is_padded_at_the_end() -> None:
    texts = [TokenizedText(ids, len(ids), 0.0) for ids in ([5, 6, 7], [8])]
    batch = TokenBatch.collate(texts, pad_token_id=3)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 3, 3]]
    assert batch.attention_mask.tolist() == [[True, True, True], [True, False, False]]
