"""Keys of cached blocks: no two kinds, splits or values of input meet."""

from dataclasses import fields, replace
from itertools import combinations

import pytest

from octavo.core.request import CacheIdentity
from octavo.kvcache.keys import block_key, namespace_key

BASE = CacheIdentity(model="m", tokenizer="t", kv_dtype="f")
KINDS = [field.name for field in fields(CacheIdentity)]


def test_equal_strings_of_different_kinds_give_different_keys():
    """KV-05: an adapter, a salt, a tenant ... all called "X" are six namespaces."""
    keys = {namespace_key(replace(BASE, **{kind: "X"})) for kind in KINDS}
    assert len(keys) == len(KINDS)
    media = {block_key(b"p", [1], extras=[(kind, b"X")]) for kind in (*KINDS, "media")}
    assert len(media) == len(KINDS) + 1


@pytest.mark.parametrize(("first", "second"), list(combinations(KINDS, 2)))
def test_moving_characters_between_fields_changes_the_key(first, second):
    """KV-07: fields are framed by length, so no crafted secret lands in a neighbour's cache."""
    pairs = [
        ("org_1", "2345"),
        ("org_12345", ""),
        ("", "org_12345"),
        ("2345", "org_1"),
        ("a|b", "c"),
        ("a", "b|c"),
        ("a\0b", "c"),
        ("a", "b\0c"),
    ]
    keys = {namespace_key(replace(BASE, **{first: a, second: b})) for a, b in pairs}
    assert len(keys) == len(pairs)


def test_every_value_of_every_field_counts_in_full():
    """KV-09: 5,000 ids that agree in their first 64 characters give 5,000 keys, for any kind."""
    for kind in KINDS:
        ids = [f"{'0' * 64}{index:x}" for index in range(5000)]
        assert len({namespace_key(replace(BASE, **{kind: text})) for text in ids}) == 5000
    media = {block_key(b"p", [1], extras=[("media", index.to_bytes(8))]) for index in range(5000)}
    assert len(media) == 5000


def test_the_chain_covers_parent_tokens_and_extras():
    """Changing any part of the chain changes the key; order of tokens and extras counts."""
    keys = {
        block_key(b"p", [1, 2]),
        block_key(b"q", [1, 2]),
        block_key(b"p", [2, 1]),
        block_key(b"p", [1]),
        block_key(b"p", [1, 2, 0]),
        block_key(b"p", [1, 2], extras=[("a", b"1"), ("b", b"2")]),
        block_key(b"p", [1, 2], extras=[("b", b"2"), ("a", b"1")]),
        block_key(b"p", [1, 2], extras=[("a", b"1b"), ("", b"2")]),
    }
    assert len(keys) == 8


def test_keys_are_the_same_in_every_process():
    """Keys name content, so tiers can share them: no per-process salt, no pickle order."""
    assert block_key(namespace_key(BASE), [1, 2, 3]).hex().startswith("f1b37bdbf43dd0bf")
    assert len(namespace_key(replace(BASE, salt="\ud800"))) == 32
