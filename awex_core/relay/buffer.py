"""A relay's memory: one buffer as a manifest lays it out, twice where there is room."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from awex_core.checkpoint.manifest import MemoryMap, differences, structure_of
from awex_core.errors import ConfigError, PlanError
from awex_core.layout.layout import Buffer, CanonicalTensor, Layout, Shard, build_layout
from awex_core.layout.live import Memory, allocate
from awex_core.modes import ReceiveMode
from awex_core.sync.engine import TracedModel


def check_same(model: MemoryMap, manifest: Sequence[CanonicalTensor]) -> None:
    """Raise ``PlanError`` unless ``manifest`` is the model that was written down."""
    found = differences(model, manifest)
    if found:
        summary = (
            f"the manifest here is of structure {model.structure}, and what is published of {structure_of(manifest)}; "
            "write it anew with `awex export` and start again with that"
        )
        raise PlanError(summary, found)


def whole_tensor(tensor: CanonicalTensor, buffer: int, offset: int) -> Shard:
    """A tensor that lies contiguously in a buffer, ``offset`` bytes from its begin."""
    stride = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta").stride()
    itemsize = getattr(torch, tensor.dtype).itemsize
    return Shard(
        tensor=tensor,
        start=(0,) * len(tensor.shape),
        extent=tensor.shape,
        buffer=buffer,
        offset=offset,
        stride=tuple(step * itemsize for step in stride),
        dtype=tensor.dtype,
    )


def layout_of(model: MemoryMap) -> Layout:
    """The layout of one buffer that holds a model as its manifest says."""
    shards = [whole_tensor(place.tensor, 0, place.offset) for place in model.tensors]
    return build_layout(shards, [Buffer("relay", model.nbytes)])


def choose_receive(model: MemoryMap, limit_nbytes: int | None) -> ReceiveMode:
    """Whether a relay that may take so many bytes receives into a second buffer; None is as many as there are.

    Raises:
        ConfigError: not even one buffer fits.
    """
    if limit_nbytes is None or limit_nbytes >= 2 * model.nbytes:
        return "shadow"
    if limit_nbytes >= model.nbytes:
        return "in_place"
    raise ConfigError(
        f"--buffer-size is {limit_nbytes} bytes, and the model takes {model.nbytes}; give it that many, or twice as "
        "many so that a version can be lent while the next one arrives"
    )


class RelayModel:
    """``WorkerModel`` and ``SwapsMemory`` over one buffer."""

    def __init__(self, model: MemoryMap, device: torch.device) -> None:
        """Take the memory, every page of it.

        Raises:
            ConfigError: there is not enough; says how much it takes.
        """
        self.device = device
        self._map, self._layout = model, layout_of(model)
        try:
            self._memory = allocate([(model.nbytes, device)])
        except MemoryError as error:
            raise ConfigError(f"a relay of this model needs {error}") from error
        self._memory.buffers[0].zero_()

    def trace(self, manifest: Sequence[CanonicalTensor]) -> TracedModel:
        """See ``WorkerModel.trace``: it is the manifest's model, or it is refused."""
        check_same(self._map, manifest)
        return TracedModel(self._layout)

    def begin(self) -> Memory:
        """See ``WorkerModel.begin``."""
        return self._memory

    def lend(self) -> Memory:
        """See ``WorkerModel.lend``."""
        return self._memory

    def live(self) -> Memory:
        """See ``WorkerModel.live``."""
        return self._memory

    def swap(self, received: Memory) -> Memory:
        """See ``SwapsMemory.swap``."""
        self._memory, before = received, self._memory
        return before

    def finish(self) -> None:
        """See ``WorkerModel.finish``: nothing is derived from the weights."""

    def abort(self) -> None:
        """See ``WorkerModel.abort``: nothing was allocated."""
