"""State on disk that a killed run goes on from: whole or not at all, never pickle."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
from torch import Tensor

from encoder.files import whole_directory
from training.config import RunError

_DONE = "state.json"
_ROWS_AT_ONCE = 1 << 22


def save_state(directory: Path, tensors: dict[str, Tensor], progress: dict[str, Any]) -> None:
    """Write a state in place of the last one, which stays until this one is complete on disk.

    Args:
        directory: Where states are kept.
        tensors: Weights and the optimiser's moments.
        progress: What else a restart needs, with "step"; JSON.
    """
    final = directory / f"{progress['step']:09d}"
    shutil.rmtree(final, ignore_errors=True)
    with whole_directory(final) as partial:
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        safetensors.torch.save_file(contiguous, partial / "tensors")
        (partial / _DONE).write_text(json.dumps(progress))
    for old in directory.iterdir():
        if old != final:
            shutil.rmtree(old)


def load_state(directory: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Read the last complete state; None if there is none.

    Raises:
        RunError: It is damaged.
    """
    states = sorted(directory.glob("[0-9]*")) if directory.is_dir() else []
    if not states:
        return None
    try:
        progress = json.loads((states[-1] / _DONE).read_text())
        return safetensors.torch.load_file(states[-1] / "tensors"), progress
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise RunError(f"the state in {states[-1]} is damaged ({error}); remove it to start anew") from error


def differences(former: Any, now: Any, where: str = "") -> Iterator[str]:
    """Tell what is not the same in two nested descriptions, each by its path: "optimizer.rate was 0.1, is 0.2"."""
    if isinstance(former, list) and isinstance(now, list) and len(former) == len(now):
        former, now = dict(enumerate(former)), dict(enumerate(now))
    if isinstance(former, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*former, *now]):
            yield from differences(former.get(key), now.get(key), f"{where}.{key}" if where else str(key))
    elif former != now:
        yield f"{where} was {former!r}, is {now!r}"


def fingerprint(*arrays: np.ndarray) -> str:
    """Name what arrays hold. They are read in parts, since they may be larger than memory."""
    hasher = hashlib.blake2b(digest_size=8)
    for array in arrays:
        for start in range(0, len(array), _ROWS_AT_ONCE):
            hasher.update(array[start : start + _ROWS_AT_ONCE].tobytes())
    return hasher.hexdigest()
