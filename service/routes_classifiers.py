"""Classifiers: teach one from examples, and ask it."""

from dataclasses import asdict
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Path, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from service.answers import Json
from service.classifiers import check_name
from service.routes_text import lost
from service.schemas import NAME_PATTERN, ClassifyRequest, TeachRequest
from service.state import Current

router = APIRouter(tags=["classifiers"])
Name = Annotated[str, Path(json_schema_extra={"pattern": NAME_PATTERN}, examples=["sentiment"])]


@router.get("/classifiers", summary="All classifiers")
async def list_classifiers(service: Current) -> Json:
    """Those of other models included."""
    return Json({"classifiers": [asdict(each) for each in service.classifiers.list()]})


@router.put("/classifiers/{classifier}", summary="Teach a classifier")
async def teach_classifier(classifier: Name, body: TeachRequest, request: Request, service: Current) -> Json:
    """Logistic regression on the embeddings of the examples. A former one of that name serves until it is done."""
    check_name(classifier)
    embedded = await service.embed(request, [example.text for example in body.examples])
    labels = [example.label for example in body.examples]
    taught = await service.classifiers.teach(classifier, embedded.vectors, labels, inverse_regularization=body.C)
    return Json(asdict(taught), headers=lost(embedded))


@router.get("/classifiers/{classifier}", summary="Describe a classifier")
async def describe_classifier(classifier: Name, service: Current) -> Json:
    """Its labels, and what it was made of."""
    return Json(asdict(service.classifiers.describe(classifier)))


@router.delete("/classifiers/{classifier}", summary="Drop a classifier", status_code=204, response_class=Response)
async def drop_classifier(classifier: Name, service: Current) -> Response:
    """For good. A namesake that came with the model serves again."""
    await run_in_threadpool(service.classifiers.drop, classifier)
    return Response(status_code=204)


@router.post("/classify", summary="The label of each text")
async def classify(body: ClassifyRequest, request: Request, service: Current) -> Json:
    """`score` is the probability of `label`, `scores` has those of all labels.

    Those of a classifier that came with the model are calibrated, those of a taught one are not.
    """
    head = service.classifiers.ready(body.classifier)
    embedded = await service.embed(request, body.inputs)
    answer = [
        {
            "label": head.labels[int(np.argmax(row))],
            "score": float(row.max()),
            "scores": {label: float(probability) for label, probability in zip(head.labels, row, strict=True)},
        }
        for row in head.probabilities(embedded.vectors)
    ]
    return Json(answer, headers=lost(embedded))
