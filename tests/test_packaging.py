"""The wheel: built, installed with the oldest releases we claim, run from an empty directory."""

import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from serving import Server

from encoder import SentenceEncoder

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str | Path, cwd: Path) -> str:
    finished = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a source distribution, as whoever installs from one builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def oldest(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and the lowest release of each dependency that it allows."""
    folder = tmp_path_factory.mktemp("oldest")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    bounds = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["train"]]
    lowest = [re.sub(r">=([\d.]+)", r"==\1.*", bound) for bound in bounds]
    lowest = [f"torch=={torch.__version__.partition('+')[0]}" if pin.startswith("torch") else pin for pin in lowest]
    run(python, "-m", "pip", "install", "--quiet", *lowest, f"{wheel}", cwd=folder)
    return python


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"encoder", "service", "training", f"nearsense-{PROJECT['version']}.dist-info"}
    assert "encoder/py.typed" in names
    assert "encoder/pretrained/nearsense-en-small/model.safetensors" in names
    assert "training/runs/small.toml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_lower_bound_of_torch_is_what_is_tested() -> None:
    (bound,) = (each for each in PROJECT["optional-dependencies"]["train"] if each.startswith("torch"))
    assert torch.__version__.startswith(bound.removeprefix("torch>="))


def test_runs_with_the_oldest_releases_from_an_empty_directory(
    oldest: Path, shipped: SentenceEncoder, tmp_path: Path
) -> None:
    texts = ["Pizza is great.", "Pizza is awesome."]
    first, second = shipped.encode(texts)
    printed = run(oldest, "-m", "encoder", *texts, cwd=tmp_path)
    assert float(printed.split()[0]) == pytest.approx(float(first @ second), abs=0.006)
    assert list(tmp_path.iterdir()) == []


def test_serves_with_the_oldest_releases(oldest: Path, tmp_path: Path) -> None:
    server = Server(tmp_path / "data", python=str(oldest))
    try:
        assert len(server.client.post("/embed", json={"inputs": "pizza"}).json()[0]) == 256
        documents = [{"id": "one", "text": "Pizza is great."}]
        assert server.client.post("/collections/c/documents", json=documents).status_code == 201
        assert (
            server.client.post("/search", json={"query": "pasta", "collection": "c"}).json()["results"][0]["id"]
            == "one"
        )
        examples = [{"text": "good", "label": "yes"}, {"text": "bad", "label": "no"}]
        assert server.client.put("/classifiers/c", json={"examples": examples}).status_code == 200
        assert server.client.get("/docs/assets/swagger-ui.css").status_code == 200
    finally:
        server.close()
