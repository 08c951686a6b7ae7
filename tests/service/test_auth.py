"""Who is let in: keys, host names, and that no route is forgotten."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from serving import Server

from service.app import create_app, served
from service.auth import ACCESS, Access
from service.settings import Settings

KEY = "a-key-of-enough-letters"


def test_every_route_has_a_row(tmp_path: Path) -> None:
    app = create_app(Settings(data=tmp_path))
    documented = {(method.upper(), path) for path, item in app.openapi()["paths"].items() for method in item}
    rows = {(method, path.replace(":path", "")) for method, path in ACCESS}
    assert documented <= rows
    assert rows - documented == {("GET", "/docs"), ("GET", "/openapi.json")}
    assert served(app) == ACCESS.keys()


def test_a_forgotten_row_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(ACCESS, ("POST", "/search"))
    with pytest.raises(RuntimeError, match=r"differ in \[\('POST', '/search'\)\]"):
        create_app(Settings(data=tmp_path))


def test_all_but_the_public_needs_the_key(start_server: Callable[..., Server]) -> None:
    server = start_server(api_key=KEY)
    for (method, path), access in ACCESS.items():
        url = f"{server.url}{path}"
        statuses = {
            httpx.request(method, url, headers=headers).status_code
            for headers in (
                {},
                {"authorization": KEY},
                {"authorization": f"Basic {KEY}"},
                {"authorization": "Bearer"},
                {"authorization": f"Bearer {KEY[:-1]}"},
                {"authorization": f"Bearer {KEY}x"},
                {"authorization": "Bearer ÿ".encode("latin-1")},
            )
        }
        assert statuses == ({200} if access is Access.PUBLIC else {401}), path
        assert server.client.request(method, path).status_code != 401
    refused = httpx.post(f"{server.url}/embed", json={"inputs": "pizza"})
    assert refused.json()["error_type"] == "Unauthorized"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/v1/models").json()["error"]["type"] == "authentication_error"
    assert httpx.get(f"{server.url}/nowhere").status_code == 401
    assert httpx.get(f"{server.url}/docs/assets/swagger-ui.css").status_code == 200
    # With a key the name no longer matters.
    assert server.client.get("/info", headers={"host": "example.org"}).status_code == 200
    assert KEY not in server.log.read_text()


@pytest.mark.parametrize(
    "host", ["example.org", "127.0.0.1.example.org", "localhost.example.org:80", "", "[::2]", "[", "10.0.0.1"]
)
def test_other_host_names_are_refused_on_loopback(server: Server, host: str) -> None:
    answer = server.client.get("/health", headers={"host": host})
    assert answer.status_code in (400, 403)  # an empty one is no HTTP
    if answer.status_code == 403:
        assert answer.json()["error_type"] == "Forbidden"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8000"])
def test_loopback_names_are_served(server: Server, host: str) -> None:
    assert server.client.get("/health", headers={"host": host}).status_code == 200


def run_serve(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service", "serve", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (
            {"NEARSENSE_HOST": "0.0.0.0"},
            "host must be a loopback address without a key, got 0.0.0.0; set NEARSENSE_API_KEY",
        ),
        ({"NEARSENSE_API_KEY": "short"}, "api_key: "),
        ({"NEARSENSE_API_KEY": " " * 20}, "NEARSENSE_API_KEY must be printable ASCII without spaces"),
        ({"NEARSENSE_API_KEY": f"{KEY} "}, "NEARSENSE_API_KEY must be printable ASCII without spaces"),
        ({"NEARSENSE_API_KEY": "ключ-из-многих-букв"}, "NEARSENSE_API_KEY must be printable ASCII without spaces"),
        ({"NEARSENSE_PROT": "80"}, "no such setting: NEARSENSE_PROT"),
        ({"NEARSENSE_PORT": "eighty"}, "port: "),
        ({"NEARSENSE_PORT": "65536"}, "port: "),
        ({"NEARSENSE_THREADS": "0"}, "threads: "),
    ],
)
def test_impossible_settings_are_refused_at_the_start(environment: dict[str, str], says: str) -> None:
    finished = run_serve(**environment)
    assert finished.returncode == 2
    assert finished.stderr.startswith("error: ")
    assert says in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "short" not in finished.stderr


def test_a_model_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    finished = run_serve("--model", str(tmp_path / "nowhere"), "--data", str(tmp_path / "data"))
    assert finished.returncode != 0
    assert "nowhere" in finished.stderr
    assert "must hold config.json" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_a_data_directory_that_is_a_file_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    finished = run_serve("--data", str(tmp_path / "data"))
    assert finished.returncode == 3
    assert f"the data directory {tmp_path / 'data'} cannot be made" in finished.stderr
    assert "Traceback" not in finished.stderr
