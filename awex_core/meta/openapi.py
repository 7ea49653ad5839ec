"""The HTTP API as an OpenAPI document, made from the types of the messages; served as ``/v1/openapi.json``.

Bodies are msgpack. OpenAPI describes JSON, so what is said of a body holds for the values it decodes to, with two
things that JSON cannot have: bytes (``format: binary``), and maps whose keys are integers, written as decimals here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from awex_core.meta.messages import ErrorReply, JobList, JobStatus
from awex_core.meta.release import HEADER, HEADER_PATTERN
from awex_core.meta.requests import REPLIES, REQUESTS

MSGPACK, JSON, BYTES = "application/msgpack", "application/json", "application/octet-stream"

STATUS_OF = {
    "unauthorized": 401,
    "unknown": 404,
    "fenced": 409,
    "too_large": 413,
    "invalid": 400,
    "busy": 429,
    "unavailable": 503,
}
"""The HTTP status of each code of an ``ErrorReply``."""

JOB_PATTERN = "^[A-Za-z0-9._-]{1,64}$"
BLOB_PATTERN = "^[0-9a-f]{32}$"

_INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}
_MSGPACK_BYTES, _JSON_BYTES = {"type": "string", "format": "binary"}, {"type": "string", "contentEncoding": "base64"}


def describe() -> dict[str, Any]:
    """The document: every path, what it takes, and what it answers. Nothing in it depends on a server's state."""
    kinds = [*REQUESTS.values(), *dict.fromkeys(REPLIES.values()), ErrorReply]
    schemas = _components(kinds, "", _MSGPACK_BYTES) | _components([JobStatus, JobList], "Json", _JSON_BYTES)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "awex meta server",
            "version": "1",
            "description": "Where a trainer and inference engines find each other. Bodies are msgpack; see a request's "
            "schema for the values they decode to. Answers that are not a success are an ErrorReply.",
        },
        "security": [{"token": []}],
        "paths": {
            "/health": {"get": _open("Whether the server is up", {"type": "object"})},
            "/v1/openapi.json": {"get": _open("This document", {"type": "object"})},
            "/v1/jobs": {"get": _operation("The jobs and their live engines", _json("JsonJobList"))},
            "/v1/jobs/{job}": {
                "parameters": [_job()],
                "get": _operation("The job, for people", _json("JsonJobStatus")),
            },
            **{f"/v1/jobs/{{job}}/{name}": _request(name, kind) for name, kind in REQUESTS.items()},
            "/v1/jobs/{job}/blobs/{hash}": {
                "parameters": [_job(), _parameter("path", "hash", BLOB_PATTERN, "The blob's content hash")],
                "put": {
                    **_operation("Keep a blob", _msgpack("Ok"), body={BYTES: {"schema": {}}}),
                    "parameters": [_release()],
                },
                "get": _operation("A blob", {BYTES: {"schema": {}}}),
                "head": _operation("Whether a blob is here; it is then kept for a while", {}, bodies=False),
            },
        },
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


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


def _request(name: str, kind: type[msgspec.Struct]) -> dict[str, Any]:
    key = _parameter("header", "idempotency-key", "^[ -~]{0,64}$", "The same at each repeat of a request")
    operation = _operation(
        (kind.__doc__ or name).strip().partition("\n")[0],
        _msgpack(REPLIES[name].__name__),
        body=_msgpack(kind.__name__),
    )
    return {"parameters": [_job()], "post": {**operation, "operationId": name, "parameters": [key, _release()]}}


def _operation(
    summary: str, answer: dict[str, Any], *, body: dict[str, Any] | None = None, bodies: bool = True
) -> dict[str, Any]:
    """One method of a path; ``bodies`` is false where no answer has one."""
    content = {"content": _msgpack("ErrorReply")} if bodies else {}
    refusals = {str(status): {"description": code, **content} for code, status in STATUS_OF.items()}
    success = {"description": "Done", **({"content": answer} if answer else {})}
    asked = {"requestBody": {"required": True, "content": body}} if body else {}
    return {"summary": summary, **asked, "responses": {"200": success, **refusals}}


def _open(summary: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A path that needs no token and refuses nothing."""
    return {
        "summary": summary,
        "security": [],
        "responses": {"200": {"description": "Done", "content": {JSON: {"schema": schema}}}},
    }


def _msgpack(name: str) -> dict[str, Any]:
    return {MSGPACK: {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _json(name: str) -> dict[str, Any]:
    return {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _job() -> dict[str, Any]:
    return _parameter("path", "job", JOB_PATTERN, "The job's name")


def _release() -> dict[str, Any]:
    about = "The caller's protocol, major.minor, and its release; another major version than the server's is refused"
    return {**_parameter("header", HEADER, HEADER_PATTERN, about), "required": True}


def _parameter(where: str, name: str, pattern: str, about: str) -> dict[str, Any]:
    return {
        "in": where,
        "name": name,
        "required": where == "path",
        "description": about,
        "schema": {"type": "string", "pattern": pattern},
    }
