"""The line of operations that a decoder makes, recorded as data."""

from dataclasses import dataclass, replace

from octavo.kernels.native.weights import MatrixWeight, VectorWeight
from octavo.kernels.ops import Activation, Attention


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An activation of the recorded line: rows of ``features`` floats, written once."""

    features: int
    per_logits_row: bool = False
    """One row per wanted logits row instead of one per token."""


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    """Rows of a table, times ``scale``."""

    out: Value
    table: MatrixWeight
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS norm."""

    out: Value
    x: Value
    weight: VectorWeight
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A matrix product, with what fusion put before and behind it.

    ``gate(norm(x) @ weight.T + bias)`` or ``norm(x) @ weight.T + bias + residual``.
    """

    out: Value
    x: Value
    weight: MatrixWeight
    norm: Norm | None = None
    residual: Value | None = None
    gate: Activation | None = None
    softcap: float | None = None
    feeds_next: bool = False
    """The next operation is a product of nothing but the result, which nothing else reads."""


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """A sum."""

    out: Value
    x: Value
    y: Value


@dataclass(frozen=True, slots=True, eq=False)
class Gated:
    """``activation(gate) * up`` of ``[gate | up]``."""

    out: Value
    x: Value
    activation: Activation


@dataclass(frozen=True, slots=True, eq=False)
class RopeAndStore:
    """Rotation of q and k in place, and the store of k and v."""

    out: Value
    """The rotated ``[q | k | v]``; it takes the place of ``x``."""
    x: Value
    attention: Attention


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """Paged attention."""

    out: Value
    x: Value
    attention: Attention


@dataclass(frozen=True, slots=True, eq=False)
class TakeRows:
    """The rows whose logits are wanted."""

    out: Value
    x: Value


Node = Embed | Norm | Linear | Add | Gated | RopeAndStore | Attend | TakeRows


def inputs_of(node: Node) -> tuple[Value, ...]:
    """Return the values that an operation reads."""
    match node:
        case Embed():
            return ()
        case Add():
            return (node.x, node.y)
        case Linear(residual=Value() as residual):
            return (node.x, residual)
        case _:
            return (node.x,)


class Recorder:
    """``Ops`` that computes nothing: each call appends a node to ``nodes``."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def embed(self, table: MatrixWeight, *, scale: float = 1.0) -> Value:
        """Record a table lookup."""
        out = Value(table.inputs)
        self.nodes.append(Embed(out, table, scale))
        return out

    def rms_norm(self, x: Value, weight: VectorWeight, eps: float) -> Value:
        """Record a norm."""
        out = replace(x)
        self.nodes.append(Norm(out, x, weight, eps))
        return out

    def linear(self, x: Value, weight: MatrixWeight) -> Value:
        """Record a matrix product."""
        out = Value(weight.outputs, x.per_logits_row)
        self.nodes.append(Linear(out, x, weight))
        return out

    def add(self, x: Value, y: Value) -> Value:
        """Record a sum."""
        out = replace(x)
        self.nodes.append(Add(out, x, y))
        return out

    def gated(self, gate_up: Value, activation: Activation) -> Value:
        """Record a gate."""
        out = Value(gate_up.features // 2, gate_up.per_logits_row)
        self.nodes.append(Gated(out, gate_up, activation))
        return out

    def rope_and_store(self, qkv: Value, attention: Attention) -> Value:
        """Record a rotation; the value returned still holds k and v behind q."""
        out = replace(qkv)
        self.nodes.append(RopeAndStore(out, qkv, attention))
        return out

    def paged_attention(self, q: Value, attention: Attention) -> Value:
        """Record attention."""
        out = Value(attention.num_heads * attention.head_dim)
        self.nodes.append(Attend(out, q, attention))
        return out

    def logits_rows(self, x: Value) -> Value:
        """Record the choice of rows."""
        out = Value(x.features, per_logits_row=True)
        self.nodes.append(TakeRows(out, x))
        return out

    def logits(self, x: Value, head: MatrixWeight, *, softcap: float | None = None) -> Value:
        """Record the head's product."""
        head.is_head = True
        out = Value(head.outputs, x.per_logits_row)
        self.nodes.append(Linear(out, x, head, softcap=softcap))
        return out
