"""vLLM serves the trainer's newest weights: ``vllm serve MODEL --weight-sync-backend=awex ...``.

__init__   what vLLM calls in every process: register the backend, hook the process
hooks      flags where vLLM builds them, the engine's core, the workers
options    the flags, and what they do not go with
calls      vLLM's own calls, and what each does to the engine
refusals   what of vLLM does not go with following a trainer
guard      the engine's core, which all calls pass: who pauses, who has changed weights
worker     one worker: vLLM's ``WeightTransferEngine`` named ``awex``
model      one worker's parameters, traced through vLLM's own loader
host       one engine: pause, receive, resume; status and refusal over HTTP
kept       what no checkpoint fills, and may stay as it is
compat     the only file that touches private vLLM names
"""

from __future__ import annotations


def register() -> None:
    """Entry point ``vllm.general_plugins``; called in every vLLM process, possibly more than once.

    Without the flag this changes nothing but the list of flags and of backends.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from vllm_awex.compat import log_like_vllm
    from vllm_awex.hooks import hook_process
    from vllm_awex.host import attach_to_api_server

    if "awex" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("awex", "vllm_awex.worker", "AwexWeightTransferEngine")
    log_like_vllm()
    hook_process()
    attach_to_api_server()
