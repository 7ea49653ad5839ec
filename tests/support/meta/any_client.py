"""A client for tests that play all roles in one process."""

from __future__ import annotations

from awex_core.meta.client import ControllerClient, WorkerClient, WriterClient


class AnyClient(WriterClient, WorkerClient, ControllerClient):
    """May ask for whatever any role may, and is shown all that there is."""

    role = "observer"
