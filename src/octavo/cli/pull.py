"""``octavo pull``: fetch a model into the user's cache folder."""

import typer

from octavo.cli import options
from octavo.cli.console import byte_progress, print_error


def pull(model: options.ModelArgument = "smollm2", as_json: options.Json = False) -> None:
    """Fetch a model into the cache folder, or check the one there."""
    from octavo.models.source import default_cache_dir
    from octavo.models.source import pull as fetch

    try:
        with byte_progress(f"Fetching {model}") as show:
            pulled = fetch(model, cache_dir=default_cache_dir(), on_progress=show)
    except KeyboardInterrupt as error:
        print_error(f"Interrupted: nothing of {model} was stored.")
        raise typer.Exit(130) from error
    if as_json:
        import json

        facts = {"model": model, "path": str(pulled.path), "was_there": pulled.was_there}
        print(json.dumps(facts))
    elif pulled.was_there:
        print(f"{model} is here already, and whole: {pulled.path}")
    else:
        print(f"{model} is at {pulled.path}")
