"""``octavo serve``: an OpenAI-compatible server for one model."""

from typing import Annotated, Literal

import typer

from octavo.cli.options import (
    Backend,
    Dtype,
    EngineSeed,
    KVCacheMemoryBytes,
    MaxModelLen,
    ModelArgument,
)

LogLevel = Literal["debug", "info", "warning", "error"]


def serve(
    model: ModelArgument = "smollm2",
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any free port.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that clients may use; may be given several times.",
            show_default="the alias, or the file's stem",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OCTAVO_API_KEY", help="What clients must send as bearer token."),
    ] = None,
    backend: Backend = "auto",
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Token budget of a step, prompts and decodes together.")
    ] = 512,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most sequences that run at once.")] = 64,
    block_size: Annotated[int, typer.Option(min=1, help="Token slots per KV block.")] = 16,
    max_num_queued_reqs: Annotated[
        int | None,
        typer.Option(min=0, help="Longest queue before requests get 429.", show_default="no bound"),
    ] = None,
    kv_cache_memory_bytes: KVCacheMemoryBytes = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Share the KV of equal prefixes.",
        ),
    ] = True,
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Compute long prompts in chunks beside running requests.",
        ),
    ] = True,
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"], typer.Option(help="Order of the queue.")
    ] = "fcfs",
    seed: EngineSeed = None,
    metrics_prefix: Annotated[
        str, typer.Option(help="First part of metric names; vllm: fits vLLM's dashboards.")
    ] = "octavo:",
    shutdown_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests get to finish at the end.")
    ] = 30.0,
    log_level: Annotated[LogLevel, typer.Option(help="How much to log.")] = "info",
    debug_invariants: Annotated[
        bool, typer.Option("--debug-invariants", help="Check every invariant after each step.")
    ] = False,
) -> None:
    """Serve a model through an OpenAI-compatible API."""
    from octavo.cli.serving import ServerChoices, run_server, set_up_logging
    from octavo.cli.session import find_model
    from octavo.engine.factory import EngineSettings
    from octavo.server.listener import listen

    set_up_logging(log_level)
    with listen(host, port) as listener:  # before anything slow: a port in use is told at once
        source = find_model(model)
        names = tuple(served_model_name or [source.served_name])
        settings = EngineSettings(
            model=source.path,
            served_model_name=names[0],
            backend=backend,
            dtype=dtype,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            scheduling_policy=scheduling_policy,
            seed=seed,
            debug_invariants=debug_invariants,
        )
        choices = ServerChoices(
            served_model_names=names,
            api_key=api_key,
            metrics_prefix=metrics_prefix,
            max_num_queued_reqs=max_num_queued_reqs,
            shutdown_timeout_s=shutdown_timeout,
        )
        run_server(settings, choices, listener)
