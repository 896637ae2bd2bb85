"""Streams of prompts made to try eviction policies: each stresses another assumption."""

import random
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from octavo.workload.cache_trace import CacheTrace, hash_trace

Prompt = list[tuple[object, ...]]


def _document(name: object, num_blocks: int) -> Prompt:
    return [(name, index) for index in range(num_blocks)]


def _draws(rng: random.Random, num_documents: int, exponent: float) -> Iterator[int]:
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(num_documents)))
    while True:
        yield bisect(weights, rng.random() * weights[-1])


def zipf(num_requests: int, num_documents: int, exponent: float, seed: int = 0) -> list[Prompt]:
    """Four-block documents by popularity, independent of the past."""
    draws = _draws(random.Random(seed), num_documents, exponent)
    return [_document(next(draws), 4) for _ in range(num_requests)]


def loop(num_requests: int, num_documents: int) -> list[Prompt]:
    """Four-block documents round and round: the worst case of LRU just past the cache's size."""
    return [_document(index % num_documents, 4) for index in range(num_requests)]


def once(num_requests: int, num_blocks: int = 8) -> list[Prompt]:
    """Documents that never come again, behind one shared block."""
    return [[("system",), *_document(index, num_blocks)] for index in range(num_requests)]


def recent(
    num_requests: int, mean_distance: float, share_new: float = 0.2, seed: int = 0
) -> list[Prompt]:
    """Reuse at exponential stack distances: LRU is the best policy there is."""
    rng = random.Random(seed)
    stack: list[int] = []
    prompts = []
    for number in range(num_requests):
        distance = int(rng.expovariate(1 / mean_distance))
        old = distance < len(stack) and rng.random() >= share_new
        stack.append(stack.pop(-1 - distance) if old else number)
        prompts.append(_document(stack[-1], 4))
    return prompts


def conversations(
    num_requests: int, num_open: int, mean_turns: float, seed: int = 0
) -> list[Prompt]:
    """Chats that grow turn by turn under one system prompt, any open one going on next."""
    rng = random.Random(seed)
    chats: list[Prompt] = []
    prompts = []
    for number in range(num_requests):
        if len(chats) < num_open:
            chats.append([("system",), (number, 0)])
        chat = rng.choice(chats)
        chat += [(chat[1][0], len(chat) + step) for step in range(rng.randint(1, 4))]
        prompts.append(list(chat))
        if rng.random() * mean_turns < 1:
            chats.remove(chat)
    return prompts


def phases(parts: list[list[Prompt]]) -> list[Prompt]:
    """One stream after another, sharing nothing."""
    return [
        [(number, *block) for block in prompt]
        for number, part in enumerate(parts)
        for prompt in part
    ]


def traps(num_requests: int, near: int, far: int, period: int) -> list[Prompt]:
    """Every second document comes back once, by turns after ``near`` and after ``far`` requests.

    What was learned of one period is wrong in the next.
    """
    prompts: list[Prompt] = []
    for number in range(num_requests):
        distance = near if number // period % 2 else far
        if number % 2 and len(prompts) >= distance:
            prompts.append(prompts[-distance])
        else:
            prompts.append(_document(number, 4))
    return prompts


def scanned(
    num_requests: int, num_hot: int, scan_share: float, scan_blocks: int, seed: int = 0
) -> list[Prompt]:
    """Hot two-block prefixes with a question each, and long one-off documents in between.

    Blocks named ``hot`` are those that a scan should not cost.
    """
    rng = random.Random(seed)
    prompts = []
    for number in range(num_requests):
        if rng.random() < scan_share:
            prompts.append(_document(("scan", number), scan_blocks))
        else:
            hot = rng.randrange(num_hot)
            prompts.append([("hot", hot, 0), ("hot", hot, 1), ("question", number)])
    return prompts


def streams(num_blocks: int, num_requests: int, seed: int = 0) -> Mapping[str, CacheTrace]:
    """Return streams of every kind, sized to a cache of ``num_blocks``."""
    documents = max(2, num_blocks // 4)
    part = max(1, num_requests // 8)
    makers: dict[str, Callable[[], list[Prompt]]] = {
        "zipf 0.7": lambda: zipf(num_requests, 8 * documents, 0.7, seed),
        "zipf 1.1": lambda: zipf(num_requests, 8 * documents, 1.1, seed),
        "loop, fits": lambda: loop(num_requests, int(0.9 * documents)),
        "loop, too long": lambda: loop(num_requests, int(1.2 * documents)),
        "once": lambda: once(num_requests),
        "recent": lambda: recent(num_requests, documents / 3, seed=seed),
        "recent, wide": lambda: recent(num_requests, documents, seed=seed),
        "few chats": lambda: conversations(num_requests // 4, 20, 20, seed),
        "many chats": lambda: conversations(num_requests // 4, 60, 20, seed),
        "phases of zipf": lambda: phases(
            [zipf(part, 4 * documents, 1.0, seed + index) for index in range(8)]
        ),
        "zipf, then loop": lambda: phases(
            [
                loop(part, documents // 2) if index % 2 else zipf(part, 2 * documents, 0.9, seed)
                for index in range(8)
            ]
        ),
        "loop, then recent": lambda: phases(
            [
                recent(part, documents / 2, seed=seed)
                if index % 2
                else loop(part, int(1.5 * documents))
                for index in range(8)
            ]
        ),
        "traps": lambda: traps(num_requests, 5, int(0.8 * documents), part),
        "fast traps": lambda: traps(num_requests, 2, int(0.5 * documents), 2 * documents),
        "scanned": lambda: scanned(num_requests, documents, 0.1, max(2, num_blocks // 20), seed),
    }
    return {name: hash_trace(name, make()) for name, make in makers.items()}
