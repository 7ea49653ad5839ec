"""Stands in for SGLang's compiled kernels, of which the package index has no CPU build.

SGLang imports these nine by name and calls none of them in plain decoding;
what it does call, it computes with torch where the CPU lacks AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not there on this CPU")

    return kernel


assign_draft_cache_locs_contiguous_cpu = _absent("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _absent("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _absent("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _absent("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _absent("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _absent("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _absent("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _absent("verify_tree_greedy_cpu")
