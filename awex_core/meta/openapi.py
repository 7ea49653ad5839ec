"""The HTTP API as an OpenAPI document, made from the paths and the types of the messages; ``/v1/openapi.json``.

Bodies are msgpack. OpenAPI describes JSON, so what is said of a body holds for the values it decodes to, with two
things that JSON cannot have: bytes (``format: binary``), and maps whose keys are integers, written as decimals here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from awex_core.meta.messages import ErrorReply
from awex_core.meta.release import HEADER, HEADER_PATTERN
from awex_core.meta.requests import REPLIES, REQUESTS
from awex_core.meta.routes import BLOB_PATTERN, BYTES, ENDPOINTS, JOB_PATTERN, JSON, MSGPACK, STATUS_OF, Endpoint

_INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}
_MSGPACK_BYTES, _JSON_BYTES = {"type": "string", "format": "binary"}, {"type": "string", "contentEncoding": "base64"}


def describe() -> dict[str, Any]:
    """The document: every path, what it takes, and what it answers. Nothing in it depends on a server's state."""
    kinds = [*REQUESTS.values(), *dict.fromkeys(REPLIES.values()), ErrorReply]
    shown = [each.answer for each in ENDPOINTS if each.media == JSON and each.answer is not None]
    paths: dict[str, Any] = {}
    for endpoint in _one_by_one():
        paths.setdefault(endpoint.path, _parameters(endpoint.path))[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "awex meta server",
            "version": "1",
            "description": "Where a trainer and inference engines find each other. Bodies are msgpack; see a request's "
            "schema for the values they decode to. Answers that are not a success are an ErrorReply.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "schemas": _components(kinds, "", _MSGPACK_BYTES) | _components(shown, "Json", _JSON_BYTES),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _one_by_one() -> Iterator[Endpoint]:
    """The endpoints, with each request at a path of its own."""
    for endpoint in ENDPOINTS:
        if endpoint.served_by != "request":
            yield endpoint
            continue
        for name, kind in REQUESTS.items():
            summary = (kind.__doc__ or name).strip().partition("\n")[0]
            yield Endpoint("POST", endpoint.path.replace("{request}", name), name, summary, REPLIES[name])


def _components(kinds: Iterable[Any], prefix: str, as_bytes: dict[str, Any]) -> dict[str, Any]:
    _, found = msgspec.json.schema_components(kinds, ref_template=f"#/components/schemas/{prefix}{{name}}")
    return {f"{prefix}{name}": _adapted(schema, as_bytes) for name, schema in found.items()}


def _adapted(schema: Any, as_bytes: dict[str, Any]) -> Any:
    """What msgspec says of JSON, for an encoding with integers of 64 bits and its own way to write bytes."""
    if isinstance(schema, list):
        return [_adapted(item, as_bytes) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("contentEncoding") == "base64":
        return {name: value for name, value in schema.items() if name != "contentEncoding"} | as_bytes
    adapted = {name: _adapted(value, as_bytes) for name, value in schema.items()}
    return {**_INT64, **adapted} if schema.get("type") == "integer" else adapted


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    """One method of a path."""
    answer = _content(endpoint.media, endpoint.answer)
    success = {"200": {"description": "Done", **({"content": answer} if answer else {})}}
    if endpoint.is_open:
        return {"summary": endpoint.summary, "security": [], "responses": success}
    # The answer to a HEAD request has no body that could say what was wrong.
    why = {"content": _content(MSGPACK, ErrorReply)} if endpoint.method != "HEAD" else {}
    refusals = {str(status): {"description": code, **why} for code, status in STATUS_OF.items()}
    return {"summary": endpoint.summary, **_asked(endpoint), "responses": {**success, **refusals}}


def _asked(endpoint: Endpoint) -> dict[str, Any]:
    """What a method takes beside its path."""
    about = "The caller's protocol, major.minor, and its release; another major version than the server's is refused"
    release = {**_parameter("header", HEADER, HEADER_PATTERN, about), "required": True}
    if endpoint.method == "PUT":
        return {"requestBody": {"required": True, "content": {BYTES: {"schema": {}}}}, "parameters": [release]}
    if endpoint.method != "POST":
        return {}
    key = _parameter("header", "idempotency-key", "^[ -~]{0,64}$", "The same at each repeat of a request")
    body = {"required": True, "content": _content(MSGPACK, REQUESTS[endpoint.served_by])}
    return {"operationId": endpoint.served_by, "requestBody": body, "parameters": [key, release]}


def _content(media: str, kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    """What a body holds: a message, bytes, or in JSON an object of no type; empty if there is no body."""
    if kind is not None:
        prefix = "Json" if media == JSON else ""
        return {media: {"schema": {"$ref": f"#/components/schemas/{prefix}{kind.__name__}"}}}
    return {media: {"schema": {"type": "object"} if media == JSON else {}}} if media else {}


def _parameters(path: str) -> dict[str, Any]:
    """What is in a path."""
    known = {
        "{job}": _parameter("path", "job", JOB_PATTERN, "The job's name"),
        "{hash}": _parameter("path", "hash", BLOB_PATTERN, "The blob's content hash"),
    }
    found = [parameter for name, parameter in known.items() if name in path]
    return {"parameters": found} if found else {}


def _parameter(where: str, name: str, pattern: str, about: str) -> dict[str, Any]:
    return {
        "in": where,
        "name": name,
        "required": where == "path",
        "description": about,
        "schema": {"type": "string", "pattern": pattern},
    }
