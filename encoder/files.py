"""Directories that appear on disk whole or not at all."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from encoder.config import ModelDirectoryError


@contextmanager
def whole_directory(destination: Path) -> Iterator[Path]:
    """Give an empty directory to write into; it is flushed to disk and gets its name when the block ends well.

    A process that is killed leaves at most a directory whose name begins with a dot.

    Raises:
        ModelDirectoryError: The destination exists.
    """
    if os.path.lexists(destination):
        raise ModelDirectoryError(f"{destination} must not exist yet; remove it or choose another name")
    partial = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            flush(path)
        partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    flush(destination.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
