"""The `nearsense` command."""

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from pydantic import ValidationError

from service.app import create_app, with_readable_failures
from service.settings import Settings

main = typer.Typer(help="Sentence embeddings that you own.", no_args_is_help=True, pretty_exceptions_enable=False)


@main.callback()
def _commands() -> None:
    """Sentence embeddings that you own."""


@main.command()
def serve(
    model: Annotated[Path | None, typer.Option(help="Model directory; by default the one that is installed.")] = None,
    data: Annotated[Path | None, typer.Option(help="Directory of collections and classifiers.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; any but loopback needs a key.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    threads: Annotated[int | None, typer.Option(help="Processor threads for the model.")] = None,
) -> None:
    """Serve over HTTP. Every setting is also an environment variable, such as NEARSENSE_PORT; see the README.

    Example: nearsense serve --data ./data --port 8000
    """
    given: dict[str, Any] = {"model": model, "data": data, "host": host, "port": port, "threads": threads}
    try:
        settings = Settings(**{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        for each in error.errors():
            where = "".join(f"{step}: " for step in each["loc"])
            print(f"error: {where}{each['msg'].removeprefix('Value error, ')}", file=sys.stderr)
        raise typer.Exit(2) from None
    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    server = uvicorn.Server(
        uvicorn.Config(
            with_readable_failures(create_app(settings)),
            host=settings.host,
            port=settings.port,
            log_level=settings.log_level,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=30,
        )
    )
    server.run()
    if not server.started:
        raise typer.Exit(1)
