"""Text to vectors: text-embeddings-inference's routes, and OpenAI's."""

import base64
import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Query, Request

from service.answers import Json
from service.engine import Embedded
from service.errors import InvalidError, NotFoundError
from service.schemas import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    OpenAIEmbeddingsRequest,
    ReadingOptions,
    SimilarityRequest,
    TokenizeRequest,
)
from service.state import Current, while_connected

router = APIRouter(tags=["text"])
# What answers with an object for each token, or takes one, holds the event loop for as long as that is written.
MAX_TOKENIZED_CHARACTERS = 200_000
MAX_IDS = 100_000


def lost(embedded: Embedded) -> dict[str, str]:
    """Give the headers that say what of the texts was not read; none if nothing was lost."""
    headers = {}
    if any(embedded.truncated):
        headers["x-truncated-inputs"] = str(sum(embedded.truncated))
    if any(embedded.unknown_share):
        headers["x-unknown-token-share"] = f"{max(embedded.unknown_share):.3f}"
    return headers


@router.post("/embed", summary="One vector per text", response_model=list[list[float]])
async def embed(body: EmbedRequest, request: Request, service: Current) -> Json:
    """The header x-truncated-inputs counts the texts whose end was cut off; x-unknown-token-share is the largest share
    of a text that the model's vocabulary lacks. Neither is there when nothing was lost.
    """  # noqa: D205
    embedded = await service.embed(
        request,
        body.inputs,
        normalize=body.normalize is not False,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        truncate=body.truncate is not False,
    )
    return Json(embedded.vectors, headers=lost(embedded))


@router.post("/embed_all", summary="One vector per token", response_model=list[list[Any]])
async def embed_all(
    body: EmbedAllRequest,
    request: Request,
    service: Current,
    offsets: bool = Query(False, description="Give each vector with its token and where that stands in the text."),
) -> Json:
    """Context-aware word vectors, not normalised; those of special tokens are among them."""
    prompt = service.prompt(body.prompt_name) if body.prompt_name is not None else ""
    texts = [prompt + text for text in body.inputs]
    embedded = await while_connected(request, service.engine.embed_tokens(texts))
    truncated = sum(text.truncated for text in embedded)
    if truncated and body.truncate is False:
        index = next(index for index, text in enumerate(embedded) if text.truncated)
        raise InvalidError(
            f"text {index} must have at most {service.encoder.spec.max_length} tokens when it is not to be cut"
        )
    headers = {"x-truncated-inputs": str(truncated)} if truncated else {}
    if not offsets:
        return Json([list(text.vectors) for text in embedded], headers=headers)
    start = len(prompt)
    answer = [
        [
            {"token": token, "start": max(span[0] - start, 0), "stop": max(span[1] - start, 0), "embedding": vector}
            for token, span, vector in zip(text.tokens, text.spans, text.vectors, strict=True)
        ]
        for text in embedded
    ]
    return Json(answer, headers=headers)


@router.post("/tokenize", summary="The tokens of each text", response_model=list[list[dict[str, Any]]])
async def tokenize(body: TokenizeRequest, request: Request, service: Current) -> Json:
    """The whole text, not cut to the model's length."""
    if (count := sum(map(len, body.inputs))) > MAX_TOKENIZED_CHARACTERS:
        raise InvalidError(
            f"inputs must have at most {MAX_TOKENIZED_CHARACTERS:,} characters in all, got {count:,}; "
            "send several requests"
        )
    prompt = service.prompt(body.prompt_name) if body.prompt_name is not None else ""
    tokenized = await while_connected(request, service.engine.tokenize([prompt + text for text in body.inputs]))
    answer = [
        [
            {"id": token_id, "text": token, "special": span[0] == span[1], "start": span[0], "stop": span[1]}
            for token_id, token, span in zip(
                text.input_ids, service.encoder.tokenizer.tokens(text.input_ids), text.spans, strict=True
            )
            if body.add_special_tokens or span[0] != span[1]
        ]
        for text in tokenized
    ]
    return Json(answer)


@router.post("/decode", summary="Token ids back to text", response_model=list[str])
async def decode(body: DecodeRequest, service: Current) -> Json:
    """Ids of this model only."""
    if (count := sum(map(len, body.ids))) > MAX_IDS:
        raise InvalidError(f"ids must be at most {MAX_IDS:,} in all, got {count:,}; send several requests")
    tokenizer = service.encoder.tokenizer
    try:
        return Json([tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in body.ids])
    except ValueError as error:
        raise InvalidError(str(error)) from error


@router.post("/similarity", summary="How alike one text is to each of others", response_model=list[float])
async def similarity(body: SimilarityRequest, request: Request, service: Current) -> Json:
    """Cosines, from -1 to 1."""
    parameters = body.parameters or ReadingOptions()
    embedded = await service.embed(
        request,
        [body.inputs.source_sentence, *body.inputs.sentences],
        prompt_name=parameters.prompt_name,
        truncate=parameters.truncate is not False,
    )
    # Rounding takes the cosine of a text with itself beyond 1.
    cosines = np.clip(embedded.vectors[1:] @ embedded.vectors[0], -1, 1)
    return Json(cosines, headers=lost(embedded))


@router.post("/v1/embeddings", summary="One vector per text, for OpenAI's clients")
async def openai_embeddings(body: OpenAIEmbeddingsRequest, request: Request, service: Current) -> Json:
    """`model` must be the one that is served, by name."""
    if body.model != service.model_id:
        raise NotFoundError(f"the model {body.model!r} is not served; the model here is {service.model_id!r}")
    embedded = await service.embed(request, body.input, dimensions=body.dimensions)
    vectors: list[Any] = list(embedded.vectors)
    if body.encoding_format == "base64":
        vectors = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    used = sum(embedded.tokens_used)
    answer = {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)],
        "model": service.model_id,
        "usage": {"prompt_tokens": used, "total_tokens": used},
    }
    return Json(answer, headers=lost(embedded))


@router.get("/v1/models", summary="The model that is served, for OpenAI's clients")
async def openai_models(service: Current) -> Json:
    """A list of one."""
    model = {"id": service.model_id, "object": "model", "created": int(time.time()), "owned_by": "nearsense"}
    return Json({"object": "list", "data": [model]})
