"""schemathesis against the OpenAPI document: whatever it makes of the schemas, nothing is a server error.

Bodies that follow the document and bodies that break it. Statuses, content types and documents have to be those that
the document names, and what breaks it has to be refused. CAIRN_EXAMPLES sets how many requests are made for each test
(100: more than 10,000 in all). schemathesis takes seconds to import, so only the process that runs these tests does it.
"""

import os
from types import SimpleNamespace

import live_server
import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cairn.serve.http.protocol.openapi import document
from cairn.serve.http.server.paths import ALIASES, PATHS

EXAMPLES = int(os.environ.get("CAIRN_EXAMPLES") or (1000 if os.environ.get("CAIRN_LONG") else 12))
pytestmark = pytest.mark.timeout(120 + 2 * EXAMPLES)
# Two never end, and one reads MessagePack.
UNTRIED = ("/cairn/engine/events", "/cairn/pulse", "/cairn/prefill")
DESCRIBED = {
    f"{method.upper()} {path}": described
    for path, methods in document()["paths"].items()
    for method, described in methods.items()
    if path not in UNTRIED and method in ("get", "post", "put", "delete")
}
POSTS = [name for name in DESCRIBED if name[:5] == "POST " and "requestBody" in DESCRIBED[name]]
quick = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)


def test_every_path_of_the_server_is_in_the_document():
    served = {f"{method} {path.replace(':path', '')}" for method, path, _ in PATHS}
    written = {
        f"{method.upper()} {path}"
        for path, methods in document()["paths"].items()
        for method in methods
    }
    assert served - {"GET /openapi.json"} == written


@pytest.fixture(scope="module")
def tool():
    """The schema as schemathesis reads it, its operations by name, and what it checks."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    schema = schemathesis.openapi.from_dict(document())
    made = [operation.ok() for operation in schema.get_all_operations()]
    return SimpleNamespace(
        schema=schema,
        operations={one.label: one for one in made if one.path not in UNTRIED},
        negative=schemathesis.GenerationMode.NEGATIVE,
        rejects=checks.negative_data_rejection,
        checks=[
            not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
    )


@pytest.fixture(scope="module")
def small(tiny_folder):
    """Answers of a few tokens, whatever is asked for."""
    with live_server.live(tiny_folder, max_request_tokens=2) as made, requests.Session() as session:
        made.session = session
        yield made
        made.at_rest()


def test_the_document_is_valid_and_names_every_path(small, tool):
    tool.schema.validate()
    assert set(tool.operations) == set(DESCRIBED)
    routes = {route.path.replace(":path", "") for route in small.server.config.app.rest.routes}
    assert routes - set(document()["paths"]) == {"/openapi.json", *ALIASES}
    assert set(document()["paths"]) <= routes


def check(server, case, checks):
    response = case.call(base_url=server.url, session=server.session)
    case.validate_response(response, checks=checks)


@pytest.mark.parametrize("name", DESCRIBED)
def test_whatever_follows_the_document(small, tool, name):
    @quick
    @given(st.data())
    def run(data):
        case = data.draw(tool.operations[name].as_strategy())
        if isinstance(case.body, dict):
            case.body["model"] = "tiny"  # else all it would see is that there is no such model
        check(small, case, tool.checks)

    run()


@pytest.mark.parametrize("name", POSTS)
def test_whatever_breaks_the_document(small, tool, name):
    @quick
    @given(st.data())
    def run(data):
        case = data.draw(tool.operations[name].as_strategy(generation_mode=tool.negative))
        check(small, case, [*tool.checks, tool.rejects])

    run()
