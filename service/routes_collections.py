"""Stored texts: collections, their documents, and search."""

from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from service.answers import Json
from service.documents import NewDocument
from service.errors import InvalidError, NotFoundError
from service.routes_text import lost
from service.schemas import NAME_PATTERN, DeleteRequest, Documents, SearchRequest
from service.state import Current

router = APIRouter(tags=["collections"])
Name = Annotated[str, Path(json_schema_extra={"pattern": NAME_PATTERN}, examples=["default"])]
DocumentId = Annotated[str, Path(description="1 to 512 bytes of UTF-8 without control characters.")]


@router.get("/collections", summary="All collections")
async def list_collections(service: Current) -> Json:
    """Those of other models included."""
    described = await run_in_threadpool(service.collections.describe_all)
    return Json({"collections": [asdict(each) for each in described]})


@router.put("/collections/{collection}", summary="Make a collection")
async def create_collection(collection: Name, service: Current) -> Json:
    """One that exists already is left as it is."""
    return Json(asdict(await run_in_threadpool(service.collections.create, collection)))


@router.get("/collections/{collection}", summary="Describe a collection")
async def describe_collection(collection: Name, service: Current) -> Json:
    """How many documents it has, and of which model."""
    return Json(asdict(await run_in_threadpool(service.collections.describe, collection)))


@router.delete("/collections/{collection}", summary="Drop a collection", status_code=204, response_class=Response)
async def drop_collection(collection: Name, service: Current) -> Response:
    """With all its documents."""
    await run_in_threadpool(service.collections.drop, collection)
    return Response(status_code=204)


@router.post("/collections/{collection}/documents", summary="Add or replace documents", status_code=201)
async def add_documents(collection: Name, body: Documents, request: Request, service: Current) -> Json:
    """All or none. What was answered 201 is on disk. A collection that does not exist is made."""
    texts = [document.text for document in body]
    documents = [NewDocument(document.text, document.id, document.metadata) for document in body]
    await run_in_threadpool(service.collections.check, collection, documents)  # before the model works for nothing
    embedded = await service.embed(request, texts)
    ids = await run_in_threadpool(service.collections.add, collection, documents, embedded.vectors)
    return Json({"ids": ids}, 201, headers=lost(embedded))


@router.get("/collections/{collection}/documents", summary="List documents")
async def list_documents(
    collection: Name,
    service: Current,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 100,
    after: Annotated[str | None, Query(description="The last id of the page before.")] = None,
) -> Json:
    """In ascending order of their ids."""
    documents = await run_in_threadpool(service.collections.list_documents, collection, limit=limit, after=after)
    return Json({"documents": [asdict(document) for document in documents]})


@router.post("/collections/{collection}/documents/delete", summary="Delete documents")
async def delete_documents(collection: Name, body: DeleteRequest, service: Current) -> Json:
    """Ids that are not there are passed over; the answer counts those that were."""
    return Json({"deleted": await run_in_threadpool(service.collections.delete, collection, body.ids)})


@router.get("/collections/{collection}/documents/{id:path}", summary="One document")
async def get_document(collection: Name, id: DocumentId, service: Current) -> Json:  # noqa: A002 - the API's word
    """Its text and metadata."""
    return Json(asdict(await run_in_threadpool(service.collections.get, collection, id)))


@router.delete("/collections/{collection}/documents/{id:path}", summary="Delete a document", status_code=204)
async def delete_document(collection: Name, id: DocumentId, service: Current) -> Response:  # noqa: A002
    """For good."""
    if not await run_in_threadpool(service.collections.delete, collection, [id]):
        raise NotFoundError(f"there is no document {id!r} in collection {collection}")
    return Response(status_code=204)


@router.post("/search", summary="The nearest documents")
async def search(body: SearchRequest, request: Request, service: Current) -> Json:
    """By a text, a vector of the model's size, or the id of a stored document, which is then found itself, too."""
    headers: dict[str, str] = {}
    if body.query is not None:
        await run_in_threadpool(service.collections.require, body.collection)
        embedded = await service.embed(request, [body.query])
        vector, headers = embedded.vectors[0], lost(embedded)
    elif body.id is not None:
        vector = await run_in_threadpool(service.collections.vector, body.collection, body.id)
    else:
        vector = _unit(body.vector or [], service.encoder.hidden_size)
    results = await run_in_threadpool(
        service.collections.search, body.collection, vector, k=body.k, min_score=body.min_score
    )
    return Json({"results": [asdict(result) for result in results]}, headers=headers)


def _unit(values: list[float], size: int) -> Any:
    """Give a vector of length 1, so that scores are cosines."""
    if len(values) != size:
        raise InvalidError(f"vector must have {size} components, as the model's have, got {len(values)}")
    vector = np.array(values, dtype=np.float64)
    largest = np.abs(vector).max()
    if largest == 0:
        raise InvalidError("vector must have a length other than 0")
    vector /= largest  # or the squares of very large or small components would leave the range of numbers
    return (vector / np.linalg.norm(vector)).astype(np.float32)
