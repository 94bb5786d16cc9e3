"""What a server says about itself: its models, health, version, metrics and the description of its interface."""

from pathlib import Path

from starlette.responses import Response

from cairn import __version__
from cairn.core.metrics import CONTENT_TYPE
from cairn.serve.http.protocol.answers import ModelCard, ModelList, Version
from cairn.serve.http.protocol.openapi import document
from cairn.serve.http.protocol.refusal import JSON
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.health import HOPELESS, READY
from cairn.serve.http.server.service import Service
from cairn.serve.serving import ServedModel


async def models(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(ModelList(data=[_card(service, one) for one in [*service.serving.models.values()]]))


async def model(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(_card(service, service.served(call.scope["path_params"]["name"])))


def _card(service: Service, served: ServedModel) -> ModelCard:
    card = ModelCard(
        id=served.name, created=service.created, max_model_len=service.serving.limits.context
    )
    if served.adapter:
        card.parent, card.root = served.parent, Path(served.root).name
    return card


async def health(service: Service, call: Call, body: bytes) -> JSON:
    found = service.health()
    return JSON(found, 200 if found.status in READY else 503)


async def live(service: Service, call: Call, body: bytes) -> JSON:
    found = service.health()
    return JSON(found, 503 if found.status in HOPELESS else 200)


async def version(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(Version(__version__))


async def metrics(service: Service, call: Call, body: bytes) -> Response:
    return Response(service.metrics_text(), media_type=CONTENT_TYPE)


async def openapi(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(document())
