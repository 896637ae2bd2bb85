"""The names and meanings of all metric series: what /metrics shows and the docs list.

Names, labels and buckets are vLLM's where the idea is the same, so that its dashboards work with
``--metrics-prefix vllm:``. The client library appends ``_total`` to counters.
"""

from typing import Final

from octavo.observe.buckets import FIRST_TOKEN_S, INTER_TOKEN_S, REQUEST_S

GAUGES: Final = {
    "num_requests_running": "Sequences that run: they hold KV blocks.",
    "num_requests_waiting": "Sequences in the queue, preempted ones included, and branches whose "
    "prompt another is still computing.",
    "kv_cache_usage_perc": "Share of KV blocks that running sequences hold, 0 to 1.",
}

COUNTERS: Final = {
    "prefix_cache_queries": "Prompt tokens that were looked up in the prefix cache when their "
    "sequence first ran.",
    "prefix_cache_hits": "Prompt tokens whose KV the prefix cache had when their sequence first "
    "ran; recompute after preemption counts in neither.",
    "preempted_prefix_cache_queries": "Tokens of preempted sequences that were looked up when "
    "they came back.",
    "preempted_prefix_cache_hits": "Tokens of preempted sequences whose KV was still there when "
    "they came back.",
    "num_preemptions": "Times a running sequence lost its KV blocks and was queued again.",
    "kv_cache_evictions": "Cached KV blocks forgotten to make room.",
    "prompt_tokens": "Prompt tokens processed, as steps complete: computed (again after a "
    "preemption) or found in the prefix cache. The sum of request_prompt_tokens counts each "
    "prompt once, when its sequence ends, whether or not it ever ran.",
    "prompt_tokens_cached": "Prompt tokens taken from the prefix cache; equals "
    "prefix_cache_hits_total.",
    "generation_tokens": "Tokens sampled, as steps complete. The sum of "
    "request_generation_tokens leaves out those after a stop string.",
}

REQUEST_SUCCESS: Final = (
    "request_success",
    "Sequences that left the engine, by reason: every accepted one ends in exactly one of them.",
)

REQUESTS_REJECTED: Final = (
    "requests_rejected",
    "Requests refused before they were accepted, by HTTP status; in no other series.",
)

KV_BLOCKS: Final = (
    "kv_cache_blocks",
    "KV blocks by state: free (hold nothing), cached (evictable prefix) and used (in a table).",
)

EVICTION_POLICY_INFO: Final = (
    "kv_cache_eviction_policy_info",
    "1 for the eviction policy in force, 0 for those that were before.",
)

EVICTION: Final = {
    "kv_cache_policy_evictions": (
        "evictions_total",
        "Cached KV blocks forgotten to make room while the policy was in force.",
    ),
    "kv_cache_policy_unused_evictions": (
        "unused_evictions_total",
        "Of them, those that no sequence had taken from the cache: kept for nothing.",
    ),
    "kv_cache_policy_expected_evictions": (
        "expected_evictions_total",
        "Of them, those that a waiting request would have hit: nothing else was left.",
    ),
    "kv_cache_policy_hits": (
        "hits_total",
        "KV blocks that sequences took and nobody was using, while the policy was in force.",
    ),
    "kv_cache_policy_saved_tokens": ("saved_tokens_total", "Tokens in those blocks."),
    "kv_cache_policy_switches": (
        "switches_total",
        "Times that the policy was put in force while serving.",
    ),
}
"""By eviction policy, in the label ``policy``: the field of ``EvictionTotals``, and the meaning."""

CACHE_CONFIG_INFO: Final = ("cache_config_info", "Settings of the KV cache, as labels; always 1.")

LATENCIES: Final = {
    "time_to_first_token_seconds": (
        FIRST_TOKEN_S,
        "Arrival to first token, once for each sequence that got one, whatever comes later.",
    ),
    "inter_token_latency_seconds": (
        INTER_TOKEN_S,
        "Gap before each token but a sequence's first.",
    ),
    "request_time_per_output_token_seconds": (
        INTER_TOKEN_S,
        "(last - first token) / (tokens - 1) of each ended sequence with two tokens or more.",
    ),
    "e2e_request_latency_seconds": (
        REQUEST_S,
        "Arrival to end: the sum of queue, prefill and decode time.",
    ),
    "request_queue_time_seconds": (
        REQUEST_S,
        "Arrival to first scheduled, or to the end if it never ran.",
    ),
    "request_inference_time_seconds": (
        REQUEST_S,
        "First scheduled to end: prefill and decode time, time spent preempted included.",
    ),
    "request_prefill_time_seconds": (
        REQUEST_S,
        "First scheduled to first token, or to the end without one.",
    ),
    "request_decode_time_seconds": (
        REQUEST_S,
        "First token to end.",
    ),
    "step_time_seconds": (
        FIRST_TOKEN_S,
        "Wall time of one step of the engine.",
    ),
}

REQUEST_TOKENS: Final = {
    "request_prompt_tokens": "Prompt tokens of each ended sequence.",
    "request_generation_tokens": "Tokens given to the client by each ended sequence.",
    "request_max_num_generation_tokens": "Most tokens given by any completion of the request; "
    "each completion is counted as its own.",
    "request_params_max_tokens": "The limit of output tokens of each ended sequence.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of each ended sequence that ran, less "
    "those found in the prefix cache.",
}

STEP_TOKENS_SERIES: Final = (
    "iteration_tokens_total",
    "Tokens of each step: prompt tokens computed and tokens sampled.",
)
