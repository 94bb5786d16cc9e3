"""Endpoints of models that do not generate text: encoders and transcribers."""

from cairn.serve.http.endpoints.cohere import cohere_embed, cohere_rerank
from cairn.serve.http.endpoints.embed import api_embed, api_embeddings, embed, embedding
from cairn.serve.http.endpoints.embeddings import embeddings
from cairn.serve.http.endpoints.rerank import classify, rerank, score
from cairn.serve.http.endpoints.transcriptions import transcriptions, translations
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.service import Service

INSTEAD = {
    "vectors": (
        embeddings,
        rerank,
        score,
        classify,
        embed,
        embedding,
        cohere_embed,
        cohere_rerank,
        api_embed,
        api_embeddings,
    ),
    "transcripts": (transcriptions, translations),
}
KINDS = {"vectors": "a text encoder", "transcripts": "a transcriber of speech"}
PATHS = {
    "vectors": "/v1/embeddings, /v1/rerank, /v1/score, /classify, /v2/embed, /v2/rerank and /api/embed",
    "transcripts": "/v1/audio/transcriptions and /v1/audio/translations",
}


def check_kind(service: Service, handle: object) -> None:
    """Refuse what this model cannot do, with what it can."""
    answers = service.serving.limits.answers
    instead = INSTEAD.get(answers)
    if instead is not None and handle not in instead:
        raise Refusal(
            400,
            f"{service.model} is {KINDS[answers]} and generates nothing; it answers {PATHS[answers]}",
            param="model",
            code="wrong_model",
        )
