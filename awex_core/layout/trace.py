"""Layouts found by running a model's own loader on tensors that carry no data.

``load_weights`` is called once with *traced tensors*: wrapper subclasses that
know which elements of which canonical tensor they show. Views move what is
shown; when the loader copies one into parameter memory, the pair (canonical
box, memory box) is written down and nothing is copied. The idea of recording a
loader instead of writing one per model is also used by vLLM's ``sharded_rdt``
backend (which records op chains); here views become boxes at once.

While tracing, every write to a tracked tensor is intercepted, so no parameter
changes, whatever the loader does and wherever it raises.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from awex_core.errors import LayoutError, TraceError
from awex_core.layout.coverage import Gap, memory_gaps
from awex_core.layout.layout import Buffer, CanonicalTensor, Constant, Layout, Shard, build_layout
from awex_core.layout.strided import Strided, split_into_boxes

aten = torch.ops.aten

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


@dataclass(frozen=True, slots=True)
class Untraced:
    """Something the trace could not follow: ``name`` of a tensor or a parameter, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True)
class Trace:
    """What a loader does with the canonical tensors.

    ``layout`` has one buffer per tracked storage, in the order of ``storages``.
    ``untraced`` lists parameters whose contents are computed from values, and
    tensors the loader choked on. ``dropped`` names canonical tensors that were
    offered and never used. ``gaps`` are parameter bytes that nothing writes.
    """

    layout: Layout
    storages: tuple[torch.UntypedStorage, ...]
    untraced: tuple[Untraced, ...]
    dropped: tuple[str, ...]
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a traced tensor that shows one canonical tensor: ``at`` is where the part lies in it."""

    tensor: CanonicalTensor
    meta: torch.Tensor
    at: tuple[int, ...]


class TracedTensor(torch.Tensor):
    """A tensor without data that knows what it shows.

    ``pieces`` tile it: one for a view of a canonical tensor, several after
    ``cat`` or ``stack``. ``opaque`` is set instead when its elements were
    computed from values; ``sources`` then names the tensors involved.
    ``constant`` is set, with no pieces, when the loader filled it with one value.
    """

    pieces: tuple[_Piece, ...]
    opaque: str
    sources: frozenset[str]
    casts: tuple[torch.dtype, ...]
    constant: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        meta: torch.Tensor,
        pieces: tuple[_Piece, ...],
        device: torch.device,
        *,
        opaque: str = "",
        sources: frozenset[str] = frozenset(),
        casts: tuple[torch.dtype, ...] = (),
        constant: torch.Tensor | None = None,
    ) -> TracedTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        self.meta = meta
        self.pieces = pieces
        self.opaque = opaque
        self.sources = sources or frozenset(piece.tensor.name for piece in pieces)
        self.casts = casts
        self.constant = constant
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__()

    meta: torch.Tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub is nameless
        return f"TracedTensor({', '.join(sorted(self.sources))}, shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it without cls
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Reached only outside a recorder, after the trace is over.
        raise TraceError(f"a traced tensor was used after its trace ended (by {func})")


def storages_of(tracked: Mapping[str, torch.Tensor]) -> dict[str, torch.UntypedStorage]:
    """Each storage once, under the name of the first tensor in it: the buffers of a trace, in order."""
    found: dict[int, tuple[str, torch.UntypedStorage]] = {}
    for name, tensor in tracked.items():
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (name, storage))
    return dict(found.values())


class _Recorder(TorchDispatchMode):
    """Sees every operator while the loader runs."""

    def __init__(self, tracked: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        named = storages_of(tracked)
        self.names = list(named)
        self.storages = list(named.values())
        self._index = {storage._cdata: index for index, storage in enumerate(self.storages)}
        self.shards: list[Shard] = []
        self.constants: list[Constant] = []
        self.untraced: dict[str, str] = {}
        self.used: set[str] = set()
        self.filled: set[str] = set()

    def buffer_of(self, tensor: torch.Tensor) -> int | None:
        """Index of the tracked storage that ``tensor`` lives in."""
        if isinstance(tensor, TracedTensor):
            return None
        try:
            return self._index.get(tensor.untyped_storage()._cdata)
        except (RuntimeError, NotImplementedError):  # tensors without storage are not ours
            return None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = _written_arguments(func, args, kwargs)
        if any(self.buffer_of(tensor) is not None for tensor in written):
            return self._write(func, written[0], args, kwargs)
        traced = [leaf for leaf in _tensors((*args, *kwargs.values())) if isinstance(leaf, TracedTensor)]
        if not traced:
            return func(*args, **kwargs)
        changed = [tensor for tensor in written if isinstance(tensor, TracedTensor)]
        if changed == [args[0]] and func in _FILLS:
            return self._fill_traced(args[0], _fill_value(args))
        if changed:  # other views may show the old elements, so there is no following this
            raise TraceError(f"the loader changes {_names(changed)} in place (by {func})")
        if func is aten.copy_.default and not isinstance(args[0], TracedTensor):
            raise TraceError(f"{_names(traced)} was copied into a temporary tensor of shape {tuple(args[0].shape)}")
        return self._derive(func, args, kwargs, traced)

    def _fill_traced(self, tensor: TracedTensor, value: torch.Tensor) -> TracedTensor:
        """A loader sets what it was given to one value: a bias that only one rank may add."""
        if isinstance(value, TracedTensor):
            raise TraceError(f"{_names([tensor])} is filled with a value of {_names([value])}")
        self.filled |= tensor.sources  # views made before this show values that are gone
        tensor.pieces, tensor.opaque, tensor.constant = (), "", value
        return tensor

    def _write(self, func: Any, target: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """A write to tracked memory: record it, never do it."""
        if not target.numel():
            pass
        elif func is aten.copy_.default and isinstance(args[1], TracedTensor):
            self._record_copy(target, args[1])
        elif func in _FILLS:
            self._record_constant(target, _fill_value(args))
        elif func is aten.copy_.default and _is_uniform(args[1]):
            # It was made without any tensor of the checkpoint, so it is the same in every update.
            self._record_constant(target, args[1].flatten()[0])
        else:
            self._mark(target, f"written by {func}, whose result depends on values")
        return target

    def _mark(self, target: torch.Tensor, reason: str) -> None:
        index = self.buffer_of(target)
        self.untraced.setdefault(self.names[index] if index is not None else "a temporary", reason)

    def _record_copy(self, target: torch.Tensor, source: TracedTensor) -> None:
        self.used |= source.sources
        if source.constant is not None:
            self._record_constant(target, source.constant)
            return
        if source.sources & self.filled:
            raise TraceError(f"{_names([source])} was filled with a value through another view of it")
        if source.opaque:
            self._mark(target, f"{', '.join(sorted(source.sources))}: {source.opaque}")
            return
        if any(cast != target.dtype for cast in source.casts):
            self._mark(target, f"{_names([source])} is rounded to {source.casts[0]} on the way to {target.dtype}")
            return
        buffer = self.buffer_of(target)
        if buffer is None:
            raise TraceError(f"{_names([source])} was copied outside the model's parameters")
        if target.shape != source.shape:
            source = _broadcast(source, target)
        try:
            for piece in source.pieces:
                region = target
                for dim, (begin, size) in enumerate(zip(piece.at, piece.meta.shape, strict=True)):
                    if size != region.shape[dim]:
                        region = region.narrow(dim, begin, size)
                self._record_piece(buffer, region, piece)
        except LayoutError as error:
            self._mark(target, f"{_names([source])}: {error}")

    def _record_piece(self, buffer: int, region: torch.Tensor, piece: _Piece) -> None:
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
            self.shards.append(Shard(piece.tensor, start, extent, buffer, offset, stride, dtype))

    def _record_constant(self, target: torch.Tensor, value: torch.Tensor) -> None:
        if not target.numel():
            return
        buffer = self.buffer_of(target)
        if buffer is None:
            return
        element = value.to(device="cpu", dtype=target.dtype).reshape(1).view(torch.uint8)
        size = target.element_size()
        self.constants.append(
            Constant(
                extent=tuple(target.shape),
                buffer=buffer,
                offset=int(target.storage_offset()) * size,
                stride=tuple(s * size for s in target.stride()),
                dtype=str(target.dtype).removeprefix("torch."),
                value=bytes(element.tolist()),
            )
        )

    def _derive(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traced: list[TracedTensor]) -> Any:
        """The traced result of an operator on traced tensors."""
        first = traced[0]
        if func in _SAME_VALUES:
            return _cast(first, kwargs.get("dtype") or first.dtype)
        if func is aten.cat.default:
            return _cat(list(args[0]), args[1] if len(args) > 1 else kwargs.get("dim", 0))
        if func is aten.stack.default:
            dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            dim = dim % (args[0][0].dim() + 1)
            return _cat([_unsqueeze(part, dim) for part in args[0]], dim)
        if func in _VIEWS and len(traced) == 1:
            return _view(func, args, kwargs, first)
        return _opaque(func, args, kwargs, traced)


_SAME_VALUES = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten.lift_fresh.default,
        aten.contiguous.default,
    }
)
_FILLS = frozenset({aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor})
_SLICES = frozenset(
    {aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
)
_VIEWS = _SLICES | {
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.as_strided.default,
    aten.unfold.default,
    aten.diagonal.default,
}


@functools.cache
def _write_positions(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written: list[torch.Tensor] = []
    for position, name in _write_positions(func):
        written += _tensors([args[position] if position < len(args) else kwargs.get(name)])
    return written


def _fill_value(args: tuple[Any, ...]) -> torch.Tensor:
    """What one of ``_FILLS`` writes; ``zero_`` has no argument for it."""
    return torch.as_tensor(args[1]) if len(args) > 1 else torch.zeros(())


def _tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors among arguments of an operator, which nests them one list deep at most."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [entry for entry in value if isinstance(entry, torch.Tensor)]
    return found


def _map_tensors(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of a value, or of each entry of a list or tuple."""
    if isinstance(value, (list, tuple)):
        return type(value)(function(entry) for entry in value)
    return function(value)


