"""WHAT each rank holds, in one vocabulary. Pure: no torch, no engine, no network.

``live`` (layouts of tensors in memory) needs torch and is imported by name.
"""

from awex_core.layout.coverage import memory_gaps, memory_overlaps
from awex_core.layout.dtypes import can_convert, dtype_code, itemsize
from awex_core.layout.layout import Buffer, CanonicalTensor, Constant, Layout, Shard, build_layout, content_hash
from awex_core.layout.wire import Manifest, decode_layout, decode_manifest, encode_layout, encode_manifest

__all__ = [
    "Buffer",
    "CanonicalTensor",
    "Constant",
    "Layout",
    "Manifest",
    "Shard",
    "build_layout",
    "can_convert",
    "content_hash",
    "decode_layout",
    "decode_manifest",
    "dtype_code",
    "encode_layout",
    "encode_manifest",
    "itemsize",
    "memory_gaps",
    "memory_overlaps",
]
