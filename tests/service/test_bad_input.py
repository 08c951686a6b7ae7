"""Bad input on every route: the right status and shape, nothing half-stored, and the service goes on."""

import gzip
import json
import socket
import time
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from serving import Server

EMBED = ("POST", "/embed", {"inputs": ["Pizza is great."]})
OPENAI = ("POST", "/v1/embeddings", {"input": ["Pizza is great."], "model": "nearsense-en-small"})
SEARCH = ("POST", "/search", {"query": "pizza", "collection": "bad-input"})
DOCUMENTS = ("POST", "/collections/bad-input/documents", [{"id": "one", "text": "Pizza is great."}])
TEACH = (
    "PUT",
    "/classifiers/bad-input",
    {"examples": [{"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}]},
)
BODIES = [
    EMBED,
    ("POST", "/embed_all", {"inputs": ["Pizza is great."]}),
    ("POST", "/tokenize", {"inputs": ["Pizza is great."]}),
    ("POST", "/decode", {"ids": [[101, 10733, 102]]}),
    ("POST", "/similarity", {"inputs": {"source_sentence": "pizza", "sentences": ["pasta"]}}),
    OPENAI,
    DOCUMENTS,
    ("POST", "/collections/bad-input/documents/delete", {"ids": ["nobody"]}),
    SEARCH,
    TEACH,
    ("POST", "/classify", {"inputs": ["good"], "classifier": "bad-input"}),
]
BODY_IDS = [path for _, path, _ in BODIES]


@pytest.fixture(scope="module", autouse=True)
def _something_stored(server: Server) -> None:
    for method, path, body in (DOCUMENTS, TEACH):
        assert server.client.request(method, path, json=body).is_success


def send(server: Server, method: str, path: str, content: bytes, **headers: str) -> httpx.Response:
    headers = {"content-type": "application/json"} | {name.replace("_", "-"): each for name, each in headers.items()}
    return server.client.request(method, path, content=content, headers=headers)


def assert_refused(answer: httpx.Response, status: int, *, says: str = "") -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    if answer.url.path.startswith("/v1/"):
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        message = body["error"]["message"]
    else:
        assert body.keys() == {"error", "error_type"}
        message = body["error"]
    assert message
    assert "Traceback" not in message
    assert says in message


@pytest.mark.parametrize(("method", "path", "good"), BODIES, ids=BODY_IDS)
class TestOnEveryRoute:
    def invalid(self, path: str) -> int:
        return 400 if path.startswith("/v1/") else 422

    def test_what_is_good_is_served(self, server: Server, method: str, path: str, good: Any) -> None:
        assert server.client.request(method, path, json=good).is_success

    @pytest.mark.parametrize("body", [{}, None, [], "text", 5, True, [[]], [1], [{}], {"unknown": 1}])
    def test_another_shape(self, server: Server, method: str, path: str, good: Any, body: Any) -> None:  # noqa: ARG002
        assert_refused(send(server, method, path, json.dumps(body).encode()), self.invalid(path))

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"nope", b"{'a': 1}", b"\xff\xfe", b'{"inputs": "\xff"}', b"[" * 9999]
    )
    def test_no_json(self, server: Server, method: str, path: str, good: Any, content: bytes) -> None:  # noqa: ARG002
        status = self.invalid(path) if content == b"" else 400
        answer = send(server, method, path, content)
        assert_refused(answer, 415 if answer.status_code == 415 and content == b"" else status)

    def test_an_unknown_field(self, server: Server, method: str, path: str, good: Any) -> None:
        body = [{**good[0], "txet": 1}] if isinstance(good, list) else {**good, "txet": 1}
        assert_refused(send(server, method, path, json.dumps(body).encode()), self.invalid(path), says="txet")

    def test_a_compressed_body(self, server: Server, method: str, path: str, good: Any) -> None:
        packed = gzip.compress(json.dumps(good).encode())
        assert_refused(send(server, method, path, packed, content_encoding="gzip"), 415, says="gzip")

    def test_another_type(self, server: Server, method: str, path: str, good: Any) -> None:
        content = json.dumps(good).encode()
        for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
            assert_refused(send(server, method, path, content, content_type=content_type), 415, says="application/json")

    def test_one_byte_over_the_limit(self, server: Server, method: str, path: str, good: Any) -> None:
        limit = server.client.get("/info").json()["max_body_bytes"]
        content = json.dumps(good).encode()
        assert_refused(send(server, method, path, content.ljust(limit + 1)), 413, says=f"{limit:,} bytes")

        def chunks() -> Any:  # of no stated length
            yield content.ljust(limit)
            yield b" "

        answer = server.client.request(method, path, content=chunks(), headers={"content-type": "application/json"})
        assert_refused(answer, 413)

    def test_lone_surrogates(self, server: Server, method: str, path: str, good: Any) -> None:
        content = json.dumps(good)
        if '"ids": [[' in content:
            pytest.skip("no text in this body")
        broken = content.replace("izza", "izza\\ud83d").replace('good"', 'good\\ud83d"').replace("nobody", "\\udfff")
        assert broken != content
        answer = send(server, method, path, broken.encode())
        if path.endswith("/delete"):
            assert answer.status_code in (200, 422)  # what cannot be stored is not there
        else:
            assert_refused(answer, self.invalid(path))


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([], "at least one"),
        ([""], "text 0 must not be empty"),
        (["fine", ""], "text 1 must not be empty"),
        (["fine", 5], "text 1 must be a string, not token ids"),
        (["fine", None], "[1]"),
        (["fine", ["nested"]], "[1]"),
        ([101, 102], "not token ids"),
        ([[101], [102]], "not token ids"),
        (["fine", "\ud83d"], "text 1"),
    ],
)
def test_a_bad_text_is_named_by_its_index(server: Server, inputs: list, says: str) -> None:
    for path, field in (("/embed", "inputs"), ("/embed_all", "inputs"), ("/tokenize", "inputs")):
        assert_refused(send(server, "POST", path, json.dumps({field: inputs}).encode()), 422, says=says)
    body = json.dumps({"input": inputs, "model": "nearsense-en-small"}).encode()
    assert_refused(send(server, "POST", "/v1/embeddings", body), 400, says=says)


