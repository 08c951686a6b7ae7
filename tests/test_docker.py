"""The image and how it is run: no Docker is needed, since the image's steps are performed in a directory instead."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from service.settings import PREFIX, Settings

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "service" / "Dockerfile"
COMPOSE = ROOT / "docker-compose.yml"
KEY = "a key of the tests"
SECRET_NAMES = re.compile("KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")


def steps(*names: str) -> list[tuple[str, str]]:
    """Each instruction and what follows it, of all names or of some; comments go first and then the line ends."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", "").splitlines()
    found = [(name, value.strip()) for name, _, value in (line.partition(" ") for line in joined) if name]
    return [(name, value) for name, value in found if not names or name in names]


def pairs(value: str) -> dict[str, str]:
    """The names and values of an ENV or ARG, none of which refers to another."""
    assert "$" not in value
    return dict(word.split("=", 1) for word in shlex.split(value))


def variables(*names: str) -> dict[str, str]:
    return {name: value for _, line in steps(*names) for name, value in pairs(line).items()}


def command_of(name: str) -> list[str]:
    """The words of an ENTRYPOINT, CMD or HEALTHCHECK, which no shell may run: it would keep signals to itself."""
    ((_, value),) = steps(name)
    options = r"(--\S+\s+)*CMD\s+" if name == "HEALTHCHECK" else ""
    command = json.loads(re.sub(f"^{options}", "", value))
    assert isinstance(command, list)
    return command


def is_sent(path: str) -> bool:
    """Whether .dockerignore lets a file become part of an image; the last line that names it or a parent decides."""
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
            if re.fullmatch(f"{pattern}(/.*)?", path):
                sent = line.startswith("!")
    return sent


def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


