"""`/docs`: the API as a page, made from the OpenAPI document that the server answers under /openapi.json.

    paths -> a section each: what it is for, the fields of its body with their types and ranges, a line to try

No script, and nothing from another server: it opens without a network.
"""

from collections.abc import Mapping
from typing import Any

from cairn.report.page import Markup, element, join, table

RANGES = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
}
HUGE = 10**9  # a bound that says no more than that there is one
HEAD = (
    '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark"><title>Cairn: API</title>'
    '<link rel="icon" href="/web/icon.svg" type="image/svg+xml">'
    '<link rel="stylesheet" href="/web/style/base.css"><link rel="stylesheet" href="/web/style/api.css">'
)
EXAMPLES = {
    "/v1/chat/completions": '{"messages": [{"role": "user", "content": "Hi"}]}',
    "/v1/completions": '{"prompt": "Once upon a time", "max_tokens": 16}',
    "/v1/embeddings": '{"input": "a stone"}',
    "/v1/rerank": '{"query": "a stone", "documents": ["granite", "bread"]}',
    "/v1/messages": '{"max_tokens": 64, "messages": [{"role": "user", "content": "Hi"}]}',
    "/v1/responses": '{"input": "Hi"}',
    "/tokenize": '{"prompt": "a stone"}',
}


def api_page(document: Mapping[str, Any]) -> str:
    operations = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    links = [
        element("li", element("a", f"{method.upper()} {path}", href=f"#{_anchor(method, path)}"))
        for method, path, _ in operations
    ]
    sections = [_section(document, *one) for one in operations]
    about = element(
        "p",
        "Fields that are not given, or null, have their default. Unknown fields are ignored. The same as a document: ",
        element("a", "/openapi.json", href="/openapi.json"),
        ". Clients of Ollama (/api/...) and llama.cpp (/completion, /infill, /props) are answered, too.",
    )
    body = element(
        "main",
        element("p", element("a", "Cairn", href="/")),
        element("h1", "API"),
        about,
        element("nav", element("ul", *links), aria_label="Paths"),
        *sections,
    )
    return f'<!doctype html>\n<html lang="en"><head>{HEAD}</head><body class="api">{body}</body></html>\n'


def _section(
    document: Mapping[str, Any], method: str, path: str, operation: dict[str, Any]
) -> Markup:
    title = (element("b", method.upper()), " ", element("code", path))
    parts = [
        element("h2", *title, id=_anchor(method, path)),
        element("p", operation["summary"]),
    ]
    rows = [
        [parameter["name"], parameter["in"], _kind(parameter["schema"])]
        for parameter in operation.get("parameters", ())
    ]
    rows += [[field, "body", kind] for field, kind in _fields(document, operation)]
    if rows:
        parts.append(table(["name", "in", "type"], rows))
    if path in EXAMPLES:
        curl = f"curl http://127.0.0.1:8000{path} -H 'content-type: application/json' -d '{EXAMPLES[path]}'"
        parts.append(element("pre", element("code", curl)))
    return element("section", join(parts))


def _fields(document: Mapping[str, Any], operation: dict[str, Any]) -> list[tuple[str, str]]:
    content = operation.get("requestBody", {}).get("content", {})
    schema = next(iter(content.values()), {}).get("schema", {})
    if "$ref" in schema:
        schema = document["components"]["schemas"][_last(schema["$ref"])]
    required = set(schema.get("required", ()))
    return [
        (name, _kind(field) + (", required" if name in required else ""))
        for name, field in schema.get("properties", {}).items()
    ]


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema in a few words."""
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    if "$ref" in schema:
        return _last(schema["$ref"])
    kind = str(schema.get("type", "any value"))
    if kind == "array" and "items" in schema:
        kind = f"list of {_kind(schema['items'])}"
    bounds = [
        words.format(schema[key])
        for key, words in RANGES.items()
        if key in schema and abs(schema[key]) < HUGE
    ]
    return ", ".join([kind, *bounds])


def _last(reference: str) -> str:
    return reference.rpartition("/")[2]


def _anchor(method: str, path: str) -> str:
    return f"{method}{path}".replace("/", "-").replace("{", "").replace("}", "")