@pytest.mark.parametrize("dimensions", [0, -1, 257, 10**30, "64", 64.0, True, [64]])
def test_impossible_dimensions(server: Server, dimensions: Any) -> None:
    for (method, path, body), status in ((EMBED, 422), (OPENAI, 400)):
        assert_refused(server.client.request(method, path, json={**body, "dimensions": dimensions}), status)
        full = server.client.request(method, path, json={**body, "dimensions": 256})
        assert full.json() == server.client.request(method, path, json=body).json()


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"k": 0}, 422),
        ({"k": -1}, 422),
        ({"k": 1.5}, 422),
        ({"k": "3"}, 422),
        ({"k": 10_001}, 422),
        ({"min_score": "high"}, 422),
        ({"vector": [0.1] * 256}, 422),  # beside the query
        ({"query": None}, 422),
        ({"query": ""}, 422),
        ({"query": None, "vector": [0.1] * 383}, 422),
        ({"query": None, "vector": [0.1] * 257}, 422),
        ({"query": None, "vector": []}, 422),
        ({"query": None, "vector": [0.0] * 256}, 422),
        ({"query": None, "vector": ["0.1"] * 256}, 422),
        ({"query": None, "id": "nobody"}, 404),
        ({"collection": "nowhere"}, 404),
        ({"collection": "../etc"}, 422),
        ({"collection": ""}, 422),
    ],
)
def test_impossible_searches(server: Server, change: dict, status: int) -> None:
    method, path, body = SEARCH
    assert_refused(server.client.request(method, path, json={**body, **change}), status)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite(server: Server, number: str) -> None:
    vector = ", ".join(["0.1"] * 383 + [number])
    content = f'{{"vector": [{vector}], "collection": "bad-input"}}'.encode()
    assert_refused(send(server, "POST", "/search", content), 422)
    content = f'[{{"id": "nan", "text": "x", "metadata": {{"number": {number}}}}}]'.encode()
    assert_refused(send(server, "POST", DOCUMENTS[1], content), 422, says="metadata")


