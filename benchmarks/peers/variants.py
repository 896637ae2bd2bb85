"""The engines of a comparison: each peer's variants, and Octavo with the settings asked for."""

import json
import os
import sys
from collections.abc import Callable, Mapping
from ctypes.util import find_library
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from conversions import ModelFormats
from environments import PEERS, Environment, PeerUnavailable, ensure_environment
from process import Worker

WORKERS: Final = Path(__file__).resolve().parent / "workers"
VLLM_KV_CACHE_GB: Final = 4
OFFLINE: Final = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
OCTAVO: Final = "octavo"


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine in one number format."""

    name: str
    peer: str
    """``octavo``, or a peer's name."""
    encoding: str = ""
    """Of its weights, as its conversion is named; Octavo reads the model itself."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The engine's own, by its own names."""


PEER_VARIANTS: Final = (
    Variant("openvino-int8", "openvino", "int8"),
    Variant("openvino-int8-2k", "openvino", "int8", {"max_num_batched_tokens": 2048}),
    Variant("llama.cpp-q8_0", "llama.cpp", "Q8_0"),
    Variant("llama.cpp-bf16", "llama.cpp", "BF16"),
    Variant("llama.cpp-q4_1", "llama.cpp", "Q4_1"),
    Variant("vllm-bf16", "vllm", "bf16"),
)


def octavo_variant(text: str) -> Variant:
    """Read ``NAME`` or ``NAME:setting=value,...``; settings are ``EngineSettings``' fields.

    A value is JSON where it reads as such (``2048``, ``true``), else text.
    """
    name, _, rest = text.partition(":")
    pairs = (item.partition("=") for item in rest.split(",") if item)
    return Variant(name, OCTAVO, settings={key: _value(value) for key, _, value in pairs})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts workers: the same model, threads and context length for each."""

    formats: ModelFormats
    cache: Path
    threads: int
    max_model_len: int
    say: Callable[[str], None]

    def start(self, variant: Variant) -> Worker:
        """Make what the variant lacks, then load it.

        Raises:
            PeerUnavailable, WorkerError: it cannot be compared with.
        """
        common = {
            "threads": self.threads,
            "max_model_len": self.max_model_len,
            "options": variant.settings,
        }
        log = self.cache / "logs" / f"{variant.name}.log"
        env = {"OMP_NUM_THREADS": str(self.threads), **OFFLINE}
        if variant.peer == OCTAVO:
            settings = {**common, "model": str(self.formats.source)}
            script = str(WORKERS / "run_octavo.py")
            return Worker([sys.executable, script], settings, env, log)
        environment = ensure_environment(PEERS[variant.peer], self.cache, self.say)
        model, script, more_env = self._peer(variant, environment)
        settings = {**common, "model": str(model)}
        command = [str(environment.python), str(WORKERS / script)]
        return Worker(command, settings, {**env, **more_env}, log)

    def _peer(
        self, variant: Variant, environment: Environment
    ) -> tuple[Path, str, Mapping[str, str]]:
        """Return the model, the worker's script and variables of the environment."""
        match variant.peer:
            case "openvino":
                model = self.formats.openvino(environment, variant.encoding)
                return model, "run_openvino.py", {}
            case "llama.cpp":
                return self.formats.gguf_file(variant.encoding), "run_llama_cpp.py", {}
            case "vllm":
                return self.formats.hugging_face(), "run_vllm.py", self._vllm_env(environment)
            case _:
                raise PeerUnavailable(f"There is no worker for {variant.peer}.")

    def _vllm_env(self, environment: Environment) -> Mapping[str, str]:
        """Follow vLLM's advice for CPUs: threads bound to cores, OpenMP and malloc preloaded.

        Compiled ahead of time, this release cannot load what it saved, and compiles at each start.
        """
        cpus = sorted(os.sched_getaffinity(0))[: self.threads]
        env = {
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_CPU_KVCACHE_SPACE": str(VLLM_KV_CACHE_GB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CACHE_ROOT": str(environment.folder / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_AOT_COMPILE": "0",
        }
        openmp = environment.python.parents[1] / "lib" / "libiomp5.so"
        found = [str(openmp)] if openmp.exists() else []
        if tcmalloc := find_library("tcmalloc_minimal"):
            found.append(tcmalloc)
        return {**env, "LD_PRELOAD": ":".join(found)}
