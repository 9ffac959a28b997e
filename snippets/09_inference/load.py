"""A load generator for any server that speaks OpenAI's protocol.

    python load.py --url http://127.0.0.1:8000/v1        a server that runs
    python load.py "python serve.py --port PORT" …       servers to start, one after the other

The loop is open: requests leave on a Poisson schedule that does not depend on the answers, and
every wait counts from the moment at which a request should have left. All servers get the same
requests, and their answers are compared. The key is the variable OPENAI_API_KEY.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shlex
import signal
import socket
import string
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit


# --8<-- [start:client]
@dataclass
class Sent:
    """One request: when it should have left, when it left, and when each piece arrived."""

    due: float
    left: float = 0.0
    status: int = 0
    text: str = ""
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0  # of the answer, as the server counts them
    whole: bool = False  # it came to its end
    done: bool = False  # so did the stream, with [DONE]

    @property
    def ttft(self) -> float:
        return self.pieces[0] - self.due

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]

    def kept(self, ttft: float, gap: float) -> bool:
        """Whether the answer was complete and met both limits."""
        return self.whole and self.ttft <= ttft and max(self.gaps, default=0.0) <= gap


async def send(url: str, asked: dict | None, path: str, sent: Sent) -> AsyncIterator[bytes]:
    """One request of HTTP; the lines of its answer as they come."""
    place = urlsplit(url)
    secure = place.scheme == "https"
    port = place.port or (443 if secure else 80)
    reader, writer = await asyncio.open_connection(place.hostname, port, ssl=secure or None)
    try:
        body = b"" if asked is None else json.dumps(asked).encode()
        head = [f"{'GET' if asked is None else 'POST'} {place.path}{path} HTTP/1.1"]
        head += [f"Host: {place.netloc}", "Connection: close", f"Content-Length: {len(body)}"]
        head += ["Content-Type: application/json"]
        if key := os.environ.get("OPENAI_API_KEY"):
            head.append(f"Authorization: Bearer {key}")
        writer.write("\r\n".join([*head, "", ""]).encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        sent.status = int(answer.split()[1])
        if "transfer-encoding: chunked" not in answer:
            async for line in reader:
                yield line
            return
        rest = b""
        while size := int(await reader.readline(), 16):  # a line may end in another chunk
            *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
            await reader.readline()
            for line in lines:
                yield line
        yield rest
    finally:
        writer.close()


async def ask(url: str, asked: dict, due: float) -> Sent:
    """Send one request when it is due, and note what comes back and when."""
    await asyncio.sleep(due - time.perf_counter())
    sent = Sent(due, time.perf_counter())
    try:
        async for line in send(url, asked, "/completions", sent):
            if line.strip() == b"data: [DONE]":
                sent.done = True
            elif sent.status == 200 and line.startswith(b"data: "):
                event = json.loads(line[6:])
                sent.tokens = (event.get("usage") or {}).get("completion_tokens", sent.tokens)
                for choice in event.get("choices", []):  # none: an error, or only the usage
                    if choice["text"]:
                        sent.text += choice["text"]
                        sent.pieces.append(time.perf_counter())
                    sent.whole = sent.whole or bool(choice.get("finish_reason"))
    except (OSError, EOFError):
        pass  # no answer, or half of one
    sent.whole = sent.whole and bool(sent.pieces)
    return sent


# --8<-- [end:client]


# --8<-- [start:load]
Load = list[tuple[float, str, int]]  # when each leaves, its prompt, the tokens it asks for


def schedule(requests: int, rate: float, seed: int) -> Load:
    """Requests that leave at random, `rate` a second on average."""
    dice, at, load = random.Random(seed), 0.0, []
    for _ in range(requests):
        at += dice.expovariate(rate)
        prompt = "".join(dice.choices(string.ascii_lowercase, k=dice.randint(2, 16)))
        load.append((at, prompt, min(48, 2 + int(dice.lognormvariate(2.3, 0.9)))))
    return load


async def measure(url: str, load: Load, spent: Callable[[], float]) -> tuple[list[Sent], float]:
    """Send the load. Returns the answers, and the processor time that was `spent`.

    One request is sent before, because engines prepare many things at the first request.
    """
    found = Sent(0.0)
    models = b"".join([line async for line in send(url, None, "/models", found)])
    cards = json.loads(models)["data"] if found.status == 200 else []
    common = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    common |= {"model": cards[0]["id"]} if len(cards) == 1 else {}
    first = await ask(url, common | {"prompt": load[0][1], "max_tokens": 4}, 0.0)
    if not first.whole:
        sys.exit(f"{url} gave no whole answer to a first request: status {first.status}")
    before, start = spent(), time.perf_counter() + 0.05
    asking = [
        ask(url, common | {"prompt": prompt, "max_tokens": tokens}, start + at)
        for at, prompt, tokens in load
    ]
    served = await asyncio.gather(*asking)
    due = [sent.due - start for sent in served]
    assert all(abs(a - b) < 1e-6 for a, (b, *_) in zip(due, load, strict=True)), (
        "timed from due"
    )
    return served, spent() - before


# --8<-- [end:load]


def percentile(values: list[float], p: float) -> float:
    """The smallest value that at least p percent of the values do not exceed."""
    ranked = sorted(values)
    return ranked[math.ceil(p * len(ranked) / 100) - 1]


def report(served: list[Sent], spent: float, ttft: float, gap: float) -> None:
    """Print what a user of this server sees; `ttft` and `gap` are limits in seconds."""
    whole = [sent for sent in served if sent.whole]
    others = sorted({sent.status for sent in served if not sent.whole})
    tokens = sum(sent.tokens for sent in whole)
    print(f"  {len(whole)} of {len(served)} answered whole", end="")
    print(f", the others {', '.join(map(str, others))}" if others else "", end="")
    if not whole:
        return print()
    pieces = sum(len(sent.pieces) for sent in whole)
    end = "" if all(sent.done for sent in whole) else ", no stream ends with [DONE]"
    print(f", {tokens} tokens in ≈{pieces} pieces{end}")
    late = max(sent.left - sent.due for sent in served)
    print(f"  the generator was never more than ≈{1e3 * late:.0f} ms late")
    waits = [sent.ttft for sent in whole]
    between = [between for sent in whole for between in sent.gaps] or [0.0]
    ends = [sent.pieces[-1] - sent.due for sent in whole]
    print(f"  TTFT p50 ≈{1e3 * percentile(waits, 50):.0f} ms", end="")
    print(f"  p95 ≈{1e3 * percentile(waits, 95):.0f} ms", end="")
    print(f"  between tokens p99 ≈{1e3 * percentile(between, 99):.0f} ms", end="")
    print(f"  latency p95 ≈{1e3 * percentile(ends, 95):.0f} ms")
    start = served[0].due
    assert all(sent.due >= start for sent in served)
    seconds = max(sent.pieces[-1] for sent in whole) - start
    good = sum(sent.kept(ttft, gap) for sent in served)
    print(f"  ≈{tokens / seconds:.0f} tokens/s, goodput ≈{good / seconds:.0f}", end="")
    print(f" of ≈{len(served) / seconds:.0f} requests/s", end="")
    print(f" (TTFT ≤ {1e3 * ttft:.0f} ms, no gap above {1e3 * gap:.0f} ms)")
    if spent:
        print(f"  the server took ≈{1e3 * spent / tokens:.1f} ms of processor time a token")


# --8<-- [start:start]
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def named(command: str) -> list[str]:
    """Its words, without the folder that it starts from."""
    first, *words = shlex.split(command)
    return [os.path.basename(first), *words]


def spent_by(session: int) -> float:
    """Processor seconds of a server and all that it started; 0 where there is no /proc."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def started(command: str, load: Load) -> tuple[list[Sent], float]:
    """Start a server, load it, and end it with all that it started."""
    port = free_port()
    words = [word.replace("PORT", str(port)) for word in shlex.split(command)]
    with open(os.devnull, "wb") as nowhere:
        try:
            server = subprocess.Popen(
                words, stdout=nowhere, stderr=nowhere, start_new_session=True
            )
        except OSError as error:
            sys.exit(f"cannot start {words[0]}: {error.strerror}")
    url = f"http://127.0.0.1:{port}/v1"
    try:
        while True:
            try:
                found = Sent(0.0)
                async for _ in send(url, None, "/models", found):
                    pass
                break
            except (OSError, EOFError):
                if server.poll() is not None:
                    sys.exit(f"`{command}` ended with status {server.returncode}")
                await asyncio.sleep(0.1)
        return await measure(url, load, lambda: spent_by(server.pid))
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)  # what is left of its group


