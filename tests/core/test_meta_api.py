"""The meta server does over HTTP what its description says, whatever it is sent.

``AWEX_API_EXAMPLES=500 pytest tests/core/test_meta_api.py`` sends more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from awex_core.meta import job, openapi
from awex_core.meta.requests import REQUESTS
from awex_core.meta.server import MetaServer
from tests.core.test_meta_server import HEADERS, TOKEN
from tests.core.test_meta_store import announce, controller, worker, writer

EXAMPLES = int(os.environ.get("AWEX_API_EXAMPLES", "10"))
"""Requests for each operation, of those that follow the description and of those that do not."""

pytestmark = pytest.mark.timeout(120 + EXAMPLES * 2)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
JOIN = [writer(), worker(), controller(), announce()]


@schemathesis.serializer("application/msgpack")
def to_msgpack(ctx: schemathesis.SerializationContext, value: Any) -> bytes:
    return msgspec.msgpack.encode(_in_range(value))


@schemathesis.deserializer("application/msgpack")
def from_msgpack(ctx: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    return _as_described(msgspec.msgpack.decode(response.content, strict=False))


def _in_range(value: Any) -> Any:
    """What msgpack can say: bytes as bytes, and numbers that fit."""
    if isinstance(value, dict):
        return {str(name): _in_range(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_in_range(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return math.copysign(1e300, value)
    return getattr(value, "data", value)


def _as_described(value: Any) -> Any:
    """What was decoded, in the terms of the description: keys as text, bytes as text of any kind."""
    if isinstance(value, dict):
        return {str(name): _as_described(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_as_described(item) for item in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value


schema = schemathesis.openapi.from_dict(openapi.describe())
OPERATIONS = {
    f"{operation.method.upper()} {operation.path}": operation
    for operation in (found.ok() for found in schema.get_all_operations())
}
OPEN = {"GET /health", "GET /v1/openapi.json"}


@pytest.fixture(scope="module")
def server() -> Iterator[MetaServer]:
    patch = pytest.MonkeyPatch()
    patch.setattr(job, "MAX_WAIT_S", 0.01)  # of the server's patience there are other tests
    with MetaServer(TOKEN, lease_s=600) as server:
        for message in JOIN:
            name = openapi_name(message)
            url = f"http://{server.address}/v1/jobs/j/{name}"
            reply = httpx.post(url, content=msgspec.msgpack.encode(message), headers=HEADERS, trust_env=False)
            assert reply.status_code == 200, reply.content
        yield server
    patch.undo()


def openapi_name(message: msgspec.Struct) -> str:
    return next(name for name, kind in REQUESTS.items() if kind is type(message))


def test_the_description_is_served_to_everyone(server: MetaServer) -> None:
    reply = httpx.get(f"http://{server.address}/v1/openapi.json", trust_env=False)
    assert reply.json() == json.loads(msgspec.json.encode(openapi.describe()))
    assert TOKEN not in reply.text and server.address not in reply.text


def test_the_description_has_every_request() -> None:
    assert {f"POST /v1/jobs/{{job}}/{name}" for name in REQUESTS} < set(OPERATIONS)
    assert len(OPERATIONS) == len(REQUESTS) + 7


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (name, mode)
        for name in OPERATIONS
        for mode in schemathesis.GenerationMode
        # What takes nothing cannot be given anything wrong.
        if name not in OPEN or mode is schemathesis.GenerationMode.POSITIVE
    ],
)
@settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_answers_are_as_described(
    server: MetaServer, name: str, mode: schemathesis.GenerationMode, data: st.DataObject
) -> None:
    operation = OPERATIONS[name]
    case = data.draw(operation.as_strategy(generation_mode=mode), label="case")
    if "job" in (case.path_parameters or {}) and data.draw(st.integers(0, 3), label="another job") > 0:
        case.path_parameters["job"] = "j"
    base = f"http://{server.address}"
    response = case.call(base_url=base, headers={"authorization": f"Bearer {TOKEN}"})
    assert response.status_code < 500
    if not _has_a_route(case):
        return
    case.validate_response(response, checks=CHECKS)
    stranger = case.call(base_url=base, headers={"authorization": "Bearer not-the-token"})
    assert stranger.status_code == (200 if name in OPEN else 401)


def _has_a_route(case: schemathesis.Case) -> bool:
    """Whether the path is one of the description's: an invalid parameter may have made it another one."""
    return all("/" not in str(value) and str(value) not in ("", ".", "..") for value in case.path_parameters.values())
