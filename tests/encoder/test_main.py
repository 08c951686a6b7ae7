"""The first thing a reader runs."""

import subprocess
import sys

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "encoder", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_prints_the_similarity_of_each_pair() -> None:
    finished = run("Pizza is great.", "Pizza is awesome.", "The bank lent money.")
    assert finished.returncode == 0
    rows = [line.split("  ") for line in finished.stdout.splitlines()]
    assert [row[1:] for row in rows] == [
        ["'Pizza is great.'", "'Pizza is awesome.'"],
        ["'Pizza is great.'", "'The bank lent money.'"],
        ["'Pizza is awesome.'", "'The bank lent money.'"],
    ]
    assert float(rows[0][0]) > 0.9
    assert float(rows[1][0]) < 0.2
    assert finished.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: TEXT"),
        (["alone"], "give two texts or more"),
        (["a", "b", "--model", "/nowhere"], "error: a model directory must hold config.json; /nowhere/config.json"),
        (["a", "\udce4"], "error: text 1 must be Unicode text, got the lone surrogate U+DCE4 at character 0"),
    ],
)
def test_says_what_is_wrong(arguments: list[str], message: str) -> None:
    finished = run(*arguments)
    assert finished.returncode == 2
    assert message in finished.stderr
    assert "Traceback" not in finished.stderr


def test_cuts_long_texts_and_says_so() -> None:
    finished = run("pizza " * 300, "pizza")
    assert finished.returncode == 0
    assert "1 of 2 texts were cut to 256 tokens" in finished.stderr