@pytest.mark.parametrize("scale", [1e-308, 1e-30, 1e30, 1e308])
def test_vectors_of_any_length_are_compared_by_direction(server: Server, scale: float) -> None:
    """Scores are cosines, whatever the scale of the vector that was sent."""
    (vector,) = server.client.post("/embed", json={"inputs": "Pizza is great."}).json()
    question = {"vector": [scale * value for value in vector], "collection": "bad-input", "k": 1}
    (found,) = server.client.post("/search", json=question).json()["results"]
    assert found["id"] == "one"
    assert found["score"] == pytest.approx(1, abs=1e-5)


def test_what_is_stored_comes_back_as_it_was(server: Server) -> None:
    """Everything JSON has, at and beyond the edges of what libraries write."""
    metadata = {
        "": [None, True, {"deep": [[[{}]]]}],
        "integers": [0, -1, 2**53 + 1, 2**63, -(2**64), 10**300],
        "floats": [0.1, 1e-320, 1.7976931348623157e308, -0.0],
        "a.b'c\"d\\": "\x00 \x1f \u2028 \ufeff \U0010ffff",
    }
    document = {"id": "edges / ü?#%", "text": "\x00 text \U0010ffff", "metadata": metadata}
    assert server.client.post("/collections/edges/documents", json=[document]).status_code == 201
    path = f"/collections/edges/documents/{quote(document['id'])}"
    assert server.client.get(path).json() == document
    assert server.client.get("/collections/edges/documents").json() == {"documents": [document]}
    (found,) = server.client.post("/search", json={"query": "text", "collection": "edges"}).json()["results"]
    assert {key: found[key] for key in document} == document
    assert server.client.delete(path).status_code == 204
    assert server.client.get(path).status_code == 404


def test_more_than_there_are(server: Server) -> None:
    method, path, body = SEARCH
    count = server.client.get("/collections/bad-input").json()["count"]
    answer = server.client.request(method, path, json={**body, "k": 10_000})
    assert len(answer.json()["results"]) == count


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"text": ""}, "[1].text"),
        ({"text": 5}, "[1].text"),
        ({}, "[1].text"),
        ({"text": "x", "id": ""}, "document 1"),
        ({"text": "x", "id": "a\nb"}, "document 1"),
        ({"text": "x", "id": "ü" * 257}, "document 1"),
        ({"text": "x", "id": 5}, "[1].id"),
        ({"text": "x", "id": "fine"}, "documents 0 and 1"),
        ({"text": "x", "metadata": []}, "[1].metadata"),
        ({"text": "x", "id": "\ud83d"}, ""),
        ({"text": "\ud83d"}, ""),
        ({"text": "x", "metadata": {"\ud83d": 1}}, ""),
        ({"text": "x", "metadata": {"a": ["\ud83d"]}}, ""),
    ],
)
def test_a_bad_document_stores_nothing(server: Server, document: dict, says: str) -> None:
    before = server.client.get("/collections/bad-input/documents").json()
    content = json.dumps([{"id": "fine", "text": "Fine."}, document]).encode()
    assert_refused(send(server, "POST", DOCUMENTS[1], content), 422, says=says)
    assert server.client.get("/collections/bad-input/documents").json() == before
    assert_refused(send(server, "POST", "/collections/never-made/documents", content), 422)
    assert server.client.get("/collections/never-made").status_code == 404


