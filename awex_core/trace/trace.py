"""Layouts found by running a model's own loader on tensors that carry no data.

``load_weights`` is called once with *traced tensors* (``traced_tensor``), which
know which elements of which canonical tensor they show. When the loader copies
one into parameter memory, the pair (canonical box, memory box) is written down
and nothing is copied. The idea of recording a loader instead of writing one per
model is also used by vLLM's ``sharded_rdt`` backend (which records op chains);
here views become boxes at once.

While tracing, every write to a tracked tensor is intercepted, so no parameter
changes, whatever the loader does and wherever it raises. What the loader
computes, be it from a checkpoint's tensors or from parameters that it has just
filled, is followed no further than which canonical tensors it comes from: the
parameter it ends in is *untraced*. What lies in parameters while tracing are the
weights of before, so that no number read from there may be written down.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from awex_core.errors import LayoutError, TraceError
from awex_core.layout.coverage import Gap, memory_gaps
from awex_core.layout.layout import Buffer, CanonicalTensor, Constant, Layout, Shard, build_layout
from awex_core.layout.runs import ByteRuns, strided_runs
from awex_core.layout.strided import Strided, split_into_boxes
from awex_core.trace.paint import Write, resolve
from awex_core.trace.traced_tensor import (
    PICKS,
    Piece,
    TracedTensor,
    broadcast,
    derive,
    names_of,
    offer,
    opaque,
    tensors_in,
)

aten = torch.ops.aten

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class Untraced:
    """Something the trace could not follow, and why.

    ``name`` is a parameter's, with its ``buffer`` and the canonical tensors that
    its contents come from, or that of a tensor on which the loader raised.
    """

    name: str
    reason: str
    buffer: int | None = None
    sources: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Trace:
    """What a loader does with the canonical tensors.

    ``layout`` has one buffer per tracked storage, in the order of ``storages``.
    ``untraced`` lists parameters whose contents are computed from values, of
    which the layout then describes nothing, and tensors the loader choked on.
    ``dropped`` names canonical tensors that were offered and never used.
    ``gaps`` are parameter bytes that nothing writes, computed or not.
    """

    layout: Layout
    storages: tuple[torch.UntypedStorage, ...]
    untraced: tuple[Untraced, ...]
    dropped: tuple[str, ...]
    gaps: tuple[Gap, ...]


def storages_of(tracked: Mapping[str, torch.Tensor]) -> dict[str, torch.UntypedStorage]:
    """Each storage once, under the name of the first tensor in it: the buffers of a trace, in order."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for name, tensor in tracked.items():
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (name, storage))
    return dict(found.values())


@dataclass(frozen=True)
class _Origin:
    """Where the values of a tensor that is not traced come from: parameters, or canonical tensors.

    ``stale``: they are not what they would be in a real load.
    """

    what: str
    sources: frozenset[str] = frozenset()
    stale: bool = False


@dataclass
class _Computed:
    """What is known of a storage that something computed is written to."""

    reason: str
    sources: set[str] = field(default_factory=set)
    runs: list[ByteRuns] = field(default_factory=list)


