"""What we rely on of Megatron-Core beyond its public signatures. Read against 0.16.1 and 0.19.2."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from awex_core.errors import LayoutError

# One layer of these is half a GPT layer, so "layer i" means something else than in the
# checkpoint, although the keys look alike.
HYBRID_MODELS = frozenset({"HybridModel", "MambaModel"})

# (setting, value that fits the checkpoint, what another value does to the weights)
REQUIRED_SETTINGS: tuple[tuple[str, object, str], ...] = (
    ("layernorm_zero_centered_gamma", False, "norm weights are stored minus one"),
    ("rotary_interleaved", False, "query and key rows are in another order"),
    ("attention_output_gate", False, "the fused QKV also holds a gate"),
    ("heterogeneous_block_specs", False, "head counts differ by layer"),
    ("fp8_param", False, "parameters are stored in FP8"),
    ("moe_use_legacy_grouped_gemm", False, "expert weights are fused and transposed"),
    ("mtp_num_layers", None, "multi-token-prediction layers have no canonical name"),
)


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP, Float16Module and the like."""
    while isinstance(inner := getattr(chunk, "module", None), torch.nn.Module):
        chunk = inner
    return chunk


def check_model(model: Any) -> None:
    """Raise ``LayoutError`` if the model's weights do not mean what a GPTModel's do."""
    hybrid = HYBRID_MODELS & {cls.__name__ for cls in type(model).__mro__}
    if hybrid:
        raise LayoutError(
            f"{type(model).__name__} is a {', '.join(sorted(hybrid))}: its layers are not the checkpoint's layers; "
            "build the model as GPTModel"
        )
    for setting, fits, effect in REQUIRED_SETTINGS:
        value = getattr(model.config, setting, fits)
        if value != fits and (value or fits):
            raise LayoutError(f"the model is configured with {setting}={value!r}: {effect}; use {setting}={fits!r}")


def sharded_tensors(model: Any) -> Iterator[ShardedTensor]:
    """Every tensor of one unwrapped chunk, as Megatron would checkpoint it; ``data`` aliases the live parameters."""
    metadata = {
        "singleton_local_shards": True,
        "non_homogeneous_layers": True,
        "dp_cp_group": _data_parallel_group(model),
    }
    yield from flatten(model.sharded_state_dict(metadata=metadata))


def flatten(tree: Any) -> Iterator[ShardedTensor]:
    """The sharded tensors in a state dict, factories built. Objects without data of their own are left out."""
    if isinstance(tree, ShardedTensor):
        yield tree
    elif isinstance(tree, ShardedTensorFactory):
        yield from flatten(tree.build())
    elif isinstance(tree, dict):
        yield from flatten(tuple(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for child in tree:
            yield from flatten(child)


def _data_parallel_group(model: Any) -> Any:
    groups = getattr(model, "pg_collection", None)
    own = getattr(groups, "dp_cp", None)
    return own if own is not None else parallel_state.get_data_parallel_group(with_context_parallel=True)


def gathers_lazily(chunk: Any) -> bool:
    """Whether an optimizer step leaves this wrapped chunk's parameters to be gathered by the next forward pass."""
    settings = getattr(chunk, "ddp_config", None)
    return bool(
        getattr(settings, "use_distributed_optimizer", False) and getattr(settings, "overlap_param_gather", False)
    )


def prepare_for_gather(optimizer: Any) -> None:
    """Let the optimizer put its results where the gather takes them (0.19 does so only on request)."""
    prepare = getattr(optimizer, "prepare_model_params_for_param_sync", None)
    if prepare is not None:
        prepare()


def finalize_expert_bias(model: torch.nn.Module) -> None:
    """Have routers give their expert bias the memory it keeps.

    Float16Module casts that buffer with everything else, and the router's first
    forward pass puts one in float32 in its place; a layout made before would
    describe memory that never changes again.
    """
    for module in model.modules():
        finalize = getattr(module, "_maintain_float32_expert_bias", None)
        if finalize is not None:
            finalize()


def named_parameters(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of all unwrapped chunks, named for error messages."""
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            yield _in_chunk(name, index, len(chunks)), parameter


def named_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers of all unwrapped chunks, named for error messages."""
    for index, chunk in enumerate(chunks):
        for name, buffer in chunk.named_buffers():
            yield _in_chunk(name, index, len(chunks)), buffer


def persistent_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Of those, the ones that are saved with the model, such as a router's expert bias."""
    for index, chunk in enumerate(chunks):
        for prefix, module in chunk.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield _in_chunk(f"{prefix}.{name}".lstrip("."), index, len(chunks)), buffer


def _in_chunk(name: str, index: int, chunks: int) -> str:
    return f"chunk {index}: {name}" if chunks > 1 else name
