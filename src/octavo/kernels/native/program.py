"""Turns a recorded line of operations into a program that the extension replays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from octavo.kernels.native import _native
from octavo.kernels.native.graph import (
    Add,
    Attend,
    Embed,
    Gated,
    Linear,
    Node,
    Norm,
    RopeAndStore,
    TakeRows,
    Value,
    inputs_of,
)
from octavo.kernels.native.packed_store import PackedStore
from octavo.kernels.native.weights import MatrixWeight, Precision, VectorWeight
from octavo.kernels.ops import Activation, Attention, Rope

_GATES: Final[dict[Activation | None, int]] = {None: 0, "silu": 1, "gelu_tanh": 2}
"""Numbers of ``kernel_table.h``."""


def build_program(
    backend: _native.Backend,
    nodes: Sequence[Node],
    precision: Precision,
    store: PackedStore | None = None,
) -> _native.Program:
    """Pack the weights that ``nodes`` use, or find them in ``store``; lay out memory for values."""
    builder = _Builder(backend, precision, store, _last_uses(nodes))
    for index, node in enumerate(nodes):
        builder.append(index, node)
    return builder.program


def _last_uses(nodes: Sequence[Node]) -> dict[Value, int]:
    last = {value: index for index, node in enumerate(nodes) for value in inputs_of(node)}
    last[nodes[-1].out] = len(nodes)
    return last


@dataclass(frozen=True, slots=True)
class _Place:
    """A buffer that values of equal shape take in turn."""

    features: int
    per_logits_row: bool
    buffer: int


class _Builder:
    """Emits operations one by one; a buffer is free again after its value's last use."""

    def __init__(
        self,
        backend: _native.Backend,
        precision: Precision,
        store: PackedStore | None,
        last_uses: dict[Value, int],
    ) -> None:
        self.program = _native.Program(backend)
        self._backend = backend
        self._precision: Precision = precision
        self._store = store
        self._last_uses = last_uses
        self._free: list[_Place] = []
        self._places: dict[Value, _Place] = {}
        self._ropes: dict[Rope, int] = {}

    def append(self, index: int, node: Node) -> None:
        """Emit ``node``, the line's operation number ``index``."""
        if isinstance(node, RopeAndStore):
            self._places[node.out] = self._places[node.x]
        else:
            self._places[node.out] = self._take(node.out)
        self._emit(node)
        for value in set(inputs_of(node)):
            if self._last_uses[value] == index and not isinstance(node, RopeAndStore):
                self._free.append(self._places.pop(value))

    def _take(self, value: Value) -> _Place:
        for place in self._free:
            same = place.per_logits_row == value.per_logits_row
            if place.features == value.features and same:
                self._free.remove(place)
                return place
        buffer = self.program.buffer(value.features, value.per_logits_row)
        return _Place(value.features, value.per_logits_row, buffer)

    def _at(self, value: Value) -> int:
        return self._places[value].buffer

    def _emit(self, node: Node) -> None:
        program, out = self.program, self._at(node.out)
        match node:
            case Embed():
                table = self._pack(node.table, gated=False)
                program.embed(out, table, node.scale)
            case Norm():
                program.rms_norm(self._at(node.x), out, node.weight.packed, node.eps)
            case Linear():
                self._emit_linear(node, out)
            case Add():
                program.add(self._at(node.x), self._at(node.y), out)
            case Gated():
                program.gated(self._at(node.x), out, _GATES[node.activation])
            case RopeAndStore():
                self._emit_rope(node)
            case Attend():
                self._emit_attend(node, out)
            case TakeRows():
                program.take_rows(self._at(node.x), out)

    def _pack(self, weight: MatrixWeight, *, gated: bool) -> _native.Weight:
        return weight.pack(self._backend, self._precision, gated, self._store)

    def _emit_linear(self, node: Linear, out: int) -> None:
        self.program.linear(
            self._at(node.x),
            out,
            self._pack(node.weight, gated=node.gate is not None),
            node.norm.weight.packed if node.norm else None,
            node.norm.eps if node.norm else 0.0,
            self._at(node.residual) if node.residual else -1,
            _GATES[node.gate],
            node.softcap or 0.0,
            node.feeds_next,
        )

    def _emit_rope(self, node: RopeAndStore) -> None:
        attention = node.attention
        self.program.rope_and_store(
            self._at(node.x),
            attention.layer,
            self._rope(attention.rope),
            _sizes(attention),
            _packed(attention.q_norm),
            _packed(attention.k_norm),
            attention.norm_eps,
        )

    def _emit_attend(self, node: Attend, out: int) -> None:
        attention = node.attention
        self.program.attend(
            self._at(node.x),
            out,
            attention.layer,
            _sizes(attention),
            attention.scale,
            attention.softcap or 0.0,
        )

    def _rope(self, rope: Rope) -> int:
        if rope not in self._ropes:
            inv_freq = np.ascontiguousarray(rope.inv_freq, np.float32)
            self._ropes[rope] = self.program.rope(inv_freq, rope.magnitude)
        return self._ropes[rope]


def _sizes(attention: Attention) -> list[int]:
    return [
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.sliding_window or 0,
        2 * len(attention.rope.inv_freq),
    ]


def _packed(weight: VectorWeight | None) -> _native.Vector | None:
    return weight.packed if weight else None
