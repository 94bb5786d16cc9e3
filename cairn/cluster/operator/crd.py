"""The CRDs of the operator, from the same classes that read the files: structural schemas and CEL rules. Pure.

msgspec's JSON schema is 2020-12 with references; Kubernetes takes OpenAPI 3.0 without them. Rules that a schema cannot
say are CEL; servers before 1.25 do not know it (`rules=False`), and there the condition Valid says the same.
"""

from typing import Any

import msgspec

from cairn.cluster.operator.objects import GROUP, VERSION, Object, plural

CONDITION: Object = {
    "type": "object",
    "required": ["type", "status", "reason", "lastTransitionTime"],
    "properties": {
        "type": {"type": "string"},
        "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
        "reason": {"type": "string"},
        "message": {"type": "string"},
        "observedGeneration": {"type": "integer", "format": "int64"},
        "lastTransitionTime": {"type": "string", "format": "date-time"},
    },
}


class CelRule(msgspec.Struct, frozen=True):
    """A CEL expression over `self` at a place in the spec, such as "servers[]"."""

    at: str
    rule: str
    message: str


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """Definition of a custom resource kind."""

    kind: str
    short: str
    spec: type[msgspec.Struct]
    more: type[msgspec.Struct] | None = None  # fields beside those of `spec`
    without: tuple[str, ...] = ()  # fields of `spec` that metadata has
    rules: tuple[CelRule, ...] = ()
    limits: tuple[
        tuple[str, int], ...
    ] = ()  # entries of a list: the cost of a rule has to be bounded
    status: Object = {}  # properties, beside conditions and observedGeneration
    columns: tuple[tuple[str, str], ...] = ()  # of `kubectl get`: name and path
    scale: Object | None = None


def crd(definition: Definition, rules: bool = True) -> Object:
    name = plural(definition.kind)
    version: Object = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": _schema(definition, rules)},
        "subresources": {"status": {}} | ({"scale": definition.scale} if definition.scale else {}),
        "additionalPrinterColumns": [
            {"name": title, "type": "string", "jsonPath": path}
            for title, path in (
                ("Ready", '.status.conditions[?(@.type=="Ready")].status'),
                *definition.columns,
            )
        ]
        + [{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{name}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": definition.kind,
                "plural": name,
                "singular": definition.kind.lower(),
                "shortNames": [definition.short],
                "categories": ["cairn"],
            },
            "versions": [version],
        },
    }


def _schema(definition: Definition, rules: bool) -> Object:
    spec = structural(definition.spec)
    if definition.more:
        spec["properties"] |= structural(definition.more)["properties"]
    for field in definition.without:
        del spec["properties"][field]
    required = [one for one in spec.get("required", []) if one not in definition.without]
    spec.pop("required", None)
    if required:
        spec["required"] = required
    for path, most in definition.limits:
        at(spec, path)["maxItems"] = most
    for one in definition.rules if rules else ():
        place = at(spec, one.at)
        said = {"rule": one.rule, "message": one.message}
        place.setdefault("x-kubernetes-validations", []).append(said)
    conditions = {
        "type": "array",
        "items": CONDITION,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
    }
    observed = {"type": "integer", "format": "int64"}
    fields = {"conditions": conditions, "observedGeneration": observed, **definition.status}
    return {
        "type": "object",
        "required": ["spec"],
        "properties": {"spec": spec, "status": {"type": "object", "properties": fields}},
    }


def at(schema: Object, path: str) -> Object:
    """The schema at "servers[].args"; "" is the spec itself."""
    for word in path.split(".") if path else ():
        schema = schema["properties"][word.removesuffix("[]")]
        if word.endswith("[]"):
            schema = schema["items"]
    return schema


def structural(of: type[msgspec.Struct]) -> Object:
    """The schema of a class, in the form that Kubernetes takes."""
    whole = msgspec.json.schema(of)
    return _inline(whole, whole.get("$defs", {}))


def _inline(part: Any, defs: Object) -> Any:
    if isinstance(part, list):
        return [_inline(one, defs) for one in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return _inline(defs[part["$ref"].rpartition("/")[2]], defs)
    if "anyOf" in part:
        return _union([_inline(one, defs) for one in part["anyOf"]])
    schema: Object = {}
    for key, value in part.items():
        match key:
            case "properties":
                schema[key] = {name: _inline(one, defs) for name, one in value.items()}
            case "exclusiveMinimum":
                schema |= {"minimum": value, "exclusiveMinimum": True}
            case "enum":
                schema |= {"type": "string", "enum": value}
            case "additionalProperties" if value is not False:
                schema[key] = _inline(value, defs)
            case "prefixItems" | "items" if value is not False:
                schema["items"] = _inline(value[0] if isinstance(value, list) else value, defs)
            case "required" if not value:
                pass
            case "title" | "default" | "$defs" | "$schema" | "additionalProperties" | "items":
                pass
            case _:
                schema[key] = value
    return schema


def _union(parts: list[Object]) -> Object:
    """Schema of a union: nullable for a type and null; other unions are checked by the operator."""
    real = [one for one in parts if one.get("type") != "null"]
    if len(real) == 1:
        return real[0] | {"nullable": True}
    return {"x-kubernetes-preserve-unknown-fields": True}
