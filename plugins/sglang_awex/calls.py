"""SGLang's own calls, and what each does to the engine: HTTP routes, its manager's methods, requests to schedulers."""

from __future__ import annotations

from awex_core.engines.calls import Call, refused, table

_LABEL = "the weights' version is the trainer's, and is set with its weights"
_LORA = "adapters are not synced"
_SHAPE = "the engine's ranks and experts must stay where the trainer's weights are sent"
_STORED = "what it stores is found by tokens alone, so KV of older weights would be reused"

ROUTES: dict[str, Call] = {
    **table(
        generates="""/generate /encode /classify /v1/completions /v1/chat/completions /v1/embeddings /v1/classify
            /v1/audio/transcriptions /v1/realtime /v1/score /v1/decisions /v1/responses /v1/rerank /api/chat
            /api/generate /v1/messages /v1/systemone /invocations /vertex_generate""",
        reads="""/ /ready /health /health_generate /ping /metrics /get_model_info /model_info /get_server_info
            /server_info /v1/loads /v1/models /v1/models/{model:path} /v1/responses/{response_id}
            /v1/responses/{response_id}/cancel /v1/messages/count_tokens /tokenize /v1/tokenize /detokenize
            /v1/detokenize /parse_function_call /separate_reasoning /api/tags /api/show /abort_request /open_session
            /close_session /start_profile /stop_profile /set_trace_level /configure_logging /freeze_gc /slow_down
            /start_expert_distribution_record /stop_expert_distribution_record /dump_expert_distribution_record
            /dumper/{method} /set_internal_state /get_weights_by_name /init_weights_update_group
            /destroy_weights_update_group /init_weights_send_group_for_remote_instance
            /send_weights_to_remote_instance /get_remote_instance_transfer_engine_info
            /remote_instance_transfer_engine_info /add_external_corpus /remove_external_corpus /list_external_corpora
            /get_hicache_l3_cache_layout /is_scaling_elastic_ep /get_transfer_engine_info
            /register_transfer_engine_info /awex/status""",
        waits="/flush_cache /pause_generation /continue_generation",
        owned="""/update_weights_from_disk /update_weights_from_tensor /update_weights_from_distributed
            /update_weights_from_ipc /begin_weight_update /end_weight_update /weights_checker
            /release_memory_occupation /resume_memory_occupation""",
    ),
    **refused(_LABEL, "/update_weight_version"),
    **refused(_LORA, "/load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter"),
    **refused(_SHAPE, "/scale_elastic_ep /pd_role_switch"),
    **refused(_STORED, "/hicache/storage-backend /hicache/storage-backend/clear"),
}
"""By path. What is not here is new, and taken to generate."""

MANAGER: dict[str, Call] = {
    **table(
        waits="flush_cache pause_generation continue_generation",
        owned="""update_weights_from_disk update_weights_from_tensor update_weights_from_distributed
            update_weights_from_ipc begin_weight_update end_weight_update check_weights release_memory_occupation
            resume_memory_occupation""",
    ),
    **refused(_LABEL, "update_weight_version"),
    **refused(_LORA, "load_lora_adapter load_lora_adapter_from_tensors unload_lora_adapter"),
    **refused(_SHAPE, "pd_role_switch scale_elastic_ep"),
    **refused(_STORED, "attach_hicache_storage detach_hicache_storage clear_hicache_storage"),
}
"""Methods of the tokenizer manager, through which HTTP and an offline ``Engine`` go alike. The others only read."""

REQUESTS: dict[str, Call] = {
    **table(
        internal="""TokenizedGenerateReqInput TokenizedEmbeddingReqInput BatchTokenizedGenerateReqInput
            BatchTokenizedEmbeddingReqInput AbortReq ShutdownReq FreezeGCReq ConfigureLoggingReq ProfileReq
            SlowDownReqInput""",
        reads="""OpenSessionReqInput CloseSessionReqInput InitWeightsUpdateGroupReqInput
            DestroyWeightsUpdateGroupReqInput InitWeightsSendGroupForRemoteInstanceReqInput
            SendWeightsToRemoteInstanceReqInput GetWeightsByNameReqInput GetInternalStateReq SetInternalStateReq
            GetHiCacheL3LayoutReq ExpertDistributionReq DumperControlReqInput AddExternalCorpusReqInput
            RemoveExternalCorpusReqInput ListExternalCorporaReqInput""",
        waits="""FlushCacheReqInput PauseGenerationReqInput ContinueGenerationReqInput ClearHiCacheReqInput
            AttachHiCacheStorageReqInput DetachHiCacheStorageReqInput UpdateWeightVersionReqInput""",
        owned="""UpdateWeightFromDiskReqInput UpdateWeightsFromDistributedReqInput UpdateWeightsFromTensorReqInput
            UpdateWeightsFromIPCReqInput BeginWeightUpdateReqInput EndWeightUpdateReqInput CheckWeightsReqInput
            ReleaseMemoryOccupationReqInput ResumeMemoryOccupationReqInput RpcReqInput LoadLoRAAdapterReqInput
            LoadLoRAAdapterFromTensorsReqInput UnloadLoRAAdapterReqInput PdRoleSwitchReqInput ScaleElasticEPReqInput""",
    ),
}
"""What a scheduler is sent, by type. What is not here is owned."""

HARMLESS_RPCS = frozenset({"save_remote_model", "save_sharded_model"})
"""Methods of a scheduler, called by ``Engine.collective_rpc``, that only read weights; any other is owned."""

LOSES: dict[str, str] = {
    "ReleaseMemoryOccupationReqInput": "release_memory_occupation has dropped the weights",
    "ResumeMemoryOccupationReqInput": "release_memory_occupation has dropped the weights",
}
"""Requests that leave no model's weights where they leave others than there were."""

DESTROYS: dict[str, str] = {"CheckWeightsReqInput": "weights_checker has overwritten the weights"}
"""Requests that leave no model's weights."""
