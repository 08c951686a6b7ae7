"""How large a batch should be, and how much padding it may hold, by measurement.

    python -m benchmarks.batches STS.tsv [--model DIR] [--threads 2]

For requests of several sizes, the tokens per second under each bound on the padded size of a batch and on its padding.
A padding of 0 is batches of equal length; no bound on it is the usual sorted batches. Medians of interleaved rounds.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.engine import read_pairs
from encoder import TextTokenizer, default_model_dir
from encoder.model_dir import read_spec
from encoder.runtime_torch import TorchRuntime
from encoder.sentence import plan_batches
from encoder.tokenizer import TokenBatch, TokenizedText
from encoder.weights import read_weights

REQUESTS = (8, 32, 100, 500, 2758)
TOKENS = (1024, 2048, 4096)
PADDING = (0, 16, 64, 256, 10**9)


def seconds_of(runtime: TorchRuntime, requests: list[list[TokenizedText]], tokens: int, padding: int) -> float:
    """Give the seconds that the requests take one after another."""
    start = time.perf_counter()
    for texts in requests:
        for rows in plan_batches([len(text.input_ids) for text in texts], max_tokens=tokens, max_padding=padding):
            runtime.embed(TokenBatch.collate([texts[row] for row in rows], pad_token_id=0))
    return time.perf_counter() - start


def main() -> None:
    """Print one table: a row per request size and batch size, a column per bound on padding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sts", type=Path)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model_dir = options.model or default_model_dir()
    spec = read_spec(model_dir)
    runtime = TorchRuntime(spec, read_weights(model_dir, spec.config))
    texts = TextTokenizer(spec).encode(read_pairs(options.sts)[0])
    rng = np.random.default_rng(0)

    print("| texts a request | tokens a batch | " + " | ".join(f"padding ≤ {bound:,}" for bound in PADDING) + " |")
    print("|---" * (2 + len(PADDING)) + "|")
    for size in REQUESTS:
        chosen = [rng.choice(len(texts), size, replace=False) for _ in range(max(1, min(6, 300 // size)))]
        requests = [[texts[row] for row in rows] for rows in chosen]
        total = sum(len(text.input_ids) for request in requests for text in request)
        taken: dict[tuple[int, int], list[float]] = {(tokens, padding): [] for tokens in TOKENS for padding in PADDING}
        for _ in range(options.rounds):
            for bounds, seconds in taken.items():
                seconds.append(seconds_of(runtime, requests, *bounds))
        for tokens in TOKENS:
            speeds = [f"{total / statistics.median(taken[tokens, padding]):,.0f}" for padding in PADDING]
            print(f"| {size:,} | {tokens:,} | {' | '.join(speeds)} |", flush=True)


if __name__ == "__main__":
    main()