def _call_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(
        *(_map_tensors(_meta_of, value) for value in args),
        **{name: _map_tensors(_meta_of, value) for name, value in kwargs.items()},
    )


def _is_uniform(tensor: torch.Tensor) -> bool:
    """Whether all elements are one value, as in padding that a loader makes."""
    return not tensor.is_meta and tensor.numel() > 0 and bool((tensor == tensor.flatten()[0]).all())


def _names(traced: Sequence[TracedTensor]) -> str:
    return ", ".join(sorted({name for tensor in traced for name in tensor.sources}))


def _cast(tensor: TracedTensor, dtype: torch.dtype) -> TracedTensor:
    # The canonical strides stay: a clone shows the same elements, and where they come from is all that counts.
    casts = tensor.casts if dtype == tensor.dtype else (*tensor.casts, dtype)
    return TracedTensor(
        tensor.meta.to(dtype) if dtype == tensor.dtype else _as_dtype(tensor.meta, dtype),
        tuple(_Piece(p.tensor, _as_dtype(p.meta, dtype), p.at) for p in tensor.pieces),
        tensor.device,
        opaque=tensor.opaque,
        sources=tensor.sources,
        casts=casts,
        constant=tensor.constant,
    )


def _as_dtype(meta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same view (sizes, strides and offset in elements) of a canonical tensor of another dtype."""
    if meta.dtype == dtype:
        return meta
    size = meta.untyped_storage().nbytes() // meta.element_size()
    base = torch.empty(size, dtype=dtype, device="meta")
    return base.as_strided(meta.shape, meta.stride(), meta.storage_offset())


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: TracedTensor) -> Any:
    """Apply a view operator to what a traced tensor shows."""
    if tensor.constant is not None:
        result = _call_on_meta(func, args, kwargs)
        return _map_tensors(lambda meta: _constant(tensor, meta), result)
    if tensor.opaque or len(tensor.pieces) != 1:
        return _view_composite(func, args, kwargs, tensor)
    piece = tensor.pieces[0]
    try:
        result = _call_on_meta(func, args, kwargs)
    except RuntimeError as error:  # a reshape that needs a copy: the elements cannot be shown as one view
        if func not in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            raise
        return TracedTensor(
            torch.empty(
                args[1] if -1 not in args[1] else tensor.meta.contiguous().view(args[1]).shape,
                dtype=tensor.dtype,
                device="meta",
            ),
            (),
            tensor.device,
            opaque=f"reshaped in a way that reorders elements ({error})",
            sources=tensor.sources,
        )

    def wrap(meta: Any) -> Any:
        if not isinstance(meta, torch.Tensor):
            return meta
        return TracedTensor(
            meta,
            (_Piece(piece.tensor, meta, (0,) * meta.dim()),),
            tensor.device,
            sources=tensor.sources,
            casts=tensor.casts,
        )

    return _map_tensors(wrap, result)


def _constant(tensor: TracedTensor, meta: Any) -> Any:
    if not isinstance(meta, torch.Tensor):
        return meta
    return TracedTensor(meta, (), tensor.device, sources=tensor.sources, casts=tensor.casts, constant=tensor.constant)


def _view_composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: TracedTensor) -> Any:
    """Views of a ``cat`` or ``stack``: slices and permutations are followed, reshapes are not."""
    result = _call_on_meta(func, args, kwargs)
    if tensor.opaque:
        return _map_tensors(lambda meta: _relabel(tensor, meta, tensor.opaque), result)
    if func is aten.slice.Tensor:
        dim, start, end, step = (*args[1:], *(None,) * 4)[:4]
        if (step or 1) == 1:
            dim = (dim or 0) % tensor.dim()
            begin, stop, _ = slice(start, end).indices(tensor.shape[dim])
            return _cut(tensor, result, dim, begin, stop)
    if func is aten.select.int:
        dim, index = args[1] % tensor.dim(), args[2] % tensor.shape[args[1]]
        kept = _cut(tensor, tensor.meta.narrow(dim, index, 1), dim, index, index + 1)
        return _rearrange(kept, result, lambda meta: meta.select(dim, 0), lambda at: (*at[:dim], *at[dim + 1 :]))
    if func in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int):
        return _split_composite(func, args, kwargs, tensor, result)
    order = _permutation(func, args, tensor.dim())
    if order is not None:
        return _rearrange(tensor, result, lambda meta: meta.permute(order), lambda at: tuple(at[d] for d in order))
    if func is aten.unsqueeze.default:
        dim = args[1] % (tensor.dim() + 1)
        return _rearrange(tensor, result, lambda meta: meta.unsqueeze(dim), lambda at: (*at[:dim], 0, *at[dim:]))
    return _map_tensors(lambda meta: _relabel(tensor, meta, f"a concatenation was viewed by {func}"), result)


def _split_composite(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: TracedTensor, result: Sequence[torch.Tensor]
) -> list[TracedTensor]:
    position = 1 if func is aten.unbind.int else 2
    dim = (args[position] if len(args) > position else kwargs.get("dim", 0)) % tensor.dim()
    parts, begin = [], 0
    for meta in result:
        if func is aten.unbind.int:
            parts.append(_view_composite(aten.select.int, (tensor, dim, begin), {}, tensor))
            begin += 1
        else:
            parts.append(_cut(tensor, meta, dim, begin, begin + meta.shape[dim]))
            begin += meta.shape[dim]
    return parts


def _permutation(func: Any, args: tuple[Any, ...], ndim: int) -> list[int] | None:
    order = list(range(ndim))
    if func is aten.permute.default:
        return [dim % ndim for dim in args[1]]
    if func is aten.t.default:
        return order[::-1]
    if func is aten.transpose.int:
        a, b = args[1] % ndim, args[2] % ndim
        order[a], order[b] = order[b], order[a]
        return order
    return None


def _meta_of(value: Any) -> Any:
    return value.meta if isinstance(value, TracedTensor) else value


def _relabel(tensor: TracedTensor, meta: Any, reason: str) -> Any:
    if not isinstance(meta, torch.Tensor):
        return meta
    return TracedTensor(meta, (), tensor.device, opaque=reason, sources=tensor.sources)


def _cut(tensor: TracedTensor, meta: torch.Tensor, dim: int, begin: int, stop: int) -> TracedTensor:
    pieces = []
    for piece in tensor.pieces:
        low = max(begin, piece.at[dim])
        high = min(stop, piece.at[dim] + piece.meta.shape[dim])
        if low < high:
            at = (*piece.at[:dim], low - begin, *piece.at[dim + 1 :])
            pieces.append(_Piece(piece.tensor, piece.meta.narrow(dim, low - piece.at[dim], high - low), at))
    return TracedTensor(meta, tuple(pieces), tensor.device, sources=tensor.sources, casts=tensor.casts)


def _rearrange(
    tensor: TracedTensor,
    meta: torch.Tensor,
    view: Callable[[torch.Tensor], torch.Tensor],
    move: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> TracedTensor:
    pieces = tuple(_Piece(piece.tensor, view(piece.meta), move(piece.at)) for piece in tensor.pieces)
    return TracedTensor(meta, pieces, tensor.device, sources=tensor.sources, casts=tensor.casts)


def _unsqueeze(part: torch.Tensor, dim: int) -> torch.Tensor:
    # Operators on traced tensors are not recorded inside the recorder itself, so views are applied by hand.
    if not isinstance(part, TracedTensor):
        return part.unsqueeze(dim)
    unsqueezed: TracedTensor = _view(aten.unsqueeze.default, (part, dim), {}, part)
    return unsqueezed


def _broadcast(tensor: TracedTensor, target: torch.Tensor) -> TracedTensor:
    """What ``target.copy_(tensor)`` shows when the shapes differ; repeated elements are refused later."""
    if len(tensor.pieces) != 1:
        raise TraceError(f"a concatenation of {_names([tensor])} is broadcast to {tuple(target.shape)}")
    meta = tensor.meta.expand(target.shape)
    piece = _Piece(tensor.pieces[0].tensor, meta, (0,) * meta.dim())
    return TracedTensor(meta, (piece,), tensor.device, sources=tensor.sources, casts=tensor.casts)


def _cat(parts: list[Any], dim: int) -> TracedTensor:
    """Concatenate: each part keeps its pieces, moved along ``dim``."""
    traced = [part for part in parts if isinstance(part, TracedTensor)]
    meta = torch.cat([part.meta if isinstance(part, TracedTensor) else part.to("meta") for part in parts], dim)
    sources = frozenset().union(*(part.sources for part in traced))
    device = traced[0].device
    foreign = len(traced) != len(parts) or any(part.constant is not None for part in traced)
    opaque = next((part.opaque for part in traced if part.opaque), "")
    if foreign or opaque or len({part.casts for part in traced}) > 1:
        reason = opaque or "concatenated with a tensor that is not in the checkpoint, or cast differently"
        return TracedTensor(meta, (), device, opaque=reason, sources=sources)
    pieces: list[_Piece] = []
    begin, dim = 0, dim % meta.dim()
    for part in traced:
        for piece in part.pieces:
            at = (*piece.at[:dim], piece.at[dim] + begin, *piece.at[dim + 1 :])
            pieces.append(_Piece(piece.tensor, piece.meta, at))
        begin += part.shape[dim]
    return TracedTensor(meta, tuple(pieces), device, sources=sources, casts=traced[0].casts)


def _opaque(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], traced: list[TracedTensor]) -> Any:
    """Any other operator computes with values: follow the shape, remember the reason."""
    if not any("Tensor" in str(returned.type) for returned in func._schema.returns):
        raise TraceError(f"the loader asks for the values of {_names(traced)} (by {func})")
    device = traced[0].device

    def to_meta(value: Any) -> Any:
        if isinstance(value, TracedTensor):
            return value.meta
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    sources = frozenset(name for tensor in traced for name in tensor.sources)
    result = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
    return tree_map(
        lambda meta: (
            TracedTensor(meta, (), device, opaque=f"computed by {func}", sources=sources)
            if isinstance(meta, torch.Tensor)
            else meta
        ),
        result,
    )


def trace_loader(
    load_weights: Loader,
    tensors: Sequence[CanonicalTensor],
    tracked: Mapping[str, torch.Tensor],
    *,
    device: torch.device | str = "cpu",
) -> Trace:
    """Run ``load_weights`` on traced tensors and return the layout it implies.

    Args:
        load_weights: called with an iterable of (name, tensor) pairs, as with a checkpoint.
        tensors: the canonical tensors to offer.
        tracked: the model's parameters and buffers by name; on the meta device or live.
        device: the device the traced tensors claim to be on.

    Raises:
        LayoutError: what was recorded is no valid layout.

    A loader that raises does not make this function raise: each tensor is then
    offered by itself, and those that fail are listed in ``untraced``.
    """
    recorder = _Recorder(tracked)
    where = torch.device(device)
    try:
        with recorder, _inline_threads, torch.no_grad():
            load_weights(_offer(tensors, where))
    except Exception as error:  # noqa: BLE001 - a loader may raise anything; it is reported by name below
        recorder = _Recorder(tracked)
        _trace_one_by_one(recorder, load_weights, tensors, where, error)
    return _finish(recorder, tensors)


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


def _offer(tensors: Iterable[CanonicalTensor], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in tensors:
        meta = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        yield spec.name, TracedTensor(meta, (_Piece(spec, meta, (0,) * meta.dim()),), device)


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
                load_weights(_offer([spec], device))
        except Exception as one:  # noqa: BLE001 - as above
            recorder.untraced[spec.name] = f"the loader raised {type(one).__name__}: {one}"
            recorder.used.add(spec.name)
    if not any(str(error) in reason for reason in recorder.untraced.values()):
        recorder.untraced["load_weights"] = f"raised {type(error).__name__}: {error}"


def _finish(recorder: _Recorder, tensors: Sequence[CanonicalTensor]) -> Trace:
    buffers = [Buffer(name, s.nbytes()) for name, s in zip(recorder.names, recorder.storages, strict=True)]
    layout = build_layout(recorder.shards, buffers, recorder.constants)
    return Trace(
        layout=layout,
        storages=tuple(recorder.storages),
        untraced=tuple(Untraced(name, reason) for name, reason in sorted(recorder.untraced.items())),
        dropped=tuple(spec.name for spec in tensors if spec.name not in recorder.used),
        gaps=tuple(memory_gaps(layout)),
    )
