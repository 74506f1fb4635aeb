"""The admin API described in OpenAPI 3.1, made from the application's own routes.

What a route answers is written in the table below; a route that is not in it is described by its path, method and the
first line of its handler's docstring, so that nothing that is served is ever missing.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from aiohttp import web

_PARAMETER = re.compile(r"{([^}:]+)")
_NAME = {"type": "string", "description": "a cluster, HOST:PORT, or CLUSTER/HOST:PORT"}
_ENDPOINT = {
    "type": "object",
    "properties": {
        "endpoint": {"type": "string"},
        "pool": {"type": "string"},
        "lifecycle": {"enum": ["warming", "ready", "draining", "gone"]},
        "leases": {"type": "integer", "description": "requests running there"},
    },
}
_ENDPOINTS = {"endpoints": {"type": "array", "items": _ENDPOINT}}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


_TABLE: dict[tuple[str, str], dict[str, Any]] = {
    ("GET", "/metrics"): {"summary": "Metrics in Prometheus' text format.", "text": True},
    ("GET", "/livez"): {"summary": "200 while the process serves."},
    ("GET", "/readyz"): {
        "summary": "200 when requests can be decided, else 503 with the reason.",
        "reply": _object({"ready": {"type": "boolean"}, "reason": {"type": "string"}}),
    },
    ("GET", "/fleet"): {
        "summary": "Endpoints with state, leases, backlog, rates. Times in seconds; null is 'not known'.",
        "reply": _object({"endpoints": {"type": "array", "items": {"type": "object"}}}),
    },
    ("GET", "/queue"): {
        "summary": "Requests that wait, by pool, priority and tenant. Times in seconds; null is 'not known'.",
    },
    ("GET", "/decisions"): {
        "summary": "Newest decision records, newest first.",
        "query": {"count": {"type": "integer", "minimum": 0, "maximum": 1000, "default": 20}},
    },
    ("GET", "/decisions/{id}"): {"summary": "One decision, by x-gateway-request-id."},
    ("GET", "/config"): {"summary": "The configuration in use, secrets masked."},
    ("GET", "/openapi.json"): {"summary": "This description."},
    ("POST", "/reload"): {
        "summary": "Read the configuration files now; 422 when they are wrong and the old ones stay.",
        "reply": _object(
            {"applied": {"type": "boolean"}, "problems": {"type": "array", "items": {"type": "string"}}}
        ),
    },
    ("POST", "/fleet/drain"): {
        "summary": "No new requests for an endpoint; waits up to wait_s until what runs there has ended.",
        "body": _object({"endpoint": _NAME, "wait_s": {"type": "number", "default": 0}}, "endpoint"),
        "reply": _object({"idle": {"type": "boolean"}, **_ENDPOINTS}),
    },
    ("POST", "/fleet/undrain"): {
        "summary": "Requests again for a drained endpoint, once it is ready.",
        "body": _object({"endpoint": _NAME}, "endpoint"),
        "reply": _object(_ENDPOINTS),
    },
    ("POST", "/fleet/register"): {
        "summary": "Add an endpoint; it survives restarts. Further keys are those of clusters.yaml's metadata.",
        "body": _object(
            {
                "address": {"type": "string", "description": "HOST:PORT"},
                "name": {"type": "string", "description": "of its Envoy cluster"},
                "pool": {"type": "string"},
            },
            "address",
            "pool",
        ),
        "reply": _object({"registered": {"type": "string"}, **_ENDPOINTS}),
    },
    ("POST", "/fleet/remove"): {
        "summary": "Forget a registered endpoint; running requests end or meet the deadline.",
        "body": _object({"endpoint": _NAME}, "endpoint"),
        "reply": _object({"removed": {"type": "array", "items": {"type": "string"}}, **_ENDPOINTS}),
    },
}


def describe(app: web.Application, version: str) -> dict[str, Any]:
    """The OpenAPI document of all routes of ``app``."""
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        resource = route.resource
        if resource is None or route.method == "HEAD":
            continue
        path = resource.canonical
        paths.setdefault(path, {})[route.method.lower()] = _operation(route.method, path, route.handler)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "extproc admin",
            "version": version,
            "description": "Reading is free. Changes need the bearer token where one is configured, and are refused "
            "from other machines where none is.",
        },
        "paths": dict(sorted(paths.items())),
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": _object(
                    {"error": _object({"status": {"type": "integer"}, "message": {"type": "string"}})}
                )
            },
        },
    }


def _operation(method: str, path: str, handler: object) -> dict[str, Any]:
    said = _TABLE.get((method, path), {})
    summary = said.get("summary") or (inspect.getdoc(handler) or f"{method} {path}").splitlines()[0]
    kind = "text/plain" if said.get("text") else "application/json"
    schema = said.get("reply") or ({"type": "string"} if said.get("text") else {"type": "object"})
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "done", "content": {kind: {"schema": schema}}},
            "default": {"description": "what is wrong", "content": error},
        },
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PARAMETER.findall(path)
    ] + [{"name": name, "in": "query", "schema": about} for name, about in said.get("query", {}).items()]
    if parameters:
        operation["parameters"] = parameters
    if "body" in said:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": said["body"]}},
        }
    if method not in ("GET", "HEAD"):
        operation["security"] = [{"token": []}, {}]
    return operation
