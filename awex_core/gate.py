"""ASGI middleware that refuses generation while an engine must not generate."""

from __future__ import annotations

from typing import Any, ClassVar

from starlette.responses import JSONResponse

from awex_core.controller import EngineController

HEALTH_PATHS = ("/health", "/health_generate", "/ping")
"""Where load balancers and people ask whether an engine can be used."""


class Gate:
    """Answers 503 with the reason while the controller in ``app.state.awex_controller`` says that it is closed.

    So do the health endpoints of a torn engine; one that waits for its first version is in good health.

    Subclasses list the engine's own ``control_paths``: posts to paths that
    begin so do not generate. Every other post is taken to, so that an endpoint
    nobody thought of is refused rather than answered by torn weights.
    """

    control_paths: ClassVar[tuple[str, ...]] = ()

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass the request on, or refuse it."""
        reason = self._why_refused(scope)
        if not reason:
            await self._app(scope, receive, send)
            return
        body = {"error": {"message": reason, "type": "ServiceUnavailableError", "code": 503}}
        await JSONResponse(body, status_code=503, headers={"Retry-After": "1"})(scope, receive, send)

    def _why_refused(self, scope: Any) -> str:
        if scope["type"] != "http":
            return ""
        controller: EngineController | None = getattr(scope["app"].state, "awex_controller", None)
        if controller is None:
            return ""
        if scope["path"] in HEALTH_PATHS:
            return controller.why_torn()
        generates = scope["method"] == "POST" and not scope["path"].startswith(self.control_paths)
        return controller.why_closed() if generates else ""


def add_status_route(app: Any) -> None:
    """``GET /awex/status``: what the controller knows of its engine.

    Args:
        app: the engine's FastAPI application.
    """

    async def status() -> dict[str, Any]:
        controller: EngineController = app.state.awex_controller
        return await controller.look()

    app.add_api_route("/awex/status", status, methods=["GET"])
