"""What the routes work with: one service's engine, store, classifiers and counters, opened and closed together."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

from fastapi import Depends, Request

from encoder import SentenceEncoder, default_model_dir
from encoder.classifier import read_heads
from service.classifiers import Classifiers
from service.collection import Collections
from service.engine import Embedded, Engine
from service.errors import ClientGoneError, InvalidError
from service.metrics import Metrics
from service.settings import Settings
from service.store import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Service:
    """Everything a request needs."""

    settings: Settings
    model_id: str
    encoder: SentenceEncoder
    engine: Engine
    collections: Collections
    classifiers: Classifiers
    metrics: Metrics

    async def embed(
        self,
        request: Request,
        texts: list[str],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool = True,
    ) -> Embedded:
        """Embed the texts of a request, unless its client leaves. Raises what `Engine.embed` does, or InvalidError."""
        prompt = None
        if prompt_name is not None:
            prompt = self.prompt(prompt_name)
        work = self.engine.embed(texts, normalize=normalize, dimensions=dimensions, prompt=prompt, truncate=truncate)
        embedded = await while_connected(request, work)
        self.metrics.count(embedded)
        return embedded

    def prompt(self, name: str) -> str:
        """Give a prompt of the model.

        Raises:
            InvalidError: The model has none of that name.
        """
        prompts = self.encoder.spec.prompts
        if name not in prompts:
            raise InvalidError(f"prompt_name must be one of {sorted(prompts)}, got {name!r}")
        return prompts[name]


@asynccontextmanager
async def open_service(settings: Settings, metrics: Metrics) -> AsyncIterator[Service]:
    """Load the model, open the data directory, and close both at the end.

    Raises:
        ModelDirectoryError: The model cannot be used.
        ConflictError: Another process uses the data directory.
        NotReadyError: The data directory is damaged.
    """
    model_dir = settings.model or default_model_dir()
    encoder = await asyncio.to_thread(_load, model_dir)
    shipped = await asyncio.to_thread(read_heads, model_dir)
    store = await asyncio.to_thread(Store.open, settings.data)
    try:
        collections = Collections(store, fingerprint=encoder.fingerprint, dimensions=encoder.hidden_size)
        await asyncio.to_thread(collections.warm_up)
        engine = Engine(
            encoder,
            max_batch_tokens=max(settings.max_batch_tokens, encoder.spec.max_length),
            max_queue_tokens=settings.max_queue_tokens,
            workers=settings.threads,
            express=True,
        )
        metrics.watch(engine)
        try:
            yield Service(
                settings=settings,
                model_id=model_dir.resolve().name,
                encoder=encoder,
                engine=engine,
                collections=collections,
                classifiers=Classifiers(
                    settings.data / "classifiers", fingerprint=encoder.fingerprint, shipped=shipped
                ),
                metrics=metrics,
            )
        finally:
            await engine.close()
    finally:
        await asyncio.to_thread(store.close)


def _load(model_dir: Path) -> SentenceEncoder:
    # Batches of one thread each, side by side, are faster than batches spread over threads: benchmarks/README.md.
    return SentenceEncoder.load(model_dir, threads=1)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Wait for work, and give it up when the client leaves.

    Raises:
        ClientGoneError: It left. And whatever the work raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError("the client closed the connection")
    finally:
        for each in (task, watch):
            each.cancel()


async def _left(request: Request) -> None:
    """Return when the client has closed the connection. Its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def get_service(request: Request) -> Service:
    """Give the service of the app that a request came to."""
    service: Service = request.app.state.service
    return service


Current = Annotated[Service, Depends(get_service)]