@pytest.mark.parametrize("name", ["UPPER", "-x", "a" * 64, "ü", "a b", "a.b"])
def test_names_that_are_none(server: Server, name: str) -> None:
    assert_refused(server.client.put(f"/collections/{name}"), 422)
    assert_refused(server.client.get(f"/collections/{name}"), 422)
    assert_refused(server.client.delete(f"/collections/{name}"), 422)
    assert_refused(server.client.request(TEACH[0], f"/classifiers/{name}", json=TEACH[2]), 422)
    assert_refused(server.client.get(f"/classifiers/{name}"), 422)
    assert_refused(server.client.delete(f"/classifiers/{name}"), 422)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"examples": [{"text": "a", "label": "same"}, {"text": "b", "label": "same"}]}, "two labels"),
        ({"examples": [{"text": "a", "label": "one"}]}, "examples"),
        ({"examples": [{"text": "a", "label": 1}, {"text": "b", "label": True}]}, "label"),
        ({"examples": [{"text": "a", "label": ""}, {"text": "b", "label": "x"}]}, "label"),
        ({"examples": [{"text": "a", "label": None}, {"text": "b", "label": "x"}]}, "label"),
        ({"C": 0}, "C"),
        ({"C": -1}, "C"),
        ({"C": "1"}, "C"),
    ],
)
def test_impossible_lessons(server: Server, change: dict, says: str) -> None:
    before = server.client.get("/classifiers/bad-input").json()
    assert_refused(server.client.request(TEACH[0], TEACH[1], json={**TEACH[2], **change}), 422, says=says)
    assert server.client.get("/classifiers/bad-input").json() == before


def test_what_is_not_there(server: Server) -> None:
    client = server.client
    assert_refused(client.get("/nowhere"), 404, says="/docs")
    assert_refused(client.get("/embed"), 405, says="/docs")
    assert_refused(client.get("/collections/nowhere"), 404)
    assert_refused(client.get("/collections/nowhere/documents"), 404)
    assert_refused(client.get("/collections/bad-input/documents/nobody"), 404)
    assert_refused(client.delete("/collections/bad-input/documents/nobody"), 404)
    assert_refused(client.delete("/collections/nowhere"), 404)
    assert_refused(client.get("/classifiers/nowhere"), 404)
    assert_refused(client.post("/classify", json={"inputs": "x", "classifier": "nowhere"}), 404, says="PUT")
    assert_refused(client.post(OPENAI[1], json={**OPENAI[2], "model": "gpt"}), 404, says="nearsense-en-small")
    assert_refused(client.post("/embed", json={"inputs": "x", "prompt_name": "nobody"}), 422, says="prompt_name")
    for ids in ([30522], [-1], [2**40]):
        assert_refused(client.post("/decode", json={"ids": ids}), 422, says="vocabulary")


def test_truncation_is_reported_or_refused(server: Server) -> None:
    long = "pizza " * 300
    answer = server.client.post("/embed", json={"inputs": ["short", long, long]})
    assert answer.headers["x-truncated-inputs"] == "2"
    assert_refused(
        server.client.post("/embed", json={"inputs": ["short", long], "truncate": False}), 422, says="text 1"
    )
    answer = server.client.post("/embed_all", json={"inputs": long})
    assert answer.headers["x-truncated-inputs"] == "1"
    assert_refused(server.client.post("/embed_all", json={"inputs": long, "truncate": False}), 422, says="text 0")


def test_what_the_vocabulary_lacks_is_reported(server: Server) -> None:
    answer = server.client.post("/embed", json={"inputs": ["pizza", "\U00020000\U00020001"]})
    assert float(answer.headers["x-unknown-token-share"]) == 1
    assert "x-unknown-token-share" not in server.client.post("/embed", json={"inputs": "pizza"}).headers


LONG = 1_000_001


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/embed", {"inputs": ["a" * LONG]}, "1,000,000 characters"),
        ("/embed", {"inputs": "a" * LONG}, "1,000,000 characters"),
        ("/similarity", {"inputs": {"source_sentence": "a" * LONG, "sentences": ["a"]}}, "1000000 characters"),
        ("/collections/bad-input/documents", [{"id": "long", "text": "a" * LONG}], "1000000 characters"),
        ("/tokenize", {"inputs": ["a " * 60_000, "a " * 60_000]}, "200,000 characters in all, got 240,000"),
        ("/decode", {"ids": [[101] * 60_000, [102] * 60_000]}, "100,000 in all, got 120,000"),
    ],
)
def test_texts_that_would_hold_up_everybody(server: Server, path: str, body: Any, says: str) -> None:
    assert_refused(server.client.post(path, json=body), 422, says=says)


