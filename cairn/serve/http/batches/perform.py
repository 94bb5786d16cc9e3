"""A line of a batch, performed as if a client had sent it: with the checks, the ledger and the metrics of a request."""

import asyncio
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Scope

from cairn.serve.http.batches.runner import Perform, Performed

HOLDER = "cairn.holder"  # of a scope that the server made itself: whose request it is


def performer(applications: Mapping[str, ASGIApp]) -> Perform:
    """`applications` answer a path each."""

    async def perform(url: str, body: bytes, holder: str, id: str) -> Performed:
        scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": url,
            "query_string": b"",
            "headers": [(b"x-request-id", id.encode())],
            HOLDER: holder,
        }
        messages: list[Message] = []
        unread: list[Message] = [{"type": "http.request", "body": body}]

        async def receive() -> Message:
            if not unread:
                await asyncio.Event().wait()  # there is no client that could leave
            return unread.pop()

        async def send(message: Message) -> None:
            messages.append(message)

        await applications[url](scope, receive, send)
        content = b"".join(message.get("body", b"") for message in messages)
        return Performed(messages[0]["status"], content)

    return perform
