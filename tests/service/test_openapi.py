"""The service against its own description: whatever is sent, no 500 and no answer that is not documented."""

import subprocess
import sys
from pathlib import Path

import pytest
from serving import Server

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance"


@pytest.mark.parametrize("examples", [15, pytest.param(300, marks=pytest.mark.slow)])
def test_nothing_undocumented_and_no_crash(server: Server, tmp_path: Path, examples: int) -> None:
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        "run",
        f"{server.url}/openapi.json",
        "--request-timeout=60",
    ]
    options = [
        "--checks",
        CHECKS,
        "--max-examples",
        str(examples),
        "--seed",
        "1",
        "--phases",
        "examples,coverage,fuzzing",
    ]
    finished = subprocess.run(
        [*command, *options], check=False, capture_output=True, text=True, timeout=900, cwd=tmp_path
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-2000:]
    assert server.client.get("/ready").status_code == 200
