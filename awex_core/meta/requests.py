"""The requests by their names in the URL, and what each one's body is."""

from __future__ import annotations

from typing import Any

import msgspec

from awex_core.errors import Refused
from awex_core.meta import messages

REQUESTS: dict[str, type[msgspec.Struct]] = {
    "join_writer": messages.JoinWriter,
    "join_worker": messages.JoinWorker,
    "join_controller": messages.JoinController,
    "heartbeat": messages.Heartbeat,
    "leave": messages.Leave,
    "watch": messages.Watch,
    "announce": messages.Announce,
    "give_up": messages.GiveUp,
    "publish_digest": messages.PublishDigest,
    "report_worker": messages.ReportWorker,
    "report_engine": messages.ReportEngine,
    "report_sender": messages.ReportSender,
    "supersede": messages.Supersede,
    "set_engine_state": messages.SetEngineState,
    "ask_catch_up": messages.AskCatchUp,
    "lend": messages.Lend,
    "ask_digests": messages.AskDigests,
    "pin": messages.Pin,
    "promote": messages.Promote,
    "put": messages.Put,
    "get": messages.Get,
    "get_blobs": messages.GetBlobs,
}

REPLIES: dict[str, type[msgspec.Struct]] = {
    **dict.fromkeys(REQUESTS, messages.Ok),
    **dict.fromkeys(("join_writer", "join_worker", "join_controller"), messages.JoinReply),
    **dict.fromkeys(("report_worker", "report_engine", "report_sender", "supersede"), messages.ReportReply),
    "announce": messages.Announced,
    "heartbeat": messages.HeartbeatReply,
    "watch": messages.JobView,
    "ask_digests": messages.DigestsAsked,
    "get": messages.GetReply,
    "get_blobs": messages.Blobs,
}

JOINS = frozenset({"join_writer", "join_worker", "join_controller"})

_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    name: msgspec.msgpack.Decoder(kind) for name, kind in REQUESTS.items()
}


def decode_request(name: str, body: bytes) -> msgspec.Struct:
    """The request of this name, which must be one of ``REQUESTS``.

    Raises:
        Refused: with code ``invalid``; the body is something else.
    """
    try:
        message: msgspec.Struct = _DECODERS[name].decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused("invalid", f"body of {len(body)} bytes: {error}") from error
    return message
