"""What HTTP costs the engine on few cores: the same requests offline, streamed, and beside traffic.

    python benchmarks/http_overhead.py [--requests 16] [--prompt 128] [--tokens 64] [--rounds 3]

Each round computes the same token ids three times: with ``LLM.generate``; by ``octavo serve``, one
stream a request; and the same again while others ask /health and /tokenize all the time. The
clients run on the same machine and take their share of it, so processor time of the server and of
the clients is printed beside the throughput.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from common import PARAGRAPH, describe_machine

from octavo import LLM, SamplingParams

Prompt = list[int]


@dataclass(frozen=True)
class Sample:
    """One computation of all requests."""

    wall_s: float
    server_s: float
    """Processor time of whoever computed."""
    loop_s: float = 0.0
    """That of the server's event loop alone."""
    client_s: float = 0.0
    num_asides: int = 0
    """Answers to /health and /tokenize meanwhile."""


@dataclass(frozen=True)
class Server:
    """A running ``octavo serve``."""

    port: int
    process: subprocess.Popen[bytes]

    def processor_s(self) -> tuple[float, float]:
        """Return the processor time that all of it, and its event loop's thread, have used."""
        pid = self.process.pid
        return processor_s(f"/proc/{pid}/stat"), processor_s(f"/proc/{pid}/task/{pid}/stat")


def processor_s(path: str) -> float:
    """Return the processor time in a file that Linux keeps for a process or thread."""
    with open(path, encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(choices: argparse.Namespace) -> Iterator[Server]:
    """Run ``octavo serve`` until the block ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    interval = f"import sys; sys.setswitchinterval({choices.switch_interval})"
    line = [sys.executable, "-c", f"{interval}; from octavo.cli.main import main; main()", "serve"]
    line += [choices.model, "--served-model-name", "m", "--port", str(port)]
    line += ["--quantization", choices.quantization, "--no-enable-prefix-caching"]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    try:
        while True:
            if process.poll() is not None:
                raise SystemExit("the server ended before it was healthy")
            with contextlib.suppress(OSError):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    break
            time.sleep(0.05)
        time.sleep(3)  # what the server prepares once it is idle is done
        yield Server(port, process)
    finally:
        process.terminate()
        process.wait()


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A plain connection: a client library would cost more than what is measured."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


def request(path: str, body: object | None) -> bytes:
    """Return the bytes of a request."""
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: m\r\n\r\n".encode()
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def stream(port: int, prompt: Prompt, num_tokens: int) -> None:
    """Read one streamed completion to its end."""
    body = {"model": "m", "prompt": prompt, "max_tokens": num_tokens, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True}
    async with connection(port) as (reader, writer):
        writer.write(request("/v1/completions", body))
        answer = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in answer.partition(b"\r\n")[0]:
            raise SystemExit(f"the server answered {answer!r}")
        tail = b""
        while b"[DONE]" not in tail:
            piece = await reader.read(65536)
            if not piece:
                raise SystemExit("a stream ended early")
            tail = (tail + piece)[-64:]


async def ask_aside(port: int, path: str, body: object | None, pause_s: float) -> int:
    """Ask the same thing again and again until cancelled; return how often it was answered."""
    num_answers = 0
    async with connection(port) as (reader, writer):
        try:
            while True:
                writer.write(request(path, body))
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].split()[0]
                await reader.readexactly(int(length))
                num_answers += 1
                await asyncio.sleep(pause_s)
        except asyncio.CancelledError:
            return num_answers


async def streams(
    server: Server, prompts: Sequence[Prompt], num_tokens: int, *, is_busy: bool
) -> Sample:
    """Stream all prompts at once, perhaps beside traffic of other kinds."""
    text = {"model": "m", "prompt": PARAGRAPH * 4}
    asides = [("/health", None, 0.005), ("/tokenize", text, 0.01), ("/tokenize", text, 0.01)]
    (server_s, loop_s), client_s = server.processor_s(), time.process_time()
    began = time.perf_counter()
    others = [asyncio.create_task(ask_aside(server.port, *aside)) for aside in asides * is_busy]
    await asyncio.gather(*(stream(server.port, prompt, num_tokens) for prompt in prompts))
    wall_s = time.perf_counter() - began
    for other in others:
        other.cancel()
    answers = await asyncio.gather(*others)
    server_end, loop_end = server.processor_s()
    return Sample(
        wall_s,
        server_end - server_s,
        loop_end - loop_s,
        time.process_time() - client_s,
        sum(answers),
    )


def offline(llm: LLM, prompts: Sequence[Prompt], num_tokens: int) -> Sample:
    """Compute all prompts in this process."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    began, used = time.perf_counter(), time.process_time()
    llm.generate(prompts, sampling, use_tqdm=False)
    return Sample(time.perf_counter() - began, time.process_time() - used)


def prompts_of(llm: LLM, choices: argparse.Namespace) -> list[Prompt]:
    """Return prompts of equal length that differ from their first token on."""
    tokens = llm.parts.tokenizer.encode(PARAGRAPH * (choices.prompt // 30 + 2))
    return [[100 + i, *tokens[1 : choices.prompt]] for i in range(choices.requests)]


def main() -> None:
    """Measure and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quantization", default="auto")
    for name, default in (("requests", 16), ("prompt", 128), ("tokens", 64), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--switch-interval", type=float, default=sys.getswitchinterval(), help="of the server"
    )
    choices = parser.parse_args()
    llm = LLM(choices.model, quantization=choices.quantization, enable_prefix_caching=False)
    prompts = prompts_of(llm, choices)
    found: dict[str, list[Sample]] = defaultdict(list)
    with served(choices) as server:
        offline(llm, prompts[:2], 4)
        asyncio.run(streams(server, prompts[:2], 4, is_busy=True))
        for _ in range(choices.rounds):
            found["offline"].append(offline(llm, prompts, choices.tokens))
            for name, is_busy in (("streamed", False), ("streamed, busy", True)):
                sample = asyncio.run(streams(server, prompts, choices.tokens, is_busy=is_busy))
                found[name].append(sample)
    show(found, choices)


def show(found: dict[str, list[Sample]], choices: argparse.Namespace) -> None:
    """Print a line for each way; processor times are in seconds."""
    print(f"{describe_machine()}; load {os.getloadavg()[0]:.1f}; medians of {choices.rounds}")
    print(f"{choices.requests} requests of {choices.prompt} tokens in, {choices.tokens} out\n")
    columns = ("tok/s", "of offline", "server CPU", "loop CPU", "client CPU", "asides/s")
    print(" " * 16 + "".join(f"{column:>12}" for column in columns))
    best = median(found["offline"], lambda sample: sample.wall_s)
    for name, samples in found.items():
        wall = median(samples, lambda sample: sample.wall_s)
        speed = choices.requests * choices.tokens / wall
        print(
            f"{name:<16}{speed:12.0f}{best / wall:12.2f}"
            f"{median(samples, lambda sample: sample.server_s):12.2f}"
            f"{median(samples, lambda sample: sample.loop_s):12.2f}"
            f"{median(samples, lambda sample: sample.client_s):12.2f}"
            f"{median(samples, lambda sample: sample.num_asides / sample.wall_s):12.0f}"
        )


def median(samples: Sequence[Sample], value: Callable[[Sample], float]) -> float:
    """Return the median of what ``value`` takes from samples."""
    return statistics.median(map(value, samples))


if __name__ == "__main__":
    main()