class _Recorder(TorchDispatchMode):
    """Sees every operator while the loader runs."""

    def __init__(self, tracked: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = storages_of(tracked)
        self.names = list(named)
        self.storages = list(named.values())
        self._index = {storage._cdata: index for index, storage in enumerate(self.storages)}
        self.writes: list[list[Write]] = [[] for _ in self.storages]
        self.computed: dict[int, _Computed] = {}
        self.choked: dict[str, str] = {}
        self.used: set[str] = set()
        self._changed: dict[str, str] = {}
        """Canonical tensors that were changed in place: other views of them show elements that are gone."""
        self._origins: dict[StorageWeakRef, _Origin] = {}
        """Of temporary tensors. A reference keeps the key from being given to another storage."""

    def buffer_of(self, tensor: torch.Tensor) -> int | None:
        """Index of the tracked storage that ``tensor`` lives in."""
        return self._index.get(tensor.untyped_storage()._cdata) if _has_storage(tensor) else None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written, given = _written_arguments(func, args, kwargs), tensors_in((*args, *kwargs.values()))
        if any(self.buffer_of(tensor) is not None for tensor in written):
            return self._write(func, written, args, given)
        if any(isinstance(tensor, TracedTensor) for tensor in given):
            return self._follow(func, written, args, kwargs, given)
        origin = self._origin(given)
        if origin is not None and origin.stale and func in _ASKING:
            raise TraceError(f"the loader asks for the values of {origin.what}, which it has just loaded (by {func})")
        result = func(*args, **kwargs)
        if origin is not None and func not in _SHAPE_ONLY:
            self._note([*tensors_in([result]), *written], origin)
        return result

    # Where values come from

    def _origin(self, tensors: Iterable[torch.Tensor]) -> _Origin | None:
        """Of what is computed from some tensors; None if neither weights nor parameters take part."""
        found = [origin for tensor in tensors if (origin := self._origin_of(tensor)) is not None]
        if len(found) < 2:
            return found[0] if found else None
        what = ", ".join(dict.fromkeys(origin.what for origin in found))
        return _Origin(what, _union(origin.sources for origin in found), any(origin.stale for origin in found))

    def _origin_of(self, tensor: torch.Tensor) -> _Origin | None:
        if isinstance(tensor, TracedTensor):
            return _Origin(names_of([tensor]), tensor.sources, stale=True)
        index = self.buffer_of(tensor)
        if index is not None:
            computed = self.computed.get(index)
            sources = _union(write.sources for write in self.writes[index]) | (computed.sources if computed else set())
            return _Origin(self.names[index], sources, stale=bool(computed or self.writes[index]))
        return self._origins.get(_reference(tensor)) if self._origins and _has_storage(tensor) else None

    def _note(self, tensors: Iterable[torch.Tensor], origin: _Origin) -> None:
        """Temporary tensors whose elements come from weights or parameters."""
        for tensor in tensors:
            if _has_storage(tensor) and self.buffer_of(tensor) is None:
                self._origins[_reference(tensor)] = origin

    # Operators on traced tensors that write to no parameter

    def _follow(
        self,
        func: Any,
        written: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: list[torch.Tensor],
    ) -> Any:
        origin = self._origin(given)
        assert origin is not None
        if not written:
            traced = [tensor for tensor in given if isinstance(tensor, TracedTensor)]
            plain = [tensor for tensor in given if not isinstance(tensor, TracedTensor)]
            if func in PICKS and self._origin(plain) is not None:
                result = opaque(func, args, kwargs, traced)  # which rows depends on weights
            else:
                result = derive(func, args, kwargs, traced)
            for tensor in tensors_in([result]):
                if isinstance(tensor, TracedTensor) and tensor.opaque:
                    tensor.sources |= origin.sources
            return result
        if func in _FILLS and isinstance(written[0], TracedTensor):
            self._fill_traced(written[0], _fill_value(args))
        else:
            self._note(written, origin)
            for tensor in written:
                if isinstance(tensor, TracedTensor):
                    self._change(tensor, f"changed in place by {func}", origin.sources)
        return _returned(func, written)

    def _fill_traced(self, tensor: TracedTensor, value: torch.Tensor) -> None:
        """A loader sets what it was given to one value: a bias that only one rank may add."""
        origin = self._origin([value])
        self._change(tensor, "filled with a computed value", origin.sources if origin else frozenset())
        if origin is None:
            tensor.opaque, tensor.constant = "", value.to(tensor.dtype)

    def _change(self, tensor: TracedTensor, reason: str, sources: frozenset[str]) -> None:
        self._changed |= dict.fromkeys(tensor.sources, reason)
        tensor.pieces, tensor.constant, tensor.opaque = (), None, reason
        tensor.sources |= sources

    # Writes to tracked memory: recorded, never done

    def _write(self, func: Any, written: list[torch.Tensor], args: tuple[Any, ...], given: list[torch.Tensor]) -> Any:
        target = written[0]
        if func is aten.copy_.default:
            self._record_copy(target, args[1])
        elif func in _FILLS:
            self._record_fill(target, _fill_value(args), f"filled by {func} with a computed value")
        else:
            origin = self._origin(given)
            sources = origin.sources if origin else frozenset()
            for tensor in written:
                self._compute(tensor, f"written by {func}, whose result depends on values", sources)
            self._note(written, origin or _Origin("a parameter"))
        return _returned(func, written)

    def _record_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if isinstance(source, TracedTensor):
            self._record_traced(target, source)
            return
        origin = self._origin([source])
        if origin is not None:
            self._compute(target, f"computed from {origin.what}", origin.sources)
        elif _is_uniform(source):
            # It was made without any weight, so it is the same in every update.
            self._record_constant(target, source.flatten()[0], frozenset())
        else:
            self._compute(target, "written with values that come from no checkpoint", frozenset())

    def _record_fill(self, target: torch.Tensor, value: torch.Tensor, reason: str) -> None:
        origin = self._origin([value])
        if origin is not None:
            self._compute(target, reason, origin.sources)
        else:
            self._record_constant(target, value, frozenset())

    def _record_traced(self, target: torch.Tensor, source: TracedTensor) -> None:
        self.used |= source.sources
        if source.constant is not None:
            self._record_constant(target, source.constant, source.sources)
            return
        buffer = self.buffer_of(target)
        reason = self._why_untraced(target, source)
        if reason or buffer is None:
            self._compute(target, f"{names_of([source])}: {reason}", source.sources)
            return
        try:
            pieces = source.pieces if target.shape == source.shape else broadcast(source, target).pieces
            shards = [shard for piece in pieces for shard in _shards(buffer, _part(target, piece), piece)]
        except LayoutError as error:
            self._compute(target, f"{names_of([source])}: {error}", source.sources)
            return
        self.writes[buffer] += [Write(frozenset([shard.tensor.name]), shard=shard) for shard in shards]

    def _why_untraced(self, target: torch.Tensor, source: TracedTensor) -> str:
        if source.opaque:
            return source.opaque
        changed = [name for name in sorted(source.sources) if name in self._changed]
        if changed:
            return f"{changed[0]} was {self._changed[changed[0]]} through another view of it"
        if any(cast != target.dtype for cast in source.casts):
            return f"rounded to {source.casts[0]} on the way to {target.dtype}"
        if target.shape != source.shape and len(source.pieces) != 1:
            return f"a concatenation is broadcast to {tuple(target.shape)}"
        return ""

    def _record_constant(self, target: torch.Tensor, value: torch.Tensor, sources: frozenset[str]) -> None:
        buffer = self.buffer_of(target)
        if buffer is None or not target.numel():
            return
        element = value.detach().to(device="cpu", dtype=target.dtype).reshape(1).view(torch.uint8)
        size = target.element_size()
        constant = Constant(
            extent=tuple(target.shape),
            buffer=buffer,
            offset=int(target.storage_offset()) * size,
            stride=tuple(s * size for s in target.stride()),
            dtype=str(target.dtype).removeprefix("torch."),
            value=bytes(element.tolist()),
        )
        self.writes[buffer].append(Write(sources, constant=constant))

    def replace(self, name: str, before: torch.Tensor | None, tensor: torch.Tensor) -> None:
        """A loader has given a module another tensor than it had, or one where it had none."""
        origin = self._origin([tensor])
        if origin is None:
            return
        if before is None:
            self.used |= origin.sources
            self.choked[name] = "the loader makes it only for a checkpoint that has it; start the engine on one"
        else:
            self._compute(before, f"the loader makes it anew, for {origin.what}", origin.sources)

    def _compute(self, target: torch.Tensor, reason: str, sources: frozenset[str]) -> None:
        """Something is written to a parameter that cannot be written down."""
        buffer = self.buffer_of(target)
        if buffer is None or not target.numel():
            return
        self.used |= sources
        computed = self.computed.setdefault(buffer, _Computed(reason))
        computed.sources |= sources
        computed.runs.append(_runs_of(target))


def _union(sets: Iterable[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*sets)


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not isinstance(tensor, TracedTensor)


def _reference(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _runs_of(tensor: torch.Tensor) -> ByteRuns:
    size = tensor.element_size()
    extent, stride = np.asarray(tensor.shape, dtype=np.int64), np.asarray(tensor.stride(), dtype=np.int64) * size
    return strided_runs(int(tensor.storage_offset()) * size, extent, stride, size)


def _part(target: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Where in ``target`` a piece of what is copied there goes."""
    region = target
    for dim, (begin, size) in enumerate(zip(piece.at, piece.meta.shape, strict=True)):
        if size != region.shape[dim]:
            region = region.narrow(dim, begin, size)
    return region


def _shards(buffer: int, region: torch.Tensor, piece: Piece) -> Iterator[Shard]:
    size = region.element_size()
    source = Strided(
        offset=int(piece.meta.storage_offset()),
        extent=tuple(region.shape),
        stride=tuple(piece.meta.stride()),
    )
    memory = Strided(
        offset=int(region.storage_offset()) * size,
        extent=tuple(region.shape),
        stride=tuple(s * size for s in region.stride()),
    )
    dtype = str(region.dtype).removeprefix("torch.")
    for start, extent, offset, stride in split_into_boxes(piece.tensor.shape, source, memory):
        yield Shard(piece.tensor, start, extent, buffer, offset, stride, dtype)


_FILLS = frozenset({aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})
_ASKING = frozenset({aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default})
"""Operators that give Python a value."""
_SHAPE_ONLY = frozenset(
    overload
    for name in ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
    + ("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full")
    for overload in [getattr(aten, name).default]
)
"""Operators that take a tensor for its shape, type and device."""


@functools.cache
def _write_positions(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for position, name in _write_positions(func):
        written += tensors_in([args[position] if position < len(args) else kwargs.get(name)])
    return written


def _returned(func: Any, written: list[torch.Tensor]) -> Any:
    """What an operator that writes to its arguments returns: these, or nothing."""
    count = len(func._schema.returns)
    return None if not count else written[0] if count == 1 else tuple(written[:count])


def _fill_value(args: tuple[Any, ...]) -> torch.Tensor:
    """What one of ``_FILLS`` writes; ``zero_`` has no argument for it."""
    return torch.as_tensor(args[1]) if len(args) > 1 else torch.zeros(())


def _is_uniform(tensor: torch.Tensor) -> bool:
    """Whether all elements have the same bits, as in padding that a loader makes."""
    if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
        return False
    elements = tensor.detach().contiguous().view(-1, 1).view(torch.uint8)
    return bool((elements == elements[0]).all())


def trace_loader(
    load_weights: Loader,
    tensors: Sequence[CanonicalTensor],
    tracked: Mapping[str, torch.Tensor],
    *,
    device: torch.device | str = "cpu",
    held: Callable[[], Mapping[str, torch.Tensor]] = dict,
) -> Trace:
    """Run ``load_weights`` on traced tensors and return the layout it implies.

    Args:
        load_weights: called with an iterable of (name, tensor) pairs, as with a checkpoint.
        tensors: the canonical tensors to offer.
        tracked: the model's parameters and buffers by name; on the meta device or live.
        device: the device the traced tensors claim to be on.
        held: the model's tensors by name, of which a loader may have put others in the place of those tracked.

    Raises:
        LayoutError: what was recorded is no valid layout.

    A loader that raises does not make this function raise: each tensor is then
    offered by itself, and those that fail are listed in ``untraced``.
    """
    recorder = _Recorder(tracked)
    where = torch.device(device)
    before = {name: (tensor.data, _place(tensor)) for name, tensor in tracked.items()}
    try:
        with recorder, _inline_threads, torch.no_grad():
            load_weights(offer(tensors, where))
    except Exception as error:  # noqa: BLE001 - a loader may raise anything; it is reported by name below
        recorder = _Recorder(tracked)
        _trace_one_by_one(recorder, load_weights, tensors, where, error)
    finally:
        moved = _put_back(tracked, before)
    for name, tensor in held().items():
        if tensor is not tracked.get(name):
            recorder.replace(name, tracked.get(name), tensor)
    for name in moved:
        recorder.choked[name] = "the loader gives it other memory (it sets .data)"
    return _finish(recorder, tensors)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _put_back(
    tracked: Mapping[str, torch.Tensor], before: Mapping[str, tuple[torch.Tensor, tuple[Any, ...]]]
) -> list[str]:
    """Give tensors that a loader pointed at other memory their own again; returns their names."""
    moved = [name for name, tensor in tracked.items() if _place(tensor) != before[name][1]]
    for name in moved:
        tracked[name].data = before[name][0]
    return moved


class _InlineThreads(threading.local):
    """Within: what this thread submits to a thread pool runs at once, in this thread.

    Loaders copy in pools to save time; the recorder sees one thread only.
    Other threads' pools work as ever, also when several threads trace at a time.
    """

    on = False
    submit_to_pool = ThreadPoolExecutor.submit
    _users = 0
    _lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            _InlineThreads._users += 1
            ThreadPoolExecutor.submit = _submit  # type: ignore[assignment, method-assign]
        self.on = True

    def __exit__(self, *_: object) -> None:
        self.on = False
        with self._lock:
            _InlineThreads._users -= 1
            if not _InlineThreads._users:
                ThreadPoolExecutor.submit = _InlineThreads.submit_to_pool  # type: ignore[method-assign]


_inline_threads = _InlineThreads()


def _submit(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
    if not _inline_threads.on:
        return _InlineThreads.submit_to_pool(pool, function, *args, **kwargs)
    future: Future[Any] = Future()
    try:
        future.set_result(function(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the future's
        future.set_exception(error)
    return future


def _trace_one_by_one(
    recorder: _Recorder,
    load_weights: Loader,
    tensors: Sequence[CanonicalTensor],
    device: torch.device,
    error: Exception,
) -> None:
    for spec in tensors:
        try:
            with recorder, _inline_threads, torch.no_grad():
                load_weights(offer([spec], device))
        except Exception as one:  # noqa: BLE001 - as above
            recorder.choked[spec.name] = f"the loader raised {type(one).__name__}: {one}"
            recorder.used.add(spec.name)
    if not any(str(error) in reason for reason in recorder.choked.values()):
        recorder.choked["load_weights"] = f"raised {type(error).__name__}: {error}"


def _finish(recorder: _Recorder, tensors: Sequence[CanonicalTensor]) -> Trace:
    buffers = [Buffer(name, s.nbytes()) for name, s in zip(recorder.names, recorder.storages, strict=True)]
    shards: list[Shard] = []
    constants: list[Constant] = []
    untraced = [Untraced(name, reason) for name, reason in recorder.choked.items()]
    extra: dict[int, list[ByteRuns]] = {}
    for index, writes in enumerate(recorder.writes):
        computed = recorder.computed.get(index)
        resolved = resolve(writes)
        reason = computed.reason if computed else resolved.fault
        if not reason:
            shards += resolved.shards
            constants += resolved.constants
            continue
        sources = _union(write.sources for write in writes) | (computed.sources if computed else set())
        untraced.append(Untraced(recorder.names[index], reason, index, sources))
        extra[index] = [write.runs for write in writes] + (computed.runs if computed else [])
    layout = build_layout(shards, buffers, constants)
    return Trace(
        layout=layout,
        storages=tuple(recorder.storages),
        untraced=tuple(sorted(untraced, key=lambda fault: fault.name)),
        dropped=tuple(spec.name for spec in tensors if spec.name not in recorder.used),
        gaps=tuple(memory_gaps(layout, extra)),
    )