def validate(file: Path) -> subprocess.CompletedProcess[str]:
    """Hold a file against the schema of the Compose Specification, of which check-jsonschema carries a copy."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


class Image:
    """What the Dockerfile's steps make, in a directory that stands for the image's root.

    An environment of the Python that runs the tests takes the place of the base image. Steps are run as they are, but
    for the places that the image makes, which lie in the directory.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.user, self.group = os.getuid(), os.getgid()
        self._environment: dict[str, str] = {}
        self._arguments: dict[str, str] = {}
        self._workdir = root
        places = {"/tmp", *(value for _, value in steps("WORKDIR", "VOLUME"))} - {"/"}
        self._places = re.compile(rf"(?<![\w./-])({'|'.join(map(re.escape, places))})\b")
        (root / "tmp").mkdir()
        (root / "tmp").chmod(0o1777)
        venv.create(root / "usr" / "local", with_pip=True)
        for name, value in steps():
            self._perform(name, value)

    def _perform(self, name: str, value: str) -> None:
        match name:
            case "ENV":
                self._environment |= {key: self._inside(each) for key, each in pairs(value).items()}
            case "ARG":
                self._arguments |= pairs(value)
            case "WORKDIR":
                self._workdir = self.root / value.lstrip("/")
                self._workdir.mkdir(exist_ok=True)
            case "COPY":
                *sources, target = value.split()
                for source in sources:
                    self._copy(source, target)
            case "RUN":
                self._run(value)
            case "USER":
                if os.getuid() == 0:
                    self.user, self.group = map(int, value.split(":"))
            case _:
                later = ("HEALTHCHECK", "ENTRYPOINT", "CMD")
                assert name in ("FROM", "VOLUME", "EXPOSE", *later), f"{name} is not performed here yet"

    def _copy(self, source: str, target: str) -> None:
        files = [ROOT / source] if (ROOT / source).is_file() else sorted((ROOT / source).rglob("*"))
        for file in (file for file in files if file.is_file() and is_sent(file.relative_to(ROOT).as_posix())):
            name = file.name if target.endswith("/") else Path(target, file.relative_to(ROOT / source))
            copied = self._workdir / (target if target.endswith("/") else "") / name
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copied)

    def _run(self, command: str) -> None:
        if os.getuid() != 0:  # who is not root can give files to nobody else
            for option, number in (("-o", os.getuid()), ("-g", os.getgid())):
                command = re.sub(rf"{option} \d+", f"{option} {number}", command)
        environment = self._all_variables() | self._arguments
        shell = ["/bin/sh", "-c", self._inside(command)]
        ran = subprocess.run(
            shell, cwd=self._workdir, env=environment, capture_output=True, text=True, timeout=1200, check=False
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}{ran.stderr}"

    def _inside(self, text: str) -> str:
        return self._places.sub(rf"{self.root}\1", text)

    def _all_variables(self) -> dict[str, str]:
        ours = (PREFIX, "PYTHON", "VIRTUAL_ENV")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        path = f"{self.root}/usr/local/bin:/usr/bin:/bin"
        return environment | {"PATH": path, "TMPDIR": f"{self.root}/tmp"} | self._environment

    def _as_user(self) -> list[str]:
        """The words before a command that take root's rights from it, as in docker-compose.yml."""
        if os.getuid() != 0 or shutil.which("setpriv") is None:
            return []
        # The image's Python is anybody's to read, but the one used here may lie in root's home.
        base = Path(sys.base_prefix)
        readable = all(folder.stat().st_mode & 0o001 for folder in (base, *base.parents))
        right = "" if readable else ",+dac_read_search"
        rights = [f"--{which}=-all{right}" for which in ("bounding-set", "inh-caps", "ambient-caps")]
        who = [f"--reuid={self.user}", f"--regid={self.group}", "--clear-groups"]
        return ["setpriv", *who, *rights, "--no-new-privs"]

    def start(self, **settings: str) -> subprocess.Popen[str]:
        """Start what the image starts; what it prints is in the process's standard output."""
        return self._popen([*command_of("ENTRYPOINT"), *command_of("CMD")], settings)

    def is_healthy(self, **settings: str) -> bool:
        process = self._popen(command_of("HEALTHCHECK"), settings)
        process.communicate(timeout=10)
        return process.returncode == 0

    def _popen(self, command: list[str], settings: dict[str, str]) -> subprocess.Popen[str]:
        environment = self._all_variables() | {f"{PREFIX}{name.upper()}": value for name, value in settings.items()}
        environment |= {"http_proxy": "http://127.0.0.1:9"}  # as Docker sets it where its user has a proxy
        return subprocess.Popen(
            [*self._as_user(), *map(self._inside, command)],
            cwd=self._workdir,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    # Not in pytest's own directory, into which no other user can look.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Image(Path(folder).resolve())


def test_compose_follows_the_published_schema(tmp_path: Path) -> None:
    validated = validate(COMPOSE)
    assert validated.returncode == 0, validated.stdout

    misspelt = tmp_path / COMPOSE.name
    misspelt.write_text(COMPOSE.read_text().replace("read_only:", "readonly:"))
    refused = validate(misspelt)
    assert refused.returncode == 1
    assert "readonly" in refused.stdout


def test_compose_gives_the_service_no_more_than_it_needs() -> None:
    (service,) = compose()["services"].values()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [each.partition(":")[0] for each in service["tmpfs"]] == ["/tmp"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "user", "devices"} & service.keys()


def test_compose_starts_again_and_lets_requests_end() -> None:
    (service,) = compose()["services"].values()
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    (seconds,) = re.findall(r"timeout_graceful_shutdown=(\d+)", (ROOT / "service" / "cli.py").read_text())
    assert int(service["stop_grace_period"].removesuffix("s")) > int(seconds)


def test_compose_says_that_a_key_is_needed() -> None:
    (service,) = compose()["services"].values()
    assert re.fullmatch(
        r"\$\{NEARSENSE_API_KEY:\?[^}]+at least 16 characters[^}]+\}", service["environment"][f"{PREFIX}API_KEY"]
    )
    (length,) = [each.min_length for each in Settings.model_fields["api_key"].metadata]
    assert length == 16


def test_compose_the_image_and_the_settings_agree() -> None:
    (service,) = compose()["services"].values()
    environment = variables("ENV")
    settings = [name for name in (*environment, *service["environment"]) if name.startswith(PREFIX)]
    assert {name.removeprefix(PREFIX).lower() for name in settings} <= Settings.model_fields.keys()
    assert steps("VOLUME") == [("VOLUME", environment["NEARSENSE_DATA"])]
    assert [volume.partition(":")[2] for volume in service["volumes"]] == [environment["NEARSENSE_DATA"]]
    assert environment["SQLITE_TMPDIR"] == environment["NEARSENSE_DATA"]
    assert steps("EXPOSE") == [("EXPOSE", environment["NEARSENSE_PORT"])]
    assert [port.rpartition(":")[2] for port in service["ports"]] == [environment["NEARSENSE_PORT"]]
    assert set(service["build"]["args"]) == variables("ARG").keys()
    assert (ROOT / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DOCKERFILE)


def test_the_image_starts_from_one_release_of_python() -> None:
    ((_, base),) = steps("FROM")
    assert re.fullmatch(r"python:3\.1[1-9]\.\d+-slim-[a-z]+", base)


def test_the_image_takes_the_torch_that_is_tested() -> None:
    (tested,) = re.findall(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert variables("ARG") == {"TORCH": tested, "TORCH_INDEX": ""}


def test_the_image_is_not_run_by_root() -> None:
    ((_, user),) = steps("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    names = [name for name, _ in steps()]
    assert "RUN" not in names[names.index("USER") :]


def test_no_shell_stands_between_docker_and_the_service() -> None:
    assert [*command_of("ENTRYPOINT"), *command_of("CMD")] == ["nearsense", "serve"]
    assert command_of("HEALTHCHECK")[0] == "python"


def test_the_image_holds_no_secret() -> None:
    assert not [name for name in variables("ARG", "ENV") if SECRET_NAMES.search(name)]


def test_the_sources_come_after_what_takes_long() -> None:
    """A changed line of code downloads nothing."""
    order = [value for _, value in steps("RUN", "COPY")]
    sources = order.index("encoder encoder")
    assert order.index("pyproject.toml ./") < sources
    assert [value for value in order[sources:] if "pip" in value] == ["pip install --no-deps --no-build-isolation ."]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("pyproject.toml", True),
        ("LICENSE", True),
        ("encoder/py.typed", True),
        ("service/cli.py", True),
        ("service/Dockerfile", False),
        ("service/__pycache__/cli.cpython-311.pyc", False),
        ("__pycache__/x.pyc", False),
        (".env", False),
        (".git/config", False),
        (".venv/pyvenv.cfg", False),
        ("nearsense-data/nearsense.db", False),
        ("tests/test_docker.py", False),
        ("docker-compose.yml", False),
    ],
)
def test_only_what_the_image_is_made_of_goes_in(path: str, sent: bool) -> None:
    assert is_sent(path) is sent


@pytest.mark.slow
def test_the_image_does_not_serve_without_a_key(image: Image) -> None:
    process = image.start()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "set NEARSENSE_API_KEY" in printed


@pytest.mark.slow
def test_the_image_serves_is_healthy_and_stops(image: Image) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    assert not image.is_healthy(port=port)

    process = image.start(api_key=KEY, host="127.0.0.1", port=port)
    try:
        deadline = time.monotonic() + 60  # the Dockerfile's start period
        while not image.is_healthy(port=port):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
        assert os.stat(f"/proc/{process.pid}").st_uid == image.user  # noqa: PTH116 - the process's, not a file's

        url = f"http://127.0.0.1:{port}"
        assert httpx.post(f"{url}/embed", json={"inputs": "pizza"}).status_code == 401
        with httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=60) as client:
            assert len(client.post("/embed", json={"inputs": "pizza"}).json()[0]) == 256
            documents = [{"id": "one", "text": "Pizza is great."}]
            assert client.post("/collections/c/documents", json=documents).status_code == 201
            examples = [{"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}]
            assert client.put("/classifiers/c", json={"examples": examples}).status_code == 200
            assert client.delete("/collections/c").is_success  # rewrites the database

        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=10)
        assert process.returncode in (0, -signal.SIGTERM), printed  # uvicorn passes on the signal that ended it
    finally:
        process.kill()
        process.communicate()
    written = [file for file in (image.root / "data").rglob("*") if file.is_file()]
    assert written
    assert {file.stat().st_uid for file in written} == {image.user}
