"""A real server, in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest


class Server:
    """`nearsense serve` on a free port of this machine."""

    def __init__(self, data: Path, *, python: str = sys.executable, **settings: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.data = data
        self._python = python
        self.log = data.parent / f"server-{self.port}.log"
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("NEARSENSE_")},
            **{f"NEARSENSE_{name.upper()}": value for name, value in settings.items()},
        }
        key = settings.get("api_key")
        self.client = httpx.Client(
            base_url=self.url, timeout=120, headers={"authorization": f"Bearer {key}"} if key else None
        )
        self.start()

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        command = [self._python, *(["-W", "error"] if self._python == sys.executable else []), "-m", "service", "serve"]
        arguments = ["--data", str(self.data), "--port", str(self.port)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments], cwd=self.data.parent, env=self._environment, stdout=log, stderr=log
            )
        for _ in range(600):
            if self.process.poll() is not None:
                pytest.fail(f"the server ended with {self.process.returncode}:\n{self.log.read_text()}")
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.05)
        pytest.fail(f"the server was not ready in time:\n{self.log.read_text()}")

    def kill(self) -> None:
        """End the process at once, as a power cut would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """End the process as an operator does, and give its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def close(self) -> None:
        """Leave nothing behind."""
        self.client.close()
        if self.process.poll() is None:
            self.kill()
