"""The one door: the same vectors as the reference, whatever stands beside a text."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder import SentenceEncoder
from encoder.model_dir import fingerprint, read_spec
from encoder.runtime_torch import TorchRuntime
from encoder.sentence import plan_batches
from encoder.tokenizer import TokenBatch
from encoder.weights import read_weights

GOLDEN = Path(__file__).parent / "golden"
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def golden() -> tuple[list[str], np.ndarray]:
    """200 texts, and what sentence-transformers made of them (golden/write.py)."""
    texts = (GOLDEN / "texts.txt").read_text(encoding="utf-8").splitlines()
    return texts, safetensors.numpy.load_file(GOLDEN / "minilm.safetensors")["vectors"]


@pytest.fixture(scope="module")
def alone(minilm: SentenceEncoder, golden: tuple[list[str], np.ndarray]) -> tuple[list[str], np.ndarray]:
    """100 texts of all lengths, each embedded by itself."""
    texts = golden[0][::2]
    return texts, np.stack([minilm.encode(text) for text in texts])


def difference(first: np.ndarray, second: np.ndarray) -> float:
    assert first.shape == second.shape
    return float(np.abs(first - second).max())


def test_gives_the_vectors_of_sentence_transformers(minilm: SentenceEncoder, golden: tuple) -> None:
    texts, expected = golden
    vectors = minilm.encode(texts)
    assert vectors.shape == (200, 384)
    assert (vectors * expected).sum(axis=1).min() >= 0.99999
    assert difference(vectors, expected) <= TOLERANCE


def test_the_golden_texts_cover_all_lengths(minilm: SentenceEncoder, golden: tuple) -> None:
    lengths = sorted(text.total_tokens for text in minilm.tokenizer.encode(golden[0]))
    assert lengths[0] == 3
    assert lengths[-6] > 256
    assert len(set(lengths)) > 30


@settings(max_examples=8)
@given(data=st.data(), size=st.sampled_from([1, 7, 32, 100]), with_longest=st.booleans())
def test_a_text_has_one_vector_whatever_stands_beside_it(
    minilm: SentenceEncoder, alone: tuple, data: st.DataObject, size: int, with_longest: bool
) -> None:
    texts, expected = alone
    rows = data.draw(st.lists(st.integers(0, 99), min_size=size, max_size=size))
    mixed = [texts[row] for row in rows] + ["pizza " * 300] * with_longest
    assert difference(minilm.encode(mixed)[:size], expected[rows]) <= TOLERANCE


@pytest.mark.parametrize("size", [7, 32, 100])
def test_padding_to_the_models_length_changes_nothing(minilm_dir: Path, alone: tuple, size: int) -> None:
    """Batches of the runtime itself, all padded as far as can be."""
    spec = read_spec(minilm_dir)
    runtime = TorchRuntime(spec, read_weights(minilm_dir, spec.config))
    encoder = SentenceEncoder(spec, fingerprint="", runtime=runtime)
    texts, expected = alone
    tokenized = encoder.tokenizer.encode(["pizza " * 300, *texts])
    for start in range(1, 101, size):
        batch = TokenBatch.collate([tokenized[0], *tokenized[start : start + size]], pad_token_id=0)
        vectors = runtime.embed(batch)[1:]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        assert difference(vectors, expected[start - 1 : start - 1 + size]) <= TOLERANCE


def test_what_stands_at_padding_has_exactly_no_influence(minilm_dir: Path) -> None:
    spec = read_spec(minilm_dir)
    runtime = TorchRuntime(spec, read_weights(minilm_dir, spec.config))
    attention_mask = np.arange(31) < np.array([[31], [9], [3]])
    input_ids = np.random.default_rng(0).integers(999, 30000, (3, 31))
    other = np.where(attention_mask, input_ids, input_ids[:, ::-1])
    before = runtime.embed(TokenBatch(input_ids, attention_mask))
    assert np.array_equal(before, runtime.embed(TokenBatch(other, attention_mask)))


def test_every_vocabulary_item_has_a_finite_vector(minilm_dir: Path) -> None:
    spec = read_spec(minilm_dir)
    runtime = TorchRuntime(spec, read_weights(minilm_dir, spec.config))
    for ids in np.array_split(np.arange(spec.config.vocab_size), 50):
        input_ids = np.stack([np.full_like(ids, 101), ids, np.full_like(ids, 102)], axis=1)
        vectors = runtime.embed(TokenBatch(input_ids, np.ones(input_ids.shape, bool)))
        assert np.isfinite(vectors).all()
        assert np.linalg.norm(vectors, axis=1).min() > 1


def test_order_matters(minilm: SentenceEncoder) -> None:
    first, second = minilm.encode(["squatch eats pizza", "pizza eats squatch"])
    assert 0.5 < first @ second < 0.99


def test_context_matters(minilm: SentenceEncoder) -> None:
    river, money, credit = minilm.encode_tokens(
        ["We sat on the bank of the river.", "The bank lent us the money.", "The bank raised its rates."]
    )
    vectors = [text.vectors[text.tokens.index("bank")] for text in (river, money, credit)]
    vectors = [vector / np.linalg.norm(vector) for vector in vectors]
    assert vectors[0] @ vectors[1] < 0.9
    assert vectors[1] @ vectors[2] > vectors[0] @ vectors[1] + 0.1


def test_token_vectors_stand_for_their_characters(minilm: SentenceEncoder) -> None:
    texts = ["Käsespätzle, please!", "x", "", "pizza " * 300]
    embedded = minilm.encode_tokens(texts)
    assert [text.truncated for text in embedded] == [False, False, False, True]
    first = embedded[0]
    assert first.tokens == ["[CLS]", "ka", "##ses", "##pa", "##tz", "##le", ",", "please", "!", "[SEP]"]
    covered = [texts[0][start:end] for start, end in first.spans]
    assert covered == ["", "Kä", "ses", "pä", "tz", "le", ",", "please", "!", ""]
    assert len(first.tokens) == len(first.spans) == len(first.vectors)
    for text, vector in zip(embedded, minilm.encode(texts), strict=True):
        mean = text.vectors.mean(axis=0)
        assert difference(mean / np.linalg.norm(mean), vector) <= TOLERANCE


def test_fewer_dimensions_are_the_first_ones_normalised_again(minilm: SentenceEncoder) -> None:
    texts = ["one", "another text"]
    raw = minilm.encode(texts, normalize=False)
    for dimensions in (1, 64, 384):
        cut = raw[:, :dimensions]
        assert difference(minilm.encode(texts, dimensions=dimensions, normalize=False), cut) == 0
        normalized = minilm.encode(texts, dimensions=dimensions)
        assert difference(normalized, cut / np.linalg.norm(cut, axis=1, keepdims=True)) <= TOLERANCE
        assert np.linalg.norm(normalized, axis=1) == pytest.approx(1, abs=1e-6)
    for dimensions in (0, -1, 385, True):
        with pytest.raises(ValueError, match=f"dimensions must be between 1 and 384, got {dimensions}"):
            minilm.encode(texts, dimensions=dimensions)


def test_a_prompt_is_put_before_the_text(minilm: SentenceEncoder, minilm_dir: Path) -> None:
    spec = replace(read_spec(minilm_dir), prompts={"query": "question: ", "passage": ""}, default_prompt="query")
    encoder = SentenceEncoder(spec, fingerprint="", runtime=minilm._runtime)
    plain, prompted = minilm.encode(["who eats pizza?", "question: who eats pizza?"])
    assert difference(encoder.encode("who eats pizza?"), prompted) <= TOLERANCE
    assert difference(encoder.encode("who eats pizza?", prompt=""), plain) <= TOLERANCE
    assert difference(minilm.encode("who eats pizza?", prompt="question: "), prompted) <= TOLERANCE


def test_truncation_is_said(minilm: SentenceEncoder, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        same = minilm.encode(["pizza " * 300 + "one", "short", "pizza " * 300 + "two"])
        assert caplog.messages == ["2 of 3 texts were cut to 256 tokens"]
        assert difference(same[0], same[2]) <= TOLERANCE
        minilm.encode(["pizza " * 254])
    assert len(caplog.messages) == 1


def test_shapes_of_one_and_of_none(minilm: SentenceEncoder) -> None:
    assert minilm.encode("one").shape == (384,)
    assert minilm.encode(["one"]).shape == (1, 384)
    assert minilm.encode([]).shape == (0, 384)
    assert minilm.encode(text for text in ("a", "generator")).shape == (2, 384)
    assert minilm.encode([""], dimensions=7).shape == (1, 7)
    assert minilm.encode_tokens([]) == []


def test_threads_may_share_an_encoder(minilm: SentenceEncoder, alone: tuple) -> None:
    texts, expected = alone
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda row: minilm.encode(texts[row : row + 5]), range(0, 100, 5)))
    assert difference(np.concatenate(answers), expected) <= TOLERANCE


@pytest.mark.parametrize("scale", [1e-25, 1e-14, 1e14, 1e25])
def test_vectors_of_any_length_are_normalised(minilm_dir: Path, scale: float) -> None:
    spec = read_spec(minilm_dir)
    weights = read_weights(minilm_dir, spec.config)
    for part in ("weight", "bias"):
        weights[f"encoder.layer.5.output.LayerNorm.{part}"] *= np.float32(scale)
    encoder = SentenceEncoder(spec, fingerprint="", runtime=TorchRuntime(spec, weights))
    assert np.linalg.norm(encoder.encode(["pizza", "a bank"]), axis=1) == pytest.approx(1, abs=1e-6)


def test_mixed_precision_around_us_does_not_leak_in(minilm: SentenceEncoder) -> None:
    expected = minilm.encode("Pizza is great.")
    with torch.autocast("cpu", torch.bfloat16):
        assert difference(minilm.encode("Pizza is great."), expected) == 0


def test_a_vector_that_is_not_finite_is_an_error(minilm_dir: Path) -> None:
    spec = read_spec(minilm_dir)
    weights = read_weights(minilm_dir, spec.config)
    weights["embeddings.word_embeddings.weight"][7592] = np.nan  # "hello"
    encoder = SentenceEncoder(spec, fingerprint="", runtime=TorchRuntime(spec, weights))
    with pytest.raises(FloatingPointError, match="the vector of text 2 is not finite"):
        encoder.encode(["fine", "a somewhat longer text", "hello"])
    with pytest.raises(FloatingPointError, match="a token of text 1 is not finite"):
        encoder.encode_tokens(["fine", "hello"])


def test_the_runtime_without_onednn_agrees(minilm_dir: Path, alone: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch is built without oneDNN the plain linear maps are used."""
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    encoder = SentenceEncoder.load(minilm_dir)
    assert "OneDnn" not in repr(encoder._runtime._encoder)
    assert difference(encoder.encode(alone[0]), alone[1]) <= TOLERANCE


