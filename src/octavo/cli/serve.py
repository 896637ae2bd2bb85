"""``octavo serve``: an OpenAI-compatible server for one model."""

import os

from octavo.cli import options
from octavo.core.errors import SettingError


def serve(
    model: options.ModelArgument = "smollm2",
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    served_model_name: options.ServedModelName = None,
    api_key: options.ApiKey = None,
    backend: options.Backend = "auto",
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "auto",
    kv_cache_dtype: options.KVCacheDtype = "auto",
    threads: options.Threads = 0,
    cpu_affinity: options.CpuAffinity = None,
    packed_cache: options.KeepPacked = True,
    deterministic: options.Deterministic = False,
    isa: options.Isa = "auto",
    max_model_len: options.MaxModelLen = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = 512,
    max_num_seqs: options.MaxNumSeqs = 64,
    block_size: options.BlockSize = 16,
    max_num_queued_reqs: options.MaxNumQueuedReqs = None,
    kv_cache_memory_bytes: options.KVCacheMemoryBytes = None,
    enable_prefix_caching: options.PrefixCaching = True,
    enable_chunked_prefill: options.ChunkedPrefill = True,
    enable_jump_forward: options.JumpForward = True,
    batching_policy: options.BatchingPolicy = "continuous",
    kv_reservation: options.KVReservation = "paged",
    prefix_cache: options.PrefixCache = "radix",
    eviction_policy: options.EvictionPolicy = "predict",
    pin_file: options.PinFile = None,
    scheduling_policy: options.SchedulingPolicy = "fcfs",
    seed: options.EngineSeed = None,
    tool_call_parser: options.ToolCallParser = "auto",
    metrics_prefix: options.MetricsPrefix = "octavo:",
    shutdown_timeout: options.ShutdownTimeout = 30.0,
    log_level: options.LogLevel = "info",
    debug_invariants: options.DebugInvariants = False,
) -> None:
    """Serve a model through an OpenAI-compatible API."""
    from octavo.cli.serving import ServerChoices, run_server, set_up_logging
    from octavo.cli.session import find_model, find_packed_cache
    from octavo.engine.factory import EngineSettings
    from octavo.server.listener import listen

    # An empty variable counts as none for typer, but would leave open what was to be locked.
    if not (os.environ.get("OCTAVO_API_KEY", "key") if api_key is None else api_key).strip():
        raise SettingError(
            "--api-key (or OCTAVO_API_KEY) must not be empty: give a key, or leave it out.",
            name="--api-key",
        )
    if served_model_name is not None and "" in served_model_name:
        raise SettingError("--served-model-name must not be empty.", name="--served-model-name")
    set_up_logging(log_level)
    with listen(host, port) as listener:  # before anything slow: a port in use is told at once
        source = find_model(model)
        names = tuple(served_model_name or [source.served_name])
        settings = EngineSettings(
            model=source.path,
            served_model_name=names[0],
            backend=backend,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            threads=threads,
            cpu_affinity=cpu_affinity,
            packed_cache_dir=find_packed_cache(packed_cache),
            deterministic=deterministic,
            isa=isa,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            enable_jump_forward=enable_jump_forward,
            batching_policy=batching_policy,
            kv_reservation=kv_reservation,
            prefix_cache=prefix_cache,
            eviction_policy=eviction_policy,
            pin_file=pin_file,
            scheduling_policy=scheduling_policy,
            seed=seed,
            debug_invariants=debug_invariants,
        )
        choices = ServerChoices(
            names,
            api_key,
            metrics_prefix,
            max_num_queued_reqs,
            shutdown_timeout_s=shutdown_timeout,
            tool_call_parser=tool_call_parser,
        )
        run_server(settings, choices, listener)
