"""Clients that know nothing of us: the openai package, unchanged; and what text-embeddings-inference's expect."""

import base64

import numpy as np
import openai
import pytest
from serving import Server

from encoder import SentenceEncoder

TEXTS = ["Pizza is great.", "Pizza is awesome.", "The bank lent money.", "Ünïcode 😀", "pizza " * 300]
MODEL = "nearsense-en-small"


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_gets_the_same_bits_by_default_and_as_floats(
    client: openai.OpenAI, server: Server, shipped: SentenceEncoder
) -> None:
    default = client.embeddings.create(model=MODEL, input=TEXTS)  # its own choice is base64
    floats = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    first = np.array([each.embedding for each in default.data], dtype=np.float32)
    assert np.array_equal(first, np.array([each.embedding for each in floats.data], dtype=np.float32))
    assert np.abs(first - shipped.encode(TEXTS)).max() <= 1e-5
    assert [each.index for each in default.data] == [0, 1, 2, 3, 4]
    used = sum(len(text.input_ids) for text in shipped.tokenizer.encode(TEXTS))
    assert default.usage.prompt_tokens == default.usage.total_tokens == used

    body = {"model": MODEL, "input": TEXTS, "encoding_format": "base64"}
    raw = server.client.post("/v1/embeddings", json=body).json()["data"]
    decoded = np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in raw])
    assert np.array_equal(first, decoded)


def test_openai_sends_2048_texts_in_one_call(client: openai.OpenAI, shipped: SentenceEncoder) -> None:
    texts = [f"number {index}" for index in range(2048)]
    answer = client.embeddings.create(model=MODEL, input=texts)
    vectors = np.array([each.embedding for each in answer.data], dtype=np.float32)
    rows = [0, 1, 1023, 2047]
    assert vectors.shape == (2048, 256)
    assert np.abs(vectors[rows] - shipped.encode([texts[row] for row in rows])).max() <= 1e-5


def test_openai_asks_for_fewer_dimensions(client: openai.OpenAI, shipped: SentenceEncoder) -> None:
    for dimensions in (1, 64, 256):
        (answer,) = client.embeddings.create(model=MODEL, input="pizza", dimensions=dimensions).data
        assert np.abs(np.array(answer.embedding) - shipped.encode("pizza", dimensions=dimensions)).max() <= 1e-5


@pytest.mark.parametrize("texts", [["pizza"], ["pizza", "The bank lends money."]])
@pytest.mark.parametrize("dimensions", [1, 64, 256])
@pytest.mark.parametrize("normalize", [True, False])
def test_fewer_dimensions_of_any_number_of_texts(
    server: Server, shipped: SentenceEncoder, texts: list[str], dimensions: int, normalize: bool
) -> None:
    body = {"inputs": texts, "dimensions": dimensions, "normalize": normalize}
    answer = server.client.post("/embed", json=body)
    assert answer.status_code == 200, answer.text
    expected = shipped.encode(texts, dimensions=dimensions, normalize=normalize)
    np.testing.assert_allclose(answer.json(), expected, atol=1e-5)
    body = {"model": MODEL, "input": texts, "dimensions": dimensions, "encoding_format": "float"}
    answer = server.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    floats = [each["embedding"] for each in answer.json()["data"]]
    np.testing.assert_allclose(floats, shipped.encode(texts, dimensions=dimensions), atol=1e-5)


def test_openai_understands_our_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length"):
        client.embeddings.create(model=MODEL, input=[101, 102])
    with pytest.raises(openai.BadRequestError, match="must not be empty"):
        client.embeddings.create(model=MODEL, input="")
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.embeddings.create(model="text-embedding-3-small", input="pizza")
    assert [model.id for model in client.models.list()] == [MODEL]


def test_floats_survive_the_way_as_text(server: Server, shipped: SentenceEncoder) -> None:
    """Each number is written so that it is read back as the same float32."""
    body = {"inputs": TEXTS, "normalize": False}
    vectors = np.array(server.client.post("/embed", json=body).json(), dtype=np.float32)
    again = np.array(server.client.post("/embed", json=body).json(), dtype=np.float32)
    assert np.array_equal(vectors, again)
    assert np.abs(vectors - shipped.encode(TEXTS, normalize=False)).max() <= 1e-5


def test_token_vectors_come_with_their_words(server: Server, shipped: SentenceEncoder) -> None:
    texts = ["the bank of the river", "the bank lent money"]
    plain = server.client.post("/embed_all", json={"inputs": texts}).json()
    told = server.client.post("/embed_all?offsets=true", json={"inputs": texts}).json()
    for text, vectors, tokens, expected in zip(texts, plain, told, shipped.encode_tokens(texts), strict=True):
        assert [token["embedding"] for token in tokens] == vectors
        assert np.abs(np.array(vectors) - expected.vectors).max() <= 1e-4  # not normalised: lengths of about 5
        assert [text[token["start"] : token["stop"]] for token in tokens[1:-1]] == text.split()
        mean = np.mean(vectors, axis=0)
        embedded = server.client.post("/embed", json={"inputs": text}).json()[0]
        assert np.abs(mean / np.linalg.norm(mean) - embedded).max() <= 1e-5


def test_text_to_tokens_and_back(server: Server, shipped: SentenceEncoder) -> None:
    text = "Embeddings, please! " + "pizza " * 300
    (tokens,) = server.client.post("/tokenize", json={"inputs": text}).json()
    assert len(tokens) > 300  # not cut
    (expected,) = shipped.tokenizer.encode([text], spans=True, cut=False)
    assert [token["id"] for token in tokens] == expected.input_ids
    assert [token["text"] for token in (tokens[0], tokens[-1])] == ["[CLS]", "[SEP]"]
    assert [token["special"] for token in tokens] == [True, *[False] * (len(tokens) - 2), True]
    assert tokens[1]["start"] == 0
    assert text[tokens[1]["start"] : tokens[1]["stop"]].lower() == tokens[1]["text"]
    (bare,) = server.client.post("/tokenize", json={"inputs": text, "add_special_tokens": False}).json()
    assert bare == tokens[1:-1]
    ids = [token["id"] for token in tokens]
    assert server.client.post("/decode", json={"ids": ids}).json() == [text.lower().strip()]
    comma = next(place for place, token in enumerate(tokens) if token["text"] == ",")
    assert server.client.post("/decode", json={"ids": [ids, ids[:comma]]}).json()[1] == "embeddings"
    pizza = shipped.tokenizer.encode(["pizza"])[0].input_ids
    kept = server.client.post("/decode", json={"ids": pizza, "skip_special_tokens": False}).json()
    assert kept == ["[CLS] pizza [SEP]"]


def test_similarity(server: Server, shipped: SentenceEncoder) -> None:
    inputs = {"source_sentence": "Pizza is great.", "sentences": ["Pizza is awesome.", "The bank lent money."]}
    source, *others = shipped.encode([inputs["source_sentence"], *inputs["sentences"]])
    assert server.client.post("/similarity", json={"inputs": inputs}).json() == pytest.approx(
        [float(source @ other) for other in others], abs=1e-5
    )
