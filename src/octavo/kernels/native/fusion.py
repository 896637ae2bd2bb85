"""Joins neighbouring operations, so that values between them never reach memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from octavo.kernels.native.graph import Add, Gated, Linear, Node, Norm, Value, inputs_of

Rule = Callable[[Node, Node, "Uses"], Node | None]
Uses = Counter[Value]


def fuse(nodes: Sequence[Node]) -> list[Node]:
    """Return an equal line with fewer operations.

    A value is joined away only if nothing but the next operation reads it.
    """
    fused = list(nodes)
    for rule in (_norm_into_linear, _gate_into_linear, _residual_into_linear):
        fused = _apply(rule, fused)
    return _mark_feeders(fused)


def _uses(nodes: Sequence[Node]) -> Uses:
    uses: Uses = Counter()
    for node in nodes:
        uses.update(inputs_of(node))
    uses[nodes[-1].out] += 1
    return uses


def _apply(rule: Rule, nodes: Sequence[Node]) -> list[Node]:
    uses = _uses(nodes)
    out: list[Node] = []
    for node in nodes:
        joined = rule(out[-1], node, uses) if out else None
        if joined is None:
            out.append(node)
        else:
            out[-1] = joined
    return out


def _norm_into_linear(first: Node, second: Node, uses: Uses) -> Node | None:
    if not (isinstance(first, Norm) and isinstance(second, Linear)):
        return None
    if second.x is not first.out or uses[first.out] != 1:
        return None
    return replace(second, x=first.x, norm=first)


def _gate_into_linear(first: Node, second: Node, uses: Uses) -> Node | None:
    if not (isinstance(first, Linear) and isinstance(second, Gated)):
        return None
    if second.x is not first.out or uses[first.out] != 1:
        return None
    if first.weight.has_other_uses:
        return None
    return replace(first, out=second.out, gate=second.activation)


def _residual_into_linear(first: Node, second: Node, uses: Uses) -> Node | None:
    if not (isinstance(first, Linear) and isinstance(second, Add)):
        return None
    if uses[first.out] != 1 or first.gate is not None or first.softcap is not None:
        return None
    if second.x is first.out and second.y is not first.out:
        return replace(first, out=second.out, residual=second.y)
    if second.y is first.out and second.x is not first.out:
        return replace(first, out=second.out, residual=second.x)
    return None


def _mark_feeders(nodes: Sequence[Node]) -> list[Node]:
    uses = _uses(nodes)
    marked = list(nodes)
    for index, (first, second) in enumerate(pairwise(nodes)):
        if not (isinstance(first, Linear) and isinstance(second, Linear)):
            continue
        before = marked[index - 1] if index > 0 else None
        if isinstance(before, Linear) and before.feeds_next:
            continue  # it reads where it would write
        alone = second.x is first.out and uses[first.out] == 1
        if alone and second.norm is None and first.residual is None:
            marked[index] = replace(first, feeds_next=True)
    return marked
