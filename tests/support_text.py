"""Tiny tokenizers and texts that the tests of tokenizing, templates and streaming share."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer

from octavo.models.tokenizer import Tokenizer, load_tokenizer
from octavo.models.tokenizer_source import GGUFTokenizerSource

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

quick = settings(deadline=None, max_examples=60)
"""For properties: few examples, and no clock."""

FAMILY = "👨‍👩‍👧‍👦"
SKIN_TONE = "👍🏽"
CHINESE = "敏捷的棕色狐狸跳过了懒狗。"
HEBREW = "שָׁלוֹם עֲלֵיכֶם"
DEVANAGARI = "नमस्ते दुनिया"

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's what we've always done, isn't it?",
    "Numbers: 1 12 123 1234 12345, 3.14159 and 2024-01-31 at 23:59:59, costs $1,000,000.",
    "def main(argv):\n    for i in range(10):\n\t\tprint(i, argv[i])\n\n\nif x == 1:  # why?\n",
    "I'M SURE WE'LL SEE WHAT THEY'D DONE, DON'T YOU? It'S odd that she'Ll say 'twas 'Re.",
    CHINESE * 2 + "日本語のテキストも、カタカナも。한국어 문장도 있습니다.",
    f"Привет, как дела? {HEBREW} مرحبا بالعالم {DEVANAGARI} ça va, naïve café déjà vu",
    f"{SKIN_TONE} {FAMILY} 🏳️‍🌈 ok   three spaces\r\nand a line\r\rend ½ Ⅻ ² ٣٤٥ １２",
    "camelCase HTTPServer XMLHttpRequest snake_case SCREAMING_CASE iPhone McDonald's",
    "hello world hello there world of words and other words in the world, hello again",
]

TEXTS = [
    "",
    " ",
    "  ",
    "\n",
    " \n \n\n  x",
    "   leading and trailing   ",
    "\ttabs\t\tand\r\nlines\r\n\r\n",
    "don't DON'T Don'T we'LL I'VE 'S 's '",
    "0 1 12 123 1234 12345 123456 1234567 ½²Ⅻ٣٤ a1b22c333",
    "x=1;y==2!=3<=4>=5&&6||7//8**9...---___+++~~~^^^```$$$",
    CHINESE,
    HEBREW,
    DEVANAGARI,
    f"{SKIN_TONE}{FAMILY}🏳️‍🌈",
    "e\u0301 vs \u00e9, \u1e9b\u0323 \ufb01 \u212b A\u030a",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2028line\ufeffbom",
    "\x00\x01\x7f\x85\xa0",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 \U0010fffd \ue000 \ufffd",
    "▁lower▁one ▁ ▁▁",
    "http://example.com/a?b=c&d=e#f user@example.com",
    *CORPUS,
]

_ALPHABET = "".join(sorted(set("".join(TEXTS)))) + "aeinorst    \n\n''0123456789"
texts = st.one_of(
    st.sampled_from(TEXTS),
    st.text(alphabet=_ALPHABET, max_size=60),
    st.text(max_size=30).filter(lambda text: not re.search(r"[\ud800-\udfff]", text)),
)


@st.composite
def chunked(draw: st.DrawFn, items: st.SearchStrategy[Sequence]) -> list[Sequence]:
    """Draw a sequence and every way to cut it into pieces, empty ones too."""
    whole = draw(items)
    cuts = sorted(draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def gguf_metadata(tokens: Sequence[tuple[str, int]], **keys: object) -> dict[str, object]:
    """Return ``tokenizer.*`` metadata of ``(text, type)`` tokens; keys as GGUF names them."""
    return {
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None},
    }


@cache
def trained_bpe(pattern: str = r"\s?\p{L}+|\p{N}+|\s+|[^\s\p{L}\p{N}]+") -> HFTokenizer:
    """Train a byte-level BPE of 600 tokens on the corpus; words are cut by ``pattern``."""
    tokenizer = HFTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def bpe_parts(tokenizer: HFTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return the vocabulary and merges of a BPE tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


SPECIALS = [("<|endoftext|>", CONTROL), ("<|im_start|>", CONTROL), ("<|im_end|>", CONTROL)]
TOOL = ("<tool_call>", USER_DEFINED)


def byte_level_metadata(pre: str | None = "gpt-2", **keys: object) -> dict[str, object]:
    """Return metadata of a trained byte-level BPE, with three control tokens and a user's own."""
    vocab, merges = bpe_parts(trained_bpe())
    tokens = [(text, NORMAL) for text, _ in sorted(vocab.items(), key=lambda item: item[1])]
    defaults = {"eos_token_id": len(tokens) + 2, "bos_token_id": len(tokens)}
    return gguf_metadata(
        [*tokens, *SPECIALS, TOOL],
        **{
            "model": "gpt2",
            "pre": pre,
            "merges": [" ".join(pair) for pair in merges],
            **defaults,
            **keys,
        },
    )


PIECES = [
    *["▁", "e", "t", "a", "o", "n", "i", "s", "r", "h", "l", "d", "u", "w", "▁t", "he", "▁the"],
    *["▁a", "▁w", "or", "▁wor", "ld", "▁world", "ll", "▁he", "▁hell", "▁hello", "▁▁"],
    *["!", ",", ".", "é", "中"],
]


def sentencepiece_metadata(
    *, extra: Iterable[tuple[str, int]] = (), **keys: object
) -> dict[str, object]:
    """Return metadata of a hand-made SentencePiece model with byte fallback."""
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [(piece, NORMAL) for piece in PIECES]
    tokens += list(extra)
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    return gguf_metadata(
        tokens,
        **{
            "model": "llama",
            "scores": scores,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
            **keys,
        },
    )


def tokenizer_of(metadata: Mapping[str, object]) -> Tokenizer:
    """Load a tokenizer from metadata."""
    return load_tokenizer(GGUFTokenizerSource(metadata))


@cache
def byte_level() -> Tokenizer:
    """Return the byte-level tokenizer, shared by tests because it cannot change."""
    return tokenizer_of(byte_level_metadata())


@cache
def sentencepiece() -> Tokenizer:
    """Return the SentencePiece tokenizer, shared by tests because it cannot change."""
    return tokenizer_of(sentencepiece_metadata())


TOKENIZERS = {"byte_level": byte_level, "sentencepiece": sentencepiece}
