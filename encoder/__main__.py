"""How alike are some texts? The first thing to run, and the shortest use of this package.

python -m encoder "Pizza is great." "Pizza is awesome."
"""

import argparse
import sys
from pathlib import Path

from encoder.model_dir import default_model_dir
from encoder.sentence import SentenceEncoder


def main(arguments: list[str] | None = None) -> int:
    """Print the similarity of each pair of texts; exit status 2 when that cannot be done."""
    parser = argparse.ArgumentParser(prog="python -m encoder", description="Print how alike texts are, from -1 to 1.")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="two texts or more")
    parser.add_argument("--model", type=Path, metavar="DIR", help="model directory (default: the installed one)")
    options = parser.parse_args(arguments)
    if len(options.texts) < 2:
        parser.error("give two texts or more")
    try:
        encoder = SentenceEncoder.load(options.model or default_model_dir())
        vectors = encoder.encode(options.texts)
    except (ArithmeticError, ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    for row, first in enumerate(options.texts):
        for column, second in enumerate(options.texts[row + 1 :], start=row + 1):
            print(f"{vectors[row] @ vectors[column]:.4f}  {first!r}  {second!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
