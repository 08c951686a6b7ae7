"""python -m training: the nearsense-train command."""

from training.cli import main

main()
