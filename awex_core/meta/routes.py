"""The paths of the meta server: ``server`` serves each of these, and ``openapi`` describes it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from awex_core.meta.messages import JobList, JobStatus, Ok

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


@dataclass(frozen=True)
class Endpoint:
    """One method of one path, and the name of what serves it.

    ``answer`` is the type of what is answered in ``media``: None for bytes, for what has no type and for nothing.
    """

    method: str
    path: str
    served_by: str
    summary: str = ""
    answer: type[msgspec.Struct] | None = None
    media: str = MSGPACK
    is_open: bool = False
    """Whether it needs no token, and refuses nothing."""


ENDPOINTS = (
    Endpoint("GET", "/health", "health", "Whether the server is up", media=JSON, is_open=True),
    Endpoint("GET", "/v1/openapi.json", "description", "This document", media=JSON, is_open=True),
    Endpoint("GET", "/v1/jobs", "jobs", "The jobs and their live engines", JobList, JSON),
    Endpoint("GET", "/v1/jobs/{job}", "status", "The job, for people", JobStatus, JSON),
    Endpoint("POST", "/v1/jobs/{job}/{request}", "request"),  # described one by one, by their messages
    Endpoint("PUT", "/v1/jobs/{job}/blobs/{hash}", "put_blob", "Keep a blob", Ok),
    Endpoint("GET", "/v1/jobs/{job}/blobs/{hash}", "get_blob", "A blob", media=BYTES),
    Endpoint(
        "HEAD", "/v1/jobs/{job}/blobs/{hash}", "get_blob", "Whether a blob is here, then kept for a while", media=""
    ),
)