@pytest.mark.parametrize(
    "body",
    [
        {"inputs": [{}] * 500_000},
        {"inputs": [[{}]] * 500_000},
        {"inputs": ["a"], **{f"field{number}": 1 for number in range(500_000)}},
    ],
)
def test_a_million_faults_are_one(server: Server, body: Any) -> None:
    """Others are answered meanwhile; listing all of them took half a minute of the event loop."""
    begun = time.monotonic()
    assert_refused(server.client.post("/embed", json=body), 422)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("step", [".", "..", "a/..", "../a", "a/./b", "a/../../.."])
def test_ids_that_a_client_would_resolve(server: Server, step: str) -> None:
    """A DELETE of the document ".." is, after httpx has resolved it, one of the whole collection."""
    answer = server.client.post("/collections/bad-input/documents", json=[{"id": step, "text": "a"}])
    assert_refused(answer, 422, says="must not be . or ..")


@pytest.mark.parametrize("id_", ["...", ".a", "a..b", "a/..b/c"])
def test_ids_with_dots_that_mean_nothing(server: Server, id_: str) -> None:
    path = f"/collections/bad-input/documents/{quote(id_)}"
    assert server.client.post("/collections/bad-input/documents", json=[{"id": id_, "text": "a"}]).status_code == 201
    assert server.client.get(path).json()["id"] == id_
    assert server.client.delete(path).status_code == 204


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_line_break_is_no_part_of_an_id(server: Server, method: str) -> None:
    answer = server.client.request(method, "/collections/bad-input/documents/one%0A")
    assert_refused(answer, 400, says="control characters")
    assert server.client.get("/collections/bad-input/documents/one").status_code == 200


@pytest.mark.parametrize("path", ["/health?x=1", "/embed_all?offset=true", "/collections/bad-input/documents?limits=1"])
def test_a_misspelt_query_is_not_without_effect(server: Server, path: str) -> None:
    method = "POST" if path.startswith("/embed") else "GET"
    name = path.partition("?")[2].partition("=")[0]
    answer = server.client.request(method, path, json={"inputs": ["a"]} if method == "POST" else None)
    assert_refused(answer, 422, says=repr(name))


@pytest.mark.parametrize(
    ("parameters", "says"),
    [({"prompt_name": "nope"}, "prompt_name"), ({"truncate": False}, "at most"), ({"normalise": True}, "normalise")],
)
def test_parameters_of_similarity_have_an_effect(server: Server, parameters: dict, says: str) -> None:
    body = {"inputs": {"source_sentence": "pizza " * 600, "sentences": ["pasta"]}}
    assert server.client.post("/similarity", json=body).status_code == 200
    assert_refused(server.client.post("/similarity", json=body | {"parameters": parameters}), 422, says=says)


def test_an_unknown_field_is_named_whatever_it_is_called(server: Server) -> None:
    for name in ("stream", "string", "list", "lists[0]"):
        answer = server.client.post("/embed", json={"inputs": ["a"], name: 1})
        assert_refused(answer, 422, says=name)


@pytest.mark.parametrize("content", [b'{"inputs": ' + b"[" * 100_000, b'{"inputs": ' + b"1" * 5000 + b"}"])
def test_json_that_python_cannot_read_is_told_why(server: Server, content: bytes) -> None:
    assert_refused(send(server, "POST", "/embed", content), 400, says="JSON")


@pytest.mark.parametrize("host", ["evil.com@localhost", "[::1]evil.com", "localhost:80:80", "localhost.evil.com", ""])
def test_hosts_that_only_look_like_this_one(server: Server, host: str) -> None:
    assert_refused(server.client.get("/health", headers={"host": host}), 403)


def test_a_client_that_leaves_is_no_failure_of_the_service(server: Server) -> None:
    before = len(server.log.read_text())
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        body = json.dumps({"inputs": ["a long text " * 100] * 200}).encode()
        head = (
            f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        time.sleep(0.3)
    time.sleep(1)
    assert server.client.get("/health").status_code == 200
    written = server.log.read_text()[before:]
    assert "Traceback" not in written
    assert "ERROR" not in written
