from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from serving import Server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that tests share: each uses names of its own."""
    server = Server(tmp_path_factory.mktemp("shared") / "data")
    yield server
    server.close()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start one for this test alone."""
    servers: list[Server] = []

    def start(**settings: str) -> Server:
        servers.append(Server(tmp_path / f"data{len(servers)}", **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
