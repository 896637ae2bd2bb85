"""SentencePiece BPE, rebuilt from pieces and scores (Kudo and Richardson 2018).

SentencePiece merges, again and again, the neighbours whose joint piece scores highest. The same
comes of ranked merges: every way to cut a piece in two pieces, in order of the piece's score.
"""

from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, normalizers

from octavo.core.errors import LoadError

_SPACE_MARK: Final = "▁"


def merges_from_scores(
    vocab: dict[str, int], scores: Sequence[float], frozen: frozenset[int]
) -> list[tuple[str, str]]:
    """Return the ranked merges; pieces with an id in ``frozen`` are never made or used by one."""
    pieces = [text for text, token_id in vocab.items() if token_id not in frozen and len(text) > 1]
    pieces.sort(key=lambda text: (-scores[vocab[text]], vocab[text]))
    usable = {text for text, token_id in vocab.items() if token_id not in frozen}
    return [
        (piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in usable and piece[cut:] in usable
    ]


def build_sentencepiece(
    vocab: dict[str, int],
    scores: Sequence[float],
    frozen: frozenset[int],
    *,
    unknown: str | None,
    add_space_prefix: bool,
) -> HFTokenizer:
    """Build a SentencePiece BPE tokenizer with byte fallback.

    Args:
        vocab: piece to id, spaces written ``▁``.
        scores: one per id; higher merges first.
        frozen: ids that take no part in merging (control, byte, unknown and user's own tokens).
        unknown: the piece for what neither pieces nor bytes can spell.
        add_space_prefix: whether a space is put before the text, and after each added token in it.
    """
    try:
        model = models.BPE(
            vocab,
            merges_from_scores(vocab, scores, frozen),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    except Exception as error:  # tokenizers raises plain Exception
        raise LoadError(f"The tokenizer's pieces cannot be used: {error}.") from error
    tokenizer = HFTokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE_MARK)]
    if add_space_prefix:
        steps.insert(0, normalizers.Prepend(_SPACE_MARK))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer
