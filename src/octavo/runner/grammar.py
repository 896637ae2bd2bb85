"""Compiled grammars: one llguidance matcher per specification, copied for each sequence.

llguidance is imported where it is first used: many a process compiles no grammar, and loading it
would be a tenth of its start.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from octavo.core.errors import InvalidRequestError
from octavo.core.ids import TokenId
from octavo.core.structured import StructuredOutput
from octavo.models.tokenizer import Tokenizer
from octavo.runner.forced_text import MAX_FORCED_BYTES

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_REASON_CHARS: Final = 300
NUM_CACHED: Final = 256
"""Grammars that are kept though no sequence uses them."""

MAX_ENCODED_CHARS: Final = 4096
"""Longest text that is encoded at once: encoding holds the interpreter."""
_CUT_BYTES: Final = 64
"""How far back from a cut tokens may depend on it."""

ENDLESS: Final = "it only matches texts that are too long or have no end"
_MARK: Final = "\x02"
"""A character that no merge joins with what follows."""


def _limits() -> "LLParserLimits":
    """Return what a grammar may cost: to build, and at one token (some 10 ms)."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=5_000,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


class Vocabulary:
    """A tokenizer as llguidance wants it: bytes of each id, and a canonical encoder."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[TokenId]) -> None:
        """Describe ``tokenizer`` for logits of ``vocab_size``, of which ``end_ids`` end a turn."""
        count = min(tokenizer.vocab_size, vocab_size)
        # Ids beyond the tokenizer's add no text: they are never allowed.
        padding = [b""] * (vocab_size - count)
        self.tokens = [tokenizer.token_bytes(i) for i in range(count)] + padding
        self.end_ids = sorted(i for i in end_ids if 0 <= i < vocab_size)
        specials = {*tokenizer.special_token_ids, *self.end_ids}
        self.special_token_ids = sorted(i for i in specials if i < vocab_size)
        self.special_texts = frozenset(
            self.tokens[i].decode(errors="replace") for i in self.special_token_ids
        )
        self.bos_token_id = tokenizer.bos_token_id
        self.eos_token_id = self.end_ids[0] if self.end_ids else None
        self._tokenizer = tokenizer
        self._mark_ids = self._encode(_MARK) if tokenizer.strips_leading_space else []

    def __call__(self, text: bytes) -> list[TokenId]:
        """Return the ids of a text that continues another: of its beginning, if it is long."""
        words = text.decode(errors="replace")
        if len(words) > MAX_ENCODED_CHARS:
            return self._beginning(words[:MAX_ENCODED_CHARS])
        return self._continued(words)

    def _beginning(self, words: str) -> list[TokenId]:
        """Return the ids of ``words`` but for some last ones, which what follows could change."""
        ids = self._continued(words)
        end, num_bytes = len(ids), 0
        while end > 1 and num_bytes < _CUT_BYTES:
            end -= 1
            num_bytes += len(self.tokens[ids[end]])
        return ids[:end]

    def _continued(self, words: str) -> list[TokenId]:
        if not self._mark_ids:
            return self._encode(words)
        # This encoder puts a space before a text; it does not where something stands there.
        return self._encode(_MARK + words)[len(self._mark_ids) :]

    def _encode(self, text: str) -> list[TokenId]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


class CompiledGrammar:
    """A grammar in its first state. Immutable; safe to use from several threads."""

    __slots__ = ("__weakref__", "_matcher")

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def new_matcher(self) -> "LLMatcher":
        """Return a matcher that has seen no token."""
        return self._matcher.deep_copy()


class GrammarCompiler:
    """Compiles specifications for one vocabulary and keeps what was used last.

    A grammar that somebody holds is never compiled again, however many others came meanwhile: the
    front end holds a request's grammar while the request lives, so the engine thread finds it
    compiled. Safe to use from several threads.
    """

    def __init__(self, vocabulary: Vocabulary, *, num_cached: int = NUM_CACHED) -> None:
        self._vocabulary = vocabulary
        self._num_cached = num_cached
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._tokenizer_lock = threading.Lock()
        self._recent: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._live: WeakValueDictionary[StructuredOutput, CompiledGrammar] = WeakValueDictionary()

    @property
    def end_ids(self) -> list[TokenId]:
        """Ids that a grammar allows where a text may end."""
        return self._vocabulary.end_ids

    def find(self, spec: StructuredOutput) -> CompiledGrammar | None:
        """Return the grammar of ``spec`` if it is compiled."""
        with self._lock:
            grammar = self._live.get(spec)
            if grammar is not None:
                self._keep(spec, grammar)
            return grammar

    def compile(self, spec: StructuredOutput) -> CompiledGrammar:
        """Return the grammar of ``spec``, compiled now unless it was before.

        Raises:
            InvalidRequestError: it is malformed, not supported, too large, or matches nothing.
        """
        grammar = self.find(spec)
        if grammar is None:
            grammar = self._compile(spec)
            with self._lock:
                self._live[spec] = grammar
                self._keep(spec, grammar)
        return grammar

    def warm_up(self) -> "LLTokenizer":
        """Return the vocabulary's token trie, built by the first call; that takes a second."""
        from llguidance import LLTokenizer, TokenizerWrapper

        with self._tokenizer_lock:
            if self._tokenizer is None:
                wrapper = TokenizerWrapper(self._vocabulary)
                self._tokenizer = LLTokenizer(wrapper, eos_token=self._vocabulary.end_ids or None)
            return self._tokenizer

    def _keep(self, spec: StructuredOutput, grammar: CompiledGrammar) -> None:
        self._recent[spec] = grammar
        self._recent.move_to_end(spec)
        if len(self._recent) > self._num_cached:
            self._recent.popitem(last=False)

    def _compile(self, spec: StructuredOutput) -> CompiledGrammar:
        from llguidance import LLMatcher

        from octavo.runner.grammar_source import grammar_text

        text = grammar_text(spec, self._vocabulary.special_texts)
        matcher = LLMatcher(self.warm_up(), text, log_level=0, limits=_limits())
        if matcher.is_error():
            raise _refusal(spec, matcher.get_error())
        self._begin(matcher.deep_copy(), spec)
        return CompiledGrammar(matcher)

    def _begin(self, matcher: "LLMatcher", spec: StructuredOutput) -> None:
        """Find out what building does not show: that no text matches, or at what cost."""
        num_forced = 0
        while num_forced <= MAX_FORCED_BYTES:
            # Masks come first, as forced text is found in them without the interpreter's lock.
            matcher.compute_bitmask()
            forced = [] if matcher.is_error() else matcher.compute_ff_tokens()
            if matcher.is_error() or (forced and not matcher.consume_tokens(forced)):
                raise _refusal(spec, matcher.get_error())
            if not forced:
                return
            num_forced += len(forced)
        raise _refusal(spec, ENDLESS)


def _refusal(spec: StructuredOutput, message: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{spec.param} has a {spec.kind.replace('_', ' ')} that cannot be used: {reason(message)}.",
        param=spec.param,
    )


def reason(message: str) -> str:
    """Return what one of llguidance's messages says, without position marks and source lines."""
    if message.startswith("NoExtension"):
        return "it matches no text"
    if message.startswith("recursion limit"):
        return "it is nested too deeply"
    if message.startswith("parser error: Too many items") and "ff_tokens" in message:
        return ENDLESS
    if message.startswith("oneOf constraints"):
        return (
            "oneOf is possible only where no value can fit two of its schemas: let them differ in "
            "type or in a required constant, or use anyOf"
        )
    lines = [line.strip() for line in message.splitlines()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = said[0] if said else next((line for line in lines if line), "unknown error")
    text = re.sub(r"^(at )?\d+\(\d+\): (invalid regex \".*\" \(in regex\): )?", "", text)
    text = text.removesuffix("<non-verbose/>").strip().rstrip(".")
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1] + "…"