def test_bfloat16_is_near(minilm_dir: Path, alone: tuple) -> None:
    vectors = SentenceEncoder.load(minilm_dir, precision="bfloat16").encode(alone[0])
    assert vectors.dtype == np.float32
    assert (vectors * alone[1]).sum(axis=1).min() > 0.999


def test_the_fingerprint_is_the_models(minilm: SentenceEncoder, minilm_dir: Path) -> None:
    spec = read_spec(minilm_dir)
    assert minilm.fingerprint == fingerprint(spec, read_weights(minilm_dir, spec.config))
    assert minilm.hidden_size == 384


def test_unknown_settings_are_refused(run_python: Callable[[str], str]) -> None:
    printed = run_python("""
        from encoder import SentenceEncoder, default_model_dir
        for settings in ({"runtime": "tensorflow"}, {"precision": "int4"}):
            try:
                SentenceEncoder.load(default_model_dir(), **settings)
            except ValueError as error:
                print(error)
        for prompt in (5, b"x", []):
            try:
                SentenceEncoder.load(default_model_dir()).encode("text", prompt=prompt)
            except TypeError as error:
                print(error)
        for texts in ([["nested"]], [1], b"bytes", [None]):
            try:
                SentenceEncoder.load(default_model_dir()).encode(texts)
            except TypeError as error:
                print(error)
    """)
    assert printed.splitlines() == [
        "runtime must be 'torch', got 'tensorflow'",
        "precision must be one of float32, bfloat16, got 'int4'",
        "prompt must be a str, got int",
        "prompt must be a str, got bytes",
        "prompt must be a str, got list",
        "text 0 must be a str, got list",
        "text 0 must be a str, got int",
        "text 0 must be a str, got int",
        "text 0 must be a str, got NoneType",
    ]


@given(
    lengths=st.lists(st.integers(1, 512), max_size=300),
    max_tokens=st.integers(1, 4096),
    max_padding=st.integers(0, 4096),
)
def test_batches_hold_each_text_once_and_keep_their_bounds(
    lengths: list[int], max_tokens: int, max_padding: int
) -> None:
    batches = plan_batches(lengths, max_tokens=max_tokens, max_padding=max_padding)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    longest = [max(lengths[row] for row in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    for batch, length in zip(batches, longest, strict=True):
        assert len(batch) == 1 or len(batch) * length <= max_tokens
        assert len(batch) * length - sum(lengths[row] for row in batch) <= max_padding


def test_a_batch_is_not_split_without_need() -> None:
    assert plan_batches([5] * 8, max_tokens=40, max_padding=0) == [list(range(8))]
    assert plan_batches([3, 5, 4], max_tokens=15, max_padding=3) == [[1, 2, 0]]
    assert plan_batches([3, 5, 4], max_tokens=15, max_padding=2) == [[1, 2], [0]]
