"""python -m service: the `nearsense` command."""

from service.cli import main

main(prog_name="nearsense")
