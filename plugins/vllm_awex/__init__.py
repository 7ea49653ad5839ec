"""vLLM serves the trainer's newest weights: ``vllm serve MODEL --weight-sync-backend=awex ...``.

__init__   what vLLM calls in every process: register the backend, add the flags
options    the flags, and the settings they become
calls      vLLM's own calls, and what each does to the engine
refusals   what of vLLM does not go with following a trainer
guard      the engine's core, which all calls pass: who pauses, who has changed weights
engine     one worker: vLLM's ``WeightTransferEngine`` named ``awex``
layout     one worker's parameters, traced through vLLM's own loader
commit     one engine: pause, receive, resume; status and refusal over HTTP
compat     the only file that touches private vLLM names
"""

from __future__ import annotations


def register() -> None:
    """Entry point ``vllm.general_plugins``; called in every vLLM process, possibly more than once.

    Without the flag this changes nothing but the list of flags and of backends.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from vllm_awex.compat import hook_loaded, log_like_vllm
    from vllm_awex.host import attach_to_api_server
    from vllm_awex.options import add_flags

    if "awex" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("awex", "vllm_awex.worker", "AwexWeightTransferEngine")
    log_like_vllm()
    add_flags()
    hook_loaded()
    attach_to_api_server()
