"""How fast a training step is, as a share of what a large matrix product reaches on this machine.

    python -m benchmarks.training training/runs/small.toml

Steps of the run file's shape on random tokens, and products, in turns; medians. 100 % is the rate of a 2048 × 2048 ×
2048 product in the precision of the step. Counted are 6 floating-point operations for each token and weight of the
layers, and 6 for each scored position and component of the word vectors: what the mathematics needs, not what is done.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from encoder.config import EncoderConfig
from encoder.heads import LanguageModelHead
from encoder.model import Encoder
from training.config import PretrainRun, read_run
from training.objectives import mask_tokens
from training.optimizer import Stepper
from training.pretrain import MaskedLanguageModel, training_operations
from training.progress import choose_precision, measure_matrix_rate

VOCAB_SIZE = 16_000


def main() -> None:
    """Print one line per phase of the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of a round")
    arguments = parser.parse_args()
    run = read_run(arguments.run, PretrainRun)
    shape = run.model
    config = EncoderConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_positions,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
    )
    module = MaskedLanguageModel(Encoder(config), LanguageModelHead(config)).train()
    stepper = Stepper(module, run.optimizer, steps=run.loop.steps)
    generator = np.random.default_rng(0)
    device = torch.device("cpu")
    precision = choose_precision(run.loop.precision, device)
    name = str(precision).removeprefix("torch.")
    print(f"{torch.get_num_threads()} threads, {name}, {sum(p.numel() for p in module.parameters()):,} parameters")
    for phase in run.phases:
        ids = generator.integers(5, VOCAB_SIZE, (phase.batch_tokens // phase.length, phase.length))
        hidden, positions = mask_tokens(
            ids, rate=run.masking_rate, special_ids=range(5), mask_id=4, vocab_size=VOCAB_SIZE, generator=generator
        )
        inputs = {
            "input_ids": torch.from_numpy(hidden),
            "starts": None,
            "positions": torch.from_numpy(positions),
            "targets": torch.from_numpy(ids.ravel()[positions]),
        }
        seconds, rates = [], []
        for round_number in range(arguments.rounds + 1):
            rates.append(measure_matrix_rate(device, precision))
            for _ in range(arguments.steps):
                begun = time.perf_counter()
                with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
                    loss = module(**inputs)["loss"]
                loss.backward()
                stepper.step(0)
                if round_number:  # the first one warms up
                    seconds.append(time.perf_counter() - begun)
        step_s, rate = statistics.median(seconds), statistics.median(rates)
        operations = training_operations(config, ids.size, len(positions))
        print(
            f"length {phase.length}: {ids.size / step_s:,.0f} tokens/s, {operations / step_s / 1e9:,.0f} of "
            f"{rate / 1e9:,.0f} GFLOP/s, {operations / step_s / rate:.1%} of the measured matrix rate"
        )


if __name__ == "__main__":
    main()
