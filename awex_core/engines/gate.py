"""ASGI middleware that refuses generation while an engine must not generate."""

from __future__ import annotations

from typing import Any, ClassVar

from starlette.responses import JSONResponse

from awex_core.engines.calls import Calls, find_route
from awex_core.sync.controller import EngineController

HEALTH_PATHS = ("/health", "/health_generate", "/ping")
"""Where load balancers and people ask whether an engine can be used."""

VERSION_HEADER, LABEL_HEADER = b"awex-version", b"awex-label"
"""Of every answer of an engine: what it served when the answer began."""

_CLOSE_REASON_NBYTES = 120
"""Longest reason that a WebSocket's close may carry is 123 bytes."""


class Gate:
    """Answers 503 with the reason while the controller in ``app.state.awex_controller`` says that it is closed.

    So do the health endpoints of a torn engine; one that waits for its first version is in good health. Calls that do
    not go with following a trainer are answered 409.

    A subclass gives its engine's ``routes``. A path that is not among them is taken to generate unless it is only
    read (GET, HEAD), so that an endpoint nobody thought of is refused rather than answered by torn weights.
    """

    routes: ClassVar[Calls] = {}

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or refuse it."""
        status, reason = self._why_refused(scope)
        if not reason:
            await self._app(scope, receive, self._naming(scope, send))
        elif scope["type"] == "websocket":
            await receive()  # the client's wish to connect, which is answered like a request
            await send({"type": "websocket.close", "code": 1013, "reason": reason[:_CLOSE_REASON_NBYTES]})
        else:
            kind = "ServiceUnavailableError" if status == 503 else "ConflictError"
            body = {"error": {"message": reason, "type": kind, "code": status}}
            headers = {"Retry-After": "1"} if status == 503 else {}
            await JSONResponse(body, status_code=status, headers=headers)(scope, receive, send)

    def _naming(self, scope: Any, send: Any) -> Any:
        """Have an answer name the version that is served as it begins, and its label."""
        controller: EngineController | None = None
        if scope["type"] == "http":
            controller = getattr(scope["app"].state, "awex_controller", None)
        if controller is None:
            return send

        async def named(message: Any) -> None:
            if message["type"] == "http.response.start":
                served = {VERSION_HEADER: str(controller.version), LABEL_HEADER: controller.label}
                found = [(name, value.encode()) for name, value in served.items() if value]
                message = message | {"headers": [*message.get("headers", ()), *found]}
            await send(message)

        return named

    def _why_refused(self, scope: Any) -> tuple[int, str]:
        """Status and reason; no reason when the request may pass."""
        if scope["type"] not in ("http", "websocket"):
            return 503, ""
        controller: EngineController | None = getattr(scope["app"].state, "awex_controller", None)
        if controller is None:
            return 503, ""
        if scope["path"] in HEALTH_PATHS:
            return 503, controller.why_torn()
        call = find_route(self.routes, scope["path"])
        if call is not None and call.kind == "refused":
            return 409, f"{scope['path']} is refused: {call.note}"
        reads = scope.get("method") in ("GET", "HEAD") if call is None else call.kind != "generates"
        return 503, "" if reads else controller.why_closed()


def add_status_route(app: Any) -> None:
    """``GET /awex/status``: what the controller knows of its engine.

    Args:
        app: the engine's FastAPI application.
    """

    async def status() -> dict[str, Any]:
        controller: EngineController = app.state.awex_controller
        return await controller.look()

    app.add_api_route("/awex/status", status, methods=["GET"])
