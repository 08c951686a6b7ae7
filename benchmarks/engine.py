"""Sentences to vectors: our speed and quality beside sentence-transformers', the same weights, threads and texts.

    python -m benchmarks.engine STS.tsv [--model DIR] [--threads 2] [--rounds 5]

STS.tsv is the STS-Benchmark test split: tab-separated, with a header naming score, sentence1 and sentence2. The sides
take turns within one run, and each figure is the median of the rounds.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer

from encoder import SentenceEncoder, default_model_dir

Encode = Callable[[list[str]], np.ndarray]


def read_pairs(file: Path) -> tuple[list[str], np.ndarray]:
    """Give the first sentences, then the second ones, and the scores of the pairs."""
    header, *rows = (line.split("\t") for line in file.read_text(encoding="utf-8").splitlines())
    first, second, score = (header.index(name) for name in ("sentence1", "sentence2", "score"))
    scores = np.array([float(row[score]) for row in rows])
    return [row[first] for row in rows] + [row[second] for row in rows], scores


def sides(model_dir: Path) -> dict[str, Encode]:
    """Give what is compared, the reference first."""

    def reference(dtype: torch.dtype) -> Encode:
        model = SentenceTransformer(str(model_dir), device="cpu", model_kwargs={"dtype": dtype})
        return model.encode

    return {
        "sentence-transformers float32": reference(torch.float32),
        "sentence-transformers bfloat16": reference(torch.bfloat16),
        "nearsense torch float32": SentenceEncoder.load(model_dir).encode,
        "nearsense torch bfloat16": SentenceEncoder.load(model_dir, precision="bfloat16").encode,
    }


def measure(
    encoders: dict[str, Encode], texts: list[str], rounds: int
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Give the median seconds of each side, which take turns, and its vectors."""
    vectors = {name: encode(texts) for name, encode in encoders.items()}  # also warms up
    seconds: dict[str, list[float]] = {name: [] for name in encoders}
    for _ in range(rounds):
        for name, encode in encoders.items():
            start = time.perf_counter()
            encode(texts)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in seconds.items()}, vectors


def main() -> None:
    """Print one row per side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sts", type=Path)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model_dir = options.model or default_model_dir()
    texts, scores = read_pairs(options.sts)
    tokenizer = SentenceEncoder.load(model_dir).tokenizer
    tokens = sum(len(text.input_ids) for text in tokenizer.encode(texts))

    seconds, vectors = measure(sides(model_dir), texts, options.rounds)
    base_name = next(iter(seconds))
    print(f"{len(texts)} sentences, {tokens} tokens, {options.threads} threads, median of {options.rounds} rounds\n")
    print(
        "| | tokens/s | ratio | STS-B Spearman × 100 | least cosine | largest difference |\n|---|---|---|---|---|---|"
    )
    for name, taken in seconds.items():
        first, second = np.split(vectors[name], 2)
        spearman = 100 * spearmanr((first * second).sum(axis=1), scores).statistic
        cosine = (vectors[name] * vectors[base_name]).sum(axis=1).min()
        difference = np.abs(vectors[name] - vectors[base_name]).max()
        speed, ratio = tokens / taken, seconds[base_name] / taken
        print(f"| {name} | {speed:,.0f} | {ratio:.2f} | {spearman:.2f} | {cosine:.6f} | {difference:.1e} |")


if __name__ == "__main__":
    main()
