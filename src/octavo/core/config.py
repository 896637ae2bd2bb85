"""Settings of the engine: frozen, checked when made, documented here."""

from dataclasses import dataclass, field

from octavo.core.errors import SettingError
from octavo.core.ids import TokenId


def _at_least(name: str, value: int | float, low: int | float) -> None:
    if not value >= low:
        raise SettingError(f"{name} must be at least {low}, not {value}.", name=name)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much KV there is and how it is shared."""

    num_blocks: int
    """Blocks in the pool."""
    block_size: int = 16
    """Token slots per block."""
    enable_prefix_caching: bool = True
    """Whether finished and running sequences share the KV of equal prefixes."""
    min_partial_hit: int | None = None
    """Fewest tokens for which a block that a prompt diverges in is copied, so that only what
    differs is computed. Copying moves a whole block however few tokens match, so it pays from a
    few on; None means an eighth of a block, 0 whole blocks only."""
    prefix_cache: str = "radix"
    """What finds equal prefixes: ``radix``, ``flat`` (a hash-chain map as in vLLM), or
    ``module:Class``."""
    kv_reservation: str = "paged"
    """Room that a sequence takes when it starts: ``paged`` grows block by block; ``max``, ``pow2``
    and ``oracle`` take one contiguous run for its whole life, as systems before paging did."""
    eviction_policy: str = "lru"
    """Which cached block is forgotten first: a name in the registry, or ``module:Class``."""
    watermark: float = 0.01
    """Share of the pool that admission leaves free while something runs, against preemption; at
    least a block for each sequence that runs. 0 leaves none."""

    def __post_init__(self) -> None:
        _at_least("--num-blocks", self.num_blocks, 1)
        _at_least("--block-size", self.block_size, 1)
        if not 0.0 <= self.watermark < 1.0:
            raise SettingError(
                f"--watermark must be at least 0 and below 1, not {self.watermark}.",
                name="--watermark",
            )
        _at_least("min_partial_hit", self.min_partial_hit or 0, 0)
        if self.is_contiguous and self.enable_prefix_caching:
            raise SettingError(
                f"--kv-reservation {self.kv_reservation} shares no blocks between sequences: it "
                f"needs --no-enable-prefix-caching.",
                name="--kv-reservation",
            )

    @property
    def is_contiguous(self) -> bool:
        """Whether each sequence lies in one run of blocks, taken at its start."""
        return self.kv_reservation != "paged"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How much a step may do, and in which order requests are served."""

    max_model_len: int
    """Most tokens of prompt and output together."""
    max_num_batched_tokens: int = 2048
    """Token budget of a step."""
    max_num_seqs: int = 64
    """Most sequences that run at once."""
    enable_chunked_prefill: bool = True
    """Whether a long prompt may be computed over several steps, beside running decodes."""
    long_prefill_token_threshold: int = 0
    """Most prompt tokens of one sequence in a step, 0 for no limit but the budget."""
    batching_policy: str = "continuous"
    """When sequences join: ``continuous``, in any step; ``static``, when the last batch is done."""
    policy: str = "fcfs"
    """Queue order: a name in the registry (``fcfs``, ``priority``, ``cache-aware``), or
    ``module:Class``."""
    end_token_ids: frozenset[TokenId] = field(default_factory=frozenset)
    """The model's end-of-turn ids."""
    vocab_size: int = 0
    """Size of the vocabulary, 0 if unknown; token ids are checked against it."""

    def __post_init__(self) -> None:
        _at_least("--max-model-len", self.max_model_len, 1)
        _at_least("--max-num-batched-tokens", self.max_num_batched_tokens, 1)
        _at_least("--max-num-seqs", self.max_num_seqs, 1)
        _at_least("--long-prefill-token-threshold", self.long_prefill_token_threshold, 0)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must not be below "
                f"--max-num-seqs ({self.max_num_seqs}): each running sequence needs one token.",
                name="--max-num-batched-tokens",
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise SettingError(
                f"Without chunked prefill --max-num-batched-tokens "
                f"({self.max_num_batched_tokens}) must not be below --max-model-len "
                f"({self.max_model_len}).",
                name="--max-num-batched-tokens",
            )
