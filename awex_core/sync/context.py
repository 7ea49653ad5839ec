"""What all parts of one member work with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from awex_core.layout.layout import Layout
from awex_core.layout.wire import Manifest, decode_layout, decode_manifest
from awex_core.meta.client import MetaClient
from awex_core.plan import SourceIndex, index_sources
from awex_core.settings.config import SyncConfig


class LayoutCache:
    """Layouts and manifests by hash, fetched once."""

    def __init__(self, client: MetaClient) -> None:
        self._client = client
        self._layouts: dict[str, Layout] = {}
        self._manifests: dict[str, Manifest] = {}
        self._sources: tuple[list[str], SourceIndex] | None = None

    def manifest(self, name: str) -> Manifest:
        """The manifest with this hash."""
        if name not in self._manifests:
            self._manifests[name] = Manifest(name, decode_manifest(self._client.get_blob(name)))
        return self._manifests[name]

    def get(self, name: str) -> Layout:
        """The layout with this hash."""
        if name not in self._layouts:
            self._layouts[name] = decode_layout(self._client.get_blob(name), self.manifest)
        return self._layouts[name]

    def get_all(self, names: Sequence[str]) -> list[Layout]:
        """The layouts with these hashes; those that are new are fetched together."""
        new = {name for name in names if name not in self._layouts}
        for name, data in self._client.get_blobs(new).items():
            self._layouts[name] = decode_layout(data, self.manifest)
        return [self._layouts[name] for name in names]

    def sources(self, names: Sequence[str]) -> SourceIndex:
        """The index of these layouts, in the order of their ranks; kept until it is asked for others."""
        kept = self._sources  # another thread may replace it
        if kept is None or kept[0] != [*names]:
            kept = self._sources = [*names], index_sources(self.get_all(names))
        return kept[1]


Client = TypeVar("Client", bound=MetaClient, covariant=True)


@dataclass(frozen=True)
class SyncContext(Generic[Client]):
    """The meta server's client, the settings, and the layouts that were fetched so far. Shared between threads."""

    client: Client
    config: SyncConfig
    layouts: LayoutCache

    @classmethod
    def of(cls, kind: type[Client], config: SyncConfig, engine: str = "") -> SyncContext[Client]:
        """For a member with these settings, whose role has this kind of client; connects to nothing yet."""
        client = kind.of(config, engine)
        return cls(client, config, LayoutCache(client))
