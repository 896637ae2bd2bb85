"""How long a server takes to answer or refuse grammars made to be costly, and who else notices.

python benchmarks/hostile_grammars.py --url http://127.0.0.1:8000
python benchmarks/hostile_grammars.py --url http://127.0.0.1:8000 --only enum const

Each shape is asked for alone while another request streams free text. For each: status, seconds
until the first byte of an answer of at most 8 tokens, and the longest gap the stream saw meanwhile.
The server must allow a stream of ``--tokens`` tokens; a stream that ends is begun again.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

Shape = dict[str, Any]


def schema(value: object) -> Shape:
    """Ask for JSON of a schema."""
    text = value if isinstance(value, str) else json.dumps(value)
    return {"structured_outputs": {"json": text}}


def regex(pattern: str) -> Shape:
    """Ask for a text of a regular language."""
    return {"structured_outputs": {"regex": pattern}}


def grammar(text: str) -> Shape:
    """Ask for a sentence."""
    return {"structured_outputs": {"grammar": text}}


def words(number: int) -> str:
    """Return a text that no tokenizer finds short."""
    return "".join(f"{i * 7919 % 100_003} " for i in range(number))


def named(number: int, value: object) -> dict[str, object]:
    """Return properties of different names."""
    return {f"k{i}": value for i in range(number)}


def needed(number: int, value: object) -> dict[str, object]:
    """Return an object of properties that are all required."""
    properties = named(number, value)
    return {"type": "object", "properties": properties, "required": list(properties)}


def web(number: int, degree: int) -> dict[str, object]:
    """Return definitions that refer to one another everywhere."""
    definitions = {
        f"n{i}": {
            "type": "object",
            "properties": {
                f"p{j}": {"$ref": f"#/$defs/n{(i * 7 + j * 13) % number}"} for j in range(degree)
            },
        }
        for i in range(number)
    }
    return {"$defs": definitions, "$ref": "#/$defs/n0"}


def doubling(key: str, levels: int) -> dict[str, object]:
    """Return a schema whose expansion doubles at each level."""
    definitions: dict[str, object] = {
        f"l{i}": {key: [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(levels)
    }
    definitions[f"l{levels}"] = {"type": "object", "properties": {"x": {"type": "integer"}}}
    return {"$defs": definitions, "$ref": "#/$defs/l0"}


def alternatives(number: int, width: int) -> dict[str, object]:
    """Return parts whose joining multiplies their alternatives."""
    return {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"a{i}_{j}": {}}} for j in range(width)]}
            for i in range(number)
        ]
    }


def nested(key: str, depth: int) -> str:
    """Return a schema of schemas, as text."""
    return f'{{"{key}":' * depth + "{}" + "}" * depth


NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}, "required": ["next"]}
LONG_LATE = {
    "type": "array",
    "prefixItems": [{"type": "boolean"}, *[{"$ref": "#/$defs/a"}] * 1000],
    "minItems": 1001,
    "items": False,
    "$defs": {"a": {"const": words(4000)}},
}


def shapes() -> Iterator[tuple[str, Shape]]:
    """Yield the set."""
    yield (
        "recursion without base",
        schema({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}),
    )
    yield "objects without end", schema({"$defs": {"n": NODE}, "$ref": "#/$defs/n"})
    yield "enum of 10,000", schema({"enum": [f"value {i}" for i in range(10_000)]})
    yield "enum of 40,000", schema({"enum": [f"v{i}" for i in range(40_000)]})
    yield "enum of unicode", schema({"enum": [f"日本 {i} é😀\0" for i in range(10_000)]})
    yield "enum of objects", schema({"enum": [{"a": i, "b": [i]} for i in range(5_000)]})
    yield "choice of 10,000", {"structured_outputs": {"choice": [f"é {i}" for i in range(10_000)]}}
    yield "const of 500,000", schema({"const": words(80_000)})
    yield "const of 30,000", schema({"const": words(5_000)})
    yield "const late, 1,000 times", schema(LONG_LATE)
    yield "lark const 300 times", grammar("start: x{300}\nx: /a{40000}/")
    yield "deep 60", schema(nested("items", 60))
    yield "deep 5,000", schema(nested("items", 5_000))
    yield "deep 200,000", schema(nested("not", 80_000))
    yield "pattern long", regex("(a|b)*" * 2_700)
    yield "pattern too long", regex("a|" * 50_000)
    yield "pattern repeats", regex("(a{1,10000}){1,1000}")
    yield "pattern repeats inside", schema({"type": "string", "pattern": "^(a{1,10000}){1,1000}$"})
    yield "pattern states", regex("(.|\n)*a(.|\n){500}b")
    yield "pattern unicode", regex(r"(\p{L}|\p{N}|\p{P}){1,2000}")
    yield "pattern words", regex("(" + "|".join(f"w{i}" for i in range(2_000)) + ")*")
    yield "whitespace", regex("[ \\n\\t]*")
    yield "whitespace grammar", grammar('start: WS* "a"\nWS: /[ \\n]/')
    yield "ambiguous", grammar('start: x\nx: x x x | x x | "a" |')
    yield (
        "nullable doubling",
        grammar(
            "start: r0\n"
            + "".join(f"r{i}: r{i + 1} r{i + 1} |\n" for i in range(200))
            + 'r200: "a"'
        ),
    )
    yield "optional 1,000", schema({"properties": named(1000, {})})
    yield (
        "optional 60 x 60",
        schema({"properties": {f"p{i}": {"properties": named(60, {})} for i in range(60)}}),
    )
    yield "required 5,000", schema(needed(5000, {"type": "string"}))
    yield "anyOf of 2,000", schema({"anyOf": [needed(1, {"const": i}) for i in range(2000)]})
    yield (
        "array of 100,000",
        schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
    )
    yield "definitions web", schema(web(150, 30))
    yield "definitions chain", schema(web(1_000, 5))
    yield "allOf doubling", schema(doubling("allOf", 40))
    yield "anyOf doubling", schema(doubling("anyOf", 40))
    yield "alternatives 8 x 2", schema(alternatives(8, 2))
    yield "alternatives 10 x 2", schema(alternatives(10, 2))
    yield "allOf of 3,000", schema({"allOf": [needed(1, {}) for _ in range(3000)]})
    yield (
        "pattern properties 100",
        schema(
            {
                "patternProperties": {
                    f"^a{i}[a-z]{{1,{i + 1}}}$": {"type": "integer"} for i in range(100)
                }
            }
        ),
    )
    yield (
        "pattern properties 300",
        schema({"patternProperties": {f"^a{i}_": {"type": "integer"} for i in range(300)}}),
    )
    yield (
        "range of 300 digits",
        schema({"type": "integer", "minimum": -(10**300), "maximum": 10**300}),
    )
    yield (
        "ranges 1,000",
        schema(
            {
                "anyOf": [
                    {"type": "number", "minimum": i * 1.37, "maximum": 1e9 + i} for i in range(1000)
                ]
            }
        ),
    )
    yield "multipleOf 29,989", schema({"type": "integer", "multipleOf": 29_989})
    yield "multipleOf 1,234,567", schema({"type": "integer", "multipleOf": 1_234_567})
    yield (
        "multipleOf joined",
        schema({"allOf": [{"type": "integer", "multipleOf": p} for p in (97, 89, 83)]}),
    )
    yield "string of 500,000", schema({"type": "string", "minLength": 500_000})
    formats = ("email", "uri", "date-time", "ipv6", "uuid", "hostname")
    yield (
        "formats 300",
        schema(needed(300, {"anyOf": [{"type": "string", "format": name} for name in formats]})),
    )
    yield (
        "tags 200",
        {
            "structured_outputs": {
                "structural_tag": {
                    "structures": [
                        {"begin": f"<f{i}>", "schema": {"properties": named(20, {})}, "end": "</f>"}
                        for i in range(200)
                    ],
                    "triggers": ["<f"],
                }
            }
        },
    )
    function = {"name": "f", "parameters": needed(200, {"type": "string", "maxLength": 5})}
    yield (
        "tools 128",
        {
            "tools": [
                {"type": "function", "function": {**function, "name": f"f{i}"}} for i in range(24)
            ],
            "tool_choice": "required",
        },
    )


class Stream:
    """A stream of free text, begun again when it ends, and its longest gap since last asked."""

    def __init__(self, session: httpx.AsyncClient, url: str, num_tokens: int) -> None:
        self._session, self._url, self._num_tokens = session, url, num_tokens
        self._longest, self._last = 0.0, time.perf_counter()

    async def run(self) -> None:
        """Read on until cancelled."""
        body = {
            "prompt": "Once upon a time",
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        while True:
            url = f"{self._url}/v1/completions"
            async with self._session.stream("POST", url, json=body) as response:
                response.raise_for_status()
                self._last = time.perf_counter()
                async for _ in response.aiter_raw():
                    self._note()

    def _note(self) -> None:
        now = time.perf_counter()
        self._longest, self._last = max(self._longest, now - self._last), now

    def take(self) -> float:
        """Return the longest gap since the last call, one that goes on included."""
        now = time.perf_counter()
        longest = max(self._longest, now - self._last)
        self._longest, self._last = 0.0, now
        return longest


async def answer(session: httpx.AsyncClient, url: str, shape: Shape) -> tuple[int, float, str]:
    """Return the status, the seconds until the answer began, and the refusal's beginning."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Answer."}],
            "max_tokens": 8,
            "stream": True,
            **shape,
        }
    )
    headers = {"Content-Type": "application/json"}
    started = time.perf_counter()
    where = f"{url}/v1/chat/completions"
    async with session.stream("POST", where, content=body, headers=headers) as response:
        pieces = []
        async for piece in response.aiter_raw():
            if not pieces:
                seconds = time.perf_counter() - started
            pieces.append(piece)
    said = "" if response.is_success else json.loads(b"".join(pieces))["error"]["message"]
    return response.status_code, seconds, said


async def main() -> None:
    """Ask for each shape and print a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names to run")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the other stream")
    args = parser.parse_args()
    slowest, gaps = 0.0, []
    async with httpx.AsyncClient(timeout=120) as session:
        stream = Stream(session, args.url, args.tokens)
        reading = asyncio.create_task(stream.run())
        await asyncio.sleep(2)
        usual = stream.take()
        for name, shape in shapes():
            if args.only and not any(part in name for part in args.only):
                continue
            await asyncio.sleep(0.2)
            stream.take()
            status, seconds, said = await answer(session, args.url, shape)
            await asyncio.sleep(0.1)
            gap = stream.take()
            slowest = max(slowest, seconds)
            gaps.append(gap)
            print(f"{name:26} {status} {seconds:6.3f} s  gap {gap:6.3f} s  {said[:90]}", flush=True)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    print(f"slowest {slowest:.3f} s; longest gap {max(gaps):.3f} s, without them {usual:.3f} s")


if __name__ == "__main__":
    asyncio.run(main())
