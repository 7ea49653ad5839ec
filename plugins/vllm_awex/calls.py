"""vLLM's own calls, and what each does to the engine: HTTP routes, requests to its core, calls to its workers."""

from __future__ import annotations

from awex_core.engines.calls import Call, refused, table

_FOLLOWS = "this engine follows its trainer by itself; vLLM's own weight-transfer calls are for an engine that does not"
_LABEL = "the weights' version is the trainer's, and is set with its weights"
_LORA = "adapters are not synced"
_SHAPE = "the engine's workers and experts must stay where the trainer's weights are sent"
_RECOVERY = "recovery from faults runs beside the engine's core, where it cannot be kept apart from an update"
_AGAIN = "it is for the engine's start only"

ROUTES: dict[str, Call] = {
    **table(
        generates="""/pooling /classify /score /v1/score /rerank /v1/rerank /v2/rerank /v1/embeddings /v2/embed
            /inference/v1/generate /invocations /v1/systemone /generative_scoring /v1/completions /v1/chat/completions
            /v1/chat/completions/batch /v1/messages /v1/responses /cohere/v2/chat /v1/audio/translations
            /v1/audio/transcriptions /v1/realtime""",
        reads="""/health /ping /ready /readyz /load /version /metrics /kv_event_sources /server_info /v1/models
            /tokenize /detokenize /tokenizer_info /is_sleeping /is_paused /weight_info /get_world_size /docs
            /start_profile /stop_profile /v1/responses/{response_id} /v1/responses/{response_id}/cancel
            /v1/chat/completions/render /v1/chat/completions/derender /v1/completions/render /v1/completions/derender
            /v1/messages/render /v1/responses/render /v1/messages/count_tokens /fault_tolerance/status
            /cohere/v2/chat/render /is_scaling_elastic_ep /abort_requests /inference/v1/abort_requests /awex/status""",
        waits="/pause /resume /release_kv_cache_memory /reset_prefix_cache /reset_mm_cache /reset_encoder_cache",
        owned="/sleep /wake_up /collective_rpc /weight_checker",
    ),
    **refused(
        _FOLLOWS,
        """/init_weight_transfer_engine /shutdown_weight_transfer_engine /start_weight_update
        /start_draft_weight_update /update_weights /finish_weight_update""",
    ),
    **refused(_LABEL, "/update_weight_version"),
    **refused(_LORA, "/v1/load_lora_adapter /v1/unload_lora_adapter"),
    **refused(_SHAPE, "/scale_elastic_ep"),
    **refused(_RECOVERY, "/fault_tolerance/apply"),
}
"""By path. What is not here is new, and taken to generate."""

CORE: dict[str, Call] = {
    **table(
        internal="""add_request abort_requests preprocess_add_request log_error_detail log_iteration_details
            capture_iteration_details step
            post_step step_with_batch_queue shutdown has_work is_running process_input_sockets process_output_sockets
            run_busy_loop run_engine_core startup_handshake barrier execute_dummy_batch awex""",
        reads="""get_supported_tasks get_kv_cache_group_metadata profile is_scheduler_paused is_sleeping list_loras
            save_sharded_state compute_weight_checksums get_weight_version""",
        waits="""pause_scheduler resume_scheduler release_kv_cache_memory reset_prefix_cache reset_mm_cache
            reset_encoder_cache""",
        owned="sleep wake_up collective_rpc",
    ),
    **refused(_LABEL, "set_weight_version"),
    **refused(_LORA, "add_lora remove_lora pin_lora"),
    **refused(_SHAPE, "reinitialize_distributed commit_prepared_elastic_ep eep_handle_engine_core_notification"),
}
"""Requests that every client of the engine's core can send, by name. What is not here is owned."""

WORKER: dict[str, Call] = {
    **table(
        internal="""execute_model sample_tokens take_draft_token_ids execute_dummy_batch annotate_profile
            randomize_dummy_inputs synchronize_device release_late_interaction_query_cache awex_command""",
        reads="""check_health get_model get_draft_model get_model_inspection get_supported_tasks vocab_size profile
            get_kv_cache_spec get_cache_block_size_bytes get_supported_kv_cache_layouts list_loras save_sharded_state
            get_kv_connector_handshake_metadata save_tensorized_model supports_draft_weight_updates
            compute_weight_checksums get_compilation_match_table get_encoder_timing_stats sleep_mode_backend
            reset_mm_cache reset_encoder_cache determine_available_memory""",
        owned="""sleep wake_up discard reload_weights reset_weights apply_model update_config checkpoint_prepare
            checkpoint_restore""",
    ),
    **refused(
        _FOLLOWS,
        """init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update start_draft_weight_update
        update_weights finish_weight_update""",
    ),
    **refused(_LORA, "add_lora remove_lora pin_lora"),
    **refused(_SHAPE, "elastic_ep_execute"),
    **refused(_RECOVERY, "handle_ft_command"),
    **refused(
        _AGAIN,
        """load_model init_device init_worker initialize_from_config compile_or_warm_up_model set_kv_cache_layout
        update_max_model_len update_environment_variables shutdown""",
    ),
}
"""What ``collective_rpc`` may call on every worker. A function, and a name that is not here, is owned."""

OFFLINE = frozenset(
    """init_weight_transfer_engine shutdown_weight_transfer_engine start_weight_update start_draft_weight_update
    update_weights finish_weight_update set_weight_version""".split()
)
"""Refused to clients of a server only: the user of an offline ``LLM`` drives his engine by them."""

LOSES: dict[str, str] = {
    "sleep": "sleep has dropped the weights, and no trainer or engine has brought others",
    "wake_up": "sleep has dropped the weights, and no trainer or engine has brought others",
    "discard": "discard has dropped the weights",
}
"""Calls to workers that leave no model's weights where they leave others than there were."""

DESTROYS: dict[str, str] = {"reset_weights": "reset_weights has overwritten the weights with zeros"}
"""Calls to workers that leave no model's weights."""
