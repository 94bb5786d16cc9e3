"""schemathesis against the OpenAPI document: whatever it makes of the schemas, nothing is a server error.

Bodies that follow the document and bodies that break it. Statuses, content types and documents have to be those that
the document names, and what breaks it has to be refused. CAIRN_LONG=1 tries many more of each.
"""

import os

import live_server
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.serve.http.protocol.openapi import document

schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.timeout(1200 if os.environ.get("CAIRN_LONG") else 120)
EXAMPLES = 1000 if os.environ.get("CAIRN_LONG") else 12
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = [
    operation
    for made in SCHEMA.get_all_operations()
    if (operation := made.ok()).path not in ("/cairn/engine/events", "/cairn/prefill")
]  # one never ends, the other reads MessagePack
quick = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


@pytest.fixture(scope="module")
def small(tiny_folder):
    """Answers of a few tokens, whatever is asked for."""
    with live_server.live(tiny_folder, max_request_tokens=2) as made, requests.Session() as session:
        made.session = session
        yield made
        made.at_rest()


def test_the_document_is_valid_and_names_every_path(small):
    SCHEMA.validate()
    routes = {route.path.replace(":path", "") for route in small.server.config.app.rest.routes}
    assert routes - set(document()["paths"]) == {"/openapi.json"}
    assert set(document()["paths"]) <= routes


def check(server, case, checks):
    response = case.call(base_url=server.url, session=server.session)
    case.validate_response(response, checks=checks)


@pytest.mark.parametrize("operation", OPERATIONS, ids=[one.label for one in OPERATIONS])
def test_whatever_follows_the_document(small, operation):
    @quick
    @given(st.data())
    def run(data):
        case = data.draw(operation.as_strategy())
        if isinstance(case.body, dict):
            case.body["model"] = "tiny"  # else all it would see is that there is no such model
        check(small, case, CHECKS)

    run()


POSTS = [
    one
    for one in OPERATIONS
    if one.method == "post" and "requestBody" in document()["paths"][one.path]["post"]
]


@pytest.mark.parametrize("operation", POSTS, ids=[one.label for one in POSTS])
def test_whatever_breaks_the_document(small, operation):
    mode = schemathesis.GenerationMode.NEGATIVE

    @quick
    @given(st.data())
    def run(data):
        case = data.draw(operation.as_strategy(generation_mode=mode))
        check(small, case, [*CHECKS, negative_data_rejection])

    run()
