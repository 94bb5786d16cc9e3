"""POST /v1/rerank, /score and /classify: how well texts answer a query, and which labels they have.

    /v1/rerank   a query and documents -> documents, best first                      as Jina's clients ask
                 a query and texts -> a list of them, best first                as those of Text Embeddings Inference
    /score       text_1 and text_2, one or several -> a score for each pair          as vLLM's clients ask
    /classify    texts -> the probability of each label

Cross-encoders and rerankers score a pair in one pass; other models have the cosine of two embeddings
(`serve/text_vectors`). Scores of pairs lie between 0 and 1, cosines between -1 and 1.
"""

import asyncio
from typing import Literal

import msgspec

from cairn.serve.http.endpoints.embeddings import (
    EmbeddingUsage,
    encode_all,
    longest_text,
    most_inputs,
    pool,
)
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.sampling import AtLeastOne, Priority
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import LONG_TEXT, Service
from cairn.serve.text_vectors import Pair


class RerankDocument(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """POST /v1/rerank"""

    query: str
    documents: list[str | RerankDocument] | None = None
    texts: list[str] | None = None  # in place of documents: the answer is a list then
    model: str | None = None
    top_n: AtLeastOne | None = None
    return_documents: bool | None = None  # as by default
    return_text: bool | None = None  # of texts; not by default
    truncate: bool | None = None  # texts: as truncate_prompt_tokens -1
    instruction: str | None = None  # what counts as an answer, for rerankers that take one
    truncate_prompt_tokens: int | None = None  # cut documents; -1: to what the model reads
    priority: Priority | None = None
    user: str | None = None


class RerankResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: RerankDocument | None = None


class RankedText(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Result in the format of Text Embeddings Inference."""

    index: int
    score: float
    text: str | None = None


class RerankList(msgspec.Struct, kw_only=True):
    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage


class ScoreRequest(msgspec.Struct, kw_only=True):
    """POST /score: one text_1 against every text_2, or as many of one as of the other."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: Priority | None = None
    user: str | None = None


class Score(msgspec.Struct, kw_only=True):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    model: str
    data: list[Score]
    usage: EmbeddingUsage


class ClassifyRequest(msgspec.Struct, kw_only=True):
    """POST /classify"""

    input: str | list[str]
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: Priority | None = None
    user: str | None = None


class Classification(msgspec.Struct, kw_only=True):
    index: int
    label: str  # the likeliest
    probs: list[float]  # of all labels, in the model's order
    num_classes: int


class ClassificationList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    model: str
    data: list[Classification]
    usage: EmbeddingUsage


async def rerank(service: Service, call: Call, body: bytes) -> JSON:
    return await reranked(service, call, decode(body, RerankRequest))


async def reranked(service: Service, call: Call, payload: RerankRequest) -> JSON:
    model = service.check_model(payload.model)
    field = "documents" if payload.texts is None else "texts"
    documents = _documents(payload)
    _check_count(service, documents, field)
    pairs = [Pair(payload.query, document) for document in documents]
    scores, usage = await _scores(service, call, pairs, payload, field, model)
    order = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[: payload.top_n]
    if payload.texts is not None:
        returned = payload.return_text is True
        return JSON(
            [
                RankedText(index=at, score=scores[at], text=documents[at] if returned else None)
                for at in order
            ]
        )
    returned = payload.return_documents is not False
    results = [
        RerankResult(
            index=at,
            relevance_score=scores[at],
            document=RerankDocument(text=documents[at]) if returned else None,
        )
        for at in order
    ]
    return JSON(RerankList(id=call.id, model=model, results=results, usage=usage))


def _documents(payload: RerankRequest) -> list[str]:
    """Documents from either of the two field names."""
    if payload.texts is None and payload.documents is None:
        raise Refusal(400, "documents is missing", param="documents", code="missing_field")
    if payload.texts is not None and payload.documents is not None:
        raise Refusal(400, "documents and texts are given; give one of them", param="texts")
    if payload.texts is not None:
        if payload.truncate and payload.truncate_prompt_tokens is None:
            payload.truncate_prompt_tokens = -1
        documents = payload.texts
    else:
        documents = [one if isinstance(one, str) else one.text for one in payload.documents or ()]
    if not documents:
        field = "documents" if payload.texts is None else "texts"
        raise Refusal(400, f"{field} is an empty list", param=field)
    return documents


async def score(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, ScoreRequest)
    model = service.check_model(payload.model)
    first = [payload.text_1] if isinstance(payload.text_1, str) else payload.text_1
    second = [payload.text_2] if isinstance(payload.text_2, str) else payload.text_2
    _check_count(service, second, "text_2")
    if len(first) == 1:
        first = first * len(second)
    if not second or len(first) != len(second):
        message = (
            f"text_1 has {len(first)} texts and text_2 has {len(second)}; "
            "give one text_1 for all, or equally many"
        )
        raise Refusal(400, message, param="text_2")
    pairs = [Pair(one, two) for one, two in zip(first, second, strict=True)]
    scores, usage = await _scores(service, call, pairs, payload, "text_2", model)
    data = [Score(index=at, score=value) for at, value in enumerate(scores)]
    return JSON(ScoreList(model=model, data=data, usage=usage))


async def classify(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, ClassifyRequest)
    model, vectors = service.check_model(payload.model), service.serving.vectors
    classifier = vectors.classifier
    if classifier is None:
        message = f"{model} has no head that classifies texts"
        raise Refusal(400, message, param="model", code="no_classifier")
    texts = [payload.input] if isinstance(payload.input, str) else payload.input
    if not texts:
        raise Refusal(400, "input is an empty list", param="input")
    most = longest_text(service, payload.truncate_prompt_tokens)
    read = await encode_all(service, texts, "input", most, most_inputs(service))
    pooled_BD, tokens = await pool(
        service, call, read, classifier.pooling, model, payload.priority or 0
    )
    data = [
        Classification(
            index=at,
            label=classifier.labels[int(probs_L.argmax())],
            probs=probs_L.tolist(),
            num_classes=len(classifier.labels),
        )
        for at, probs_L in enumerate(vectors.probabilities(pooled_BD))
    ]
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return JSON(ClassificationList(model=model, data=data, usage=usage))


def _check_count(service: Service, texts: list[str], field: str) -> None:
    """Check the number of texts before they are paired with the query."""
    limit = most_inputs(service)
    if len(texts) >= limit:  # cosines need the query beside the documents
        message = f"{field} holds {len(texts)} entries; at most {limit - 1} fit into one request"
        raise Refusal(400, message, param=field)


async def _scores(
    service: Service,
    call: Call,
    pairs: list[Pair],
    payload: RerankRequest | ScoreRequest,
    field: str,
    model: str,
) -> tuple[list[float], EmbeddingUsage]:
    most = longest_text(service, payload.truncate_prompt_tokens)
    if most is None:
        for pair in pairs:
            service.check_length(pair.query, "query")
            service.check_length(pair.document, field)
    make, task = service.serving.vectors.score_inputs, payload.instruction
    if sum(len(pair.document) for pair in pairs) > LONG_TEXT:
        inputs = await asyncio.to_thread(make, pairs, most, task)
    else:
        inputs = make(pairs, most, task)
    longest, room = max(len(text.ids) for text in inputs.texts), service.serving.limits.longest_text
    if longest > room:
        message = f"a query or one of {field} has {longest} tokens, the model reads {room}"
        code = "context_length_exceeded"
        raise Refusal(
            400, f"{message}; truncate_prompt_tokens = -1 cuts it", param=field, code=code
        )
    pooled_BD, tokens = await pool(
        service, call, inputs.texts, inputs.pooling, model, payload.priority or 0
    )
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return inputs.scores(pooled_BD), usage
