"""Byte-level BPE: how each kind of model cuts a text into words before merging.

A GGUF file names the kind in ``tokenizer.ggml.pre``; normalizer and patterns are those of the
model's own ``tokenizer.json``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as HFTokenizer

from octavo.core.errors import LoadError

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES_AND_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """Return the pattern of the cl100k family; ``digits`` says how numbers are cut."""
    return (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES_AND_SPACES}"
    )


def _o200k(digits: str, contractions: str) -> str:
    """Return the pattern of the o200k family, which cuts words where lower case turns to upper."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{upper}*{lower}+{contractions}|{lead}{upper}+{lower}*{contractions}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES_AND_SPACES}"
    )


_DEEPSEEK_V3: Final = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    (
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES_AND_SPACES}"
    ),
)
_DEFAULT: Final = (r"[\p{P}\$\+<=>\^~\|]+",)
_DEFAULT_NUMBERS: Final = (r"\p{N}+", r"[0-9][0-9][0-9]")


def _split(*patterns: str) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


def _byte_level(*, use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [_byte_level(use_regex=True)]


def _digits_gpt2() -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]


def _patterns(*patterns: str) -> Callable[[], list[pre_tokenizers.PreTokenizer]]:
    return lambda: [*_split(*patterns), _byte_level(use_regex=False)]


_GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class BPEKind:
    """How one kind of model prepares a text, and what its files leave unsaid."""

    steps: Callable[[], list[pre_tokenizers.PreTokenizer]]
    nfc: bool = False
    """Whether text is normalized to composed characters first."""
    ignore_merges: bool = False
    """Whether a word that is a token stays whole even if no merges lead there."""
    adds_bos: bool = False
    """Whether a text starts with the BOS where the file does not say."""


_GPT2: Final = BPEKind(_gpt2)
_DIGITS: Final = BPEKind(_digits_gpt2)
_LLAMA3: Final = BPEKind(_patterns(_cl100k(r"\p{N}{1,3}")), ignore_merges=True, adds_bos=True)
_QWEN2: Final = BPEKind(_patterns(_cl100k(r"\p{N}")), nfc=True)
_GPT4O: Final = BPEKind(_patterns(_o200k(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")))

BPE_KINDS: Final[Mapping[str, BPEKind]] = {
    "default": BPEKind(_patterns(*_DEFAULT, _GPT2_WORDS, *_DEFAULT_NUMBERS)),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": BPEKind(_patterns(_cl100k(r"\p{N}{1,3}"))),
    "tekken": BPEKind(_patterns(_o200k(r"\p{N}", "")), ignore_merges=True, adds_bos=True),
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "deepseek-v3": BPEKind(_patterns(*_DEEPSEEK_V3)),
}
"""Name in ``tokenizer.ggml.pre`` to kind."""


def bpe_kind(name: str) -> BPEKind:
    """Return the kind called ``name``; LoadError if there is none."""
    if name not in BPE_KINDS:
        raise LoadError(
            f"The file's tokenizer.ggml.pre is {name!r:.80}, which Octavo does not know; "
            f"it knows {', '.join(sorted(BPE_KINDS))}."
        )
    return BPE_KINDS[name]


def build_bpe(vocab: dict[str, int], merges: Sequence[str], kind: BPEKind) -> HFTokenizer:
    """Build a byte-level BPE tokenizer.

    Args:
        vocab: token text (in the byte-level alphabet) to id.
        merges: ``"left right"``, first merge first.
        kind: how texts are cut into words.

    Raises:
        LoadError: a merge is malformed or names tokens that the vocabulary lacks.
    """
    pairs = _pairs(merges)
    try:
        model = models.BPE(vocab, pairs, ignore_merges=kind.ignore_merges)
    except Exception as error:  # tokenizers raises plain Exception
        raise LoadError(f"The tokenizer's merges do not fit its vocabulary: {error}.") from error
    tokenizer = HFTokenizer(model)
    if kind.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(kind.steps())
    return tokenizer


def _pairs(merges: Sequence[str]) -> list[tuple[str, str]]:
    """Split merges at their first space, but for one that a token starts with."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for index, pair in enumerate(pairs):
        if len(pair) == 2 and pair[0]:
            continue
        merge = merges[index]
        cut = merge.find(" ", 1)
        if cut < 0:
            raise LoadError(f"The tokenizer's merge {merge!r:.80} is not two tokens and a space.")
        pairs[index] = (merge[:cut], merge[cut + 1 :])
    return pairs  # type: ignore[return-value]  # pairs, all of them