# --8<-- [end:start]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "commands", nargs="*", help="start a server; PORT stands for a free port"
    )
    parser.add_argument("--url", help="of a server that runs, with its /v1")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rate", type=float, default=60, help="requests a second")
    parser.add_argument("--ttft", type=float, default=100, help="promise: ms")
    parser.add_argument("--gap", type=float, default=50, help="promise: ms between two tokens")
    options = parser.parse_args()
    if not options.commands and not options.url:
        sys.exit("name a server: --url http://HOST:PORT/v1, or a command that starts one")

    assert Sent(0.0, whole=True, pieces=[0.1, 0.15]).kept(0.1, 0.0501)
    broken = [Sent(0.0, whole=True, pieces=at) for at in ([0.11, 0.12], [0.0, 0.06, 0.07])]
    broken.append(Sent(0.0, whole=False, pieces=[0.1, 0.11]))
    assert not any(sent.kept(0.1, 0.05) for sent in broken), "a promise was not kept"
    load = schedule(options.requests, options.rate, seed=0)
    asked = sum(tokens for *_, tokens in load)
    print(f"{len(load)} requests in {load[-1][0]:.2f} s, {asked} tokens asked for")
    answers: list[str] = []
    for each in [options.url] if options.url else options.commands:
        run = measure(each, load, lambda: 0.0) if options.url else started(each, load)
        try:
            served, spent = asyncio.run(run)
        except OSError as error:
            sys.exit(f"{each} does not answer: {error}")
        print(each if options.url else " ".join(named(each)))
        report(served, spent, options.ttft / 1e3, options.gap / 1e3)
        for sent, (*_, tokens) in zip(served, load, strict=True):
            assert not sent.whole or sent.tokens <= tokens, "more than it was asked for"
        texts = [sent.text if sent.whole else None for sent in served]
        if answers:
            pairs = [pair for pair in zip(answers, texts, strict=True) if None not in pair]
            same = sum(a == b for a, b in pairs)
            print(f"  {same} of {len(pairs)} answers are those of the first server")
        answers = answers or texts


if __name__ == "__main__":
    main()
