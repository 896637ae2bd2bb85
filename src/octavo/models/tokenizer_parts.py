"""What a tokenizer is made of, whichever kind of file it was read from."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer as HFTokenizer

from octavo.core.ids import TokenId

END_TOKEN_TEXTS = frozenset(
    {
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOS]",
        "[EOT]",
        "[e~[",
        "<turn|>",
        "<end_of_turn>",
        "<end_of_utterance>",
        "<|call|>",
        "<|end|>",
        "<|end_of_text|>",
        "<|endoftext|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|return|>",
        "<｜end▁of▁sentence｜>",
    }
)
"""Texts that end a turn in some family of models; they count where a vocabulary has them as an
added token (llama.cpp's list of end-of-generation tokens, without those of code infill)."""


@dataclass(frozen=True)
class TokenizerParts:
    """Everything that ``Tokenizer`` needs, read and checked."""

    backend: HFTokenizer
    """Turns text into ids; adds no special tokens, truncates nothing, pads nothing."""
    token_bytes: tuple[bytes, ...]
    """What each id adds to a text; ids without a token add nothing."""
    fingerprint: str
    """Hex digest over everything that decides which ids a text gets."""
    prefix_ids: tuple[TokenId, ...] = ()
    """Put before every text that asks for special tokens: the BOS, as a rule."""
    suffix_ids: tuple[TokenId, ...] = ()
    """Put behind it."""
    bos_token_id: TokenId | None = None
    end_token_ids: frozenset[TokenId] = frozenset()
    special_token_ids: frozenset[TokenId] = frozenset()
    strips_leading_space: bool = False
    """Whether the encoder puts a space before a text, so that decoding takes one away."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Name to Jinja text; ``default`` is the one to use unless asked otherwise."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Name in chat templates (``bos_token``) to text."""

    def padded(self, vocab_size: int) -> "TokenizerParts":
        """Return the same with ids up to ``vocab_size``; those without a token add no text."""
        missing = vocab_size - len(self.token_bytes)
        return replace(self, token_bytes=self.token_bytes + (b"",) * missing)


def ending_ids(added: Mapping[str, TokenId]) -> frozenset[TokenId]:
    """Return the ids among ``added`` tokens (text to id) whose text ends a turn."""
    return frozenset(added[text] for text in END_TOKEN_TEXTS & added.keys())
