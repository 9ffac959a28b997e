"""A server on loopback: HTTP, continuous batching, streamed tokens; and its load generator.

The engine runs one step at a time in a thread; requests come and go between steps. The load is
open: requests leave on a random schedule, whatever has come back. Static batches serve the
same schedule in the same run. Answers have the lengths that the clients ask for; the model is
the chapter's with random weights.
"""

import asyncio
import json
import random
import time

import torch
from torch import nn
from torch.nn import functional as F

SLOTS, CONTEXT, VOCABULARY, REQUESTS, RATE = 8, 64, 42, 64, 60


class CachedBlock(nn.Module):
    """Attention, then an MLP; whoever calls it says what the new tokens may look at."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, attend) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # each [b, a, s, h/a]
        x = x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class CachedCharModel(nn.Module):
    """ids and positions [b, s] -> logits [b, s, v]; `attends` has one function a layer."""

    def __init__(self, vocabulary=42, hidden=64, heads=4, layers=2, context=CONTEXT) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, hidden)
        self.position = nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(CachedBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attends) -> torch.Tensor:
        x = self.token(ids) + self.position(positions)
        for block, attend in zip(self.blocks, attends, strict=True):
            x = block(x, attend)
        return self.head(self.norm(x))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Slots:
    """A cache [layers, 2, slots, a, context, h/a]; every row has a length of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        hidden, heads = model.token.embedding_dim, model.blocks[0].heads
        self.cache = torch.zeros(len(model.blocks), 2, SLOTS, heads, CONTEXT, hidden // heads)
        self.length = torch.zeros(SLOTS, dtype=torch.long)

    def prefill(self, slot: int, prompt: torch.Tensor) -> torch.Tensor:
        """Run a prompt [s] and keep its keys and values; the logits [v] after it."""

        def attend(layer: int):
            def write_and_mix(q, k, v):
                self.cache[layer, :, slot, :, : len(prompt)] = torch.cat([k, v])
                return causal(q, k, v)

            return write_and_mix

        layers = range(len(self.model.blocks))
        positions = torch.arange(len(prompt))[None]
        logits = self.model(prompt[None], positions, [attend(layer) for layer in layers])
        self.length[slot] = len(prompt)
        return logits[0, -1]

    def step(self, slots: list[int], last: torch.Tensor) -> torch.Tensor:
        """One more token for each of `slots`, whose latest is `last` [b]; logits [b, v]."""
        rows = torch.tensor(slots)
        here = self.length[rows]  # where the new key goes, another place in every row
        width = int(here.max()) + 1
        visible = (torch.arange(width) <= here[:, None])[:, None, None]  # [b, 1, 1, width]

        def attend(layer: int):
            def write_and_mix(q, k, v):
                keys, values = self.cache[layer]
                keys[rows, :, here], values[rows, :, here] = k[:, :, 0], v[:, :, 0]
                return F.scaled_dot_product_attention(
                    q, keys[rows, :, :width], values[rows, :, :width], attn_mask=visible
                )

            return write_and_mix

        layers = range(len(self.model.blocks))
        logits = self.model(last[:, None], here[:, None], [attend(layer) for layer in layers])
        self.length[rows] += 1
        return logits[:, 0]


# --8<-- [start:server]
class Server:
    """POST {"prompt": […], "tokens": n} answers with n tokens, one chunk of HTTP each."""

    def __init__(self, model: CachedCharModel, refill: bool) -> None:
        self.engine, self.refill = Slots(model), refill
        self.waiting: asyncio.Queue = asyncio.Queue()
        self.free = list(range(SLOTS))
        self.joined = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().split(b"content-length:")[1].split()[0])
        request = json.loads(await reader.readexactly(size))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        tokens: asyncio.Queue = asyncio.Queue()  # from the engine to this connection
        self.waiting.put_nowait((request["prompt"], request["tokens"], tokens))
        for _ in range(request["tokens"]):
            data = b"%d\n" % await tokens.get()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        writer.close()

    @torch.no_grad()  # it holds for one thread only, so it must stand here
    def turn(self, new: dict, running: dict) -> dict[int, int]:
        """Prefill what is new, and one more token for the rest; the tokens, by slot."""
        drawn = {}
        if running:
            last = torch.tensor([state["last"] for state in running.values()])
            logits = self.engine.step(list(running), last)
            drawn = dict(zip(running, logits.argmax(-1).tolist(), strict=True))
        for slot, state in new.items():
            logits = self.engine.prefill(slot, torch.tensor(state["prompt"]))
            drawn[slot] = int(logits.argmax())
        return drawn

    async def run(self) -> None:
        """The loop: admit, step, hand out tokens, free the slots of those that are done."""
        running = {}
        while True:
            new = {}
            if not running:
                ready = 1 if self.refill else SLOTS  # static: wait for a whole batch
                while self.waiting.qsize() < ready:
                    await asyncio.sleep(0.0005)
            if self.refill or not running:
                while self.free and not self.waiting.empty():
                    prompt, left, tokens = self.waiting.get_nowait()
                    new[self.free.pop()] = {"prompt": prompt, "left": left, "tokens": tokens}
            self.joined += len(new) if running else 0
            drawn = await asyncio.to_thread(self.turn, new, running)
            running |= new
            for slot, token in drawn.items():
                state = running[slot]
                state["last"], state["left"] = token, state["left"] - 1
                state["tokens"].put_nowait(token)
                if state["left"] == 0:
                    self.free.append(slot)
                    del running[slot]


# --8<-- [end:server]


# --8<-- [start:client]
async def ask(port: int, at: float, prompt: list[int], tokens: int) -> dict:
    """Send one request when its time has come; note when each token arrives."""
    await asyncio.sleep(at - time.perf_counter())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": prompt, "tokens": tokens}).encode()
    writer.write(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    writer.write(body)
    await reader.readuntil(b"\r\n\r\n")
    times, answer = [], []
    while size := int(await reader.readline(), 16):
        answer.append(int(await reader.readexactly(size)))
        times.append(time.perf_counter())
        await reader.readexactly(2)
    writer.close()
    return {"sent": at, "times": times, "answer": answer}


async def measure(
    model: CachedCharModel, refill: bool, load: list[tuple]
) -> tuple[list, Server]:
    server = Server(model, refill)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    # an error of the engine ends the clients' wait, and so does a minute without an answer
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        engine = group.create_task(server.run())
        start = time.perf_counter() + 0.05
        served = await asyncio.gather(*(ask(port, start + at, *what) for at, *what in load))
        engine.cancel()
    listener.close()
    return served, server


# --8<-- [end:client]


def report(words: str, served: list[dict]) -> list[float]:
    ttft = sorted(r["times"][0] - r["sent"] for r in served)
    gaps = sorted(
        b - a for r in served for a, b in zip(r["times"], r["times"][1:], strict=False)
    )
    tokens = sum(len(r["answer"]) for r in served)
    tail = ttft[int(0.95 * len(ttft))]
    assert sum(t > tail for t in ttft) <= 0.05 * len(ttft)
    seconds = max(r["times"][-1] for r in served) - min(r["sent"] for r in served)
    streaming = sum(r["times"][-1] - r["times"][0] for r in served)
    assert streaming > 0.02 * sum(r["times"][-1] - r["sent"] for r in served)
    good = sum(r["times"][0] - r["sent"] < 0.1 for r in served)
    assert good == sum(t < 0.1 for t in ttft)
    print(
        f"{words:10}  TTFT p50 ≈{1e3 * ttft[len(ttft) // 2]:.0f} ms  "
        f"p95 ≈{1e3 * tail:.0f} ms  "
        f"between tokens p99 ≈{1e3 * gaps[int(0.99 * len(gaps))]:.0f} ms"
    )
    print(
        f"{'':10}  ≈{tokens / seconds:.0f} tokens/s, "
        f"goodput (TTFT < 100 ms) ≈{good / seconds:.0f} "
        f"of ≈{len(served) / seconds:.0f} requests/s"
    )
    return ttft


@torch.no_grad()
def check_alone(model: CachedCharModel, prompt: list[int], answer: list[int]) -> None:
    """The whole model without a cache finds each token at the top of its logits."""
    ids = torch.tensor([prompt + answer])
    logits = model(ids, torch.arange(ids.shape[1])[None], [causal] * len(model.blocks))
    logits = logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-4)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CachedCharModel(VOCABULARY)
    dice, at, load = random.Random(0), 0.0, []
    for _ in range(REQUESTS):
        at += dice.expovariate(RATE)
        prompt = [dice.randrange(VOCABULARY) for _ in range(dice.randint(2, 16))]
        load.append((at, prompt, min(48, 2 + int(dice.lognormvariate(2.3, 0.9)))))
    print(f"{REQUESTS} requests in {at:.2f} s, {sum(n for *_, n in load)} tokens asked for")
    # a static batch of eight begins when the last of them has come
    starts = [load[i - i % SLOTS + SLOTS - 1][0] for i in range(REQUESTS)]
    company = sum(s - at for s, (at, *_) in zip(starts, load, strict=True)) / REQUESTS
    print(f"waiting for seven others takes {1e3 * company:.0f} ms on average")
    ttft = {}
    for words, refill in (("static", False), ("continuous", True)):
        served, server = asyncio.run(measure(model, refill, load))
        for (_, prompt, tokens), r in zip(load, served, strict=True):
            assert len(r["answer"]) == tokens
            check_alone(model, prompt, r["answer"])
        ttft[words] = report(words, served)
        assert sorted(server.free) == list(range(SLOTS)), "a slot was not given back"
        assert (server.joined > 0) == refill, "who joins a batch that runs"
    print(f"all {2 * REQUESTS} answers are those of one request at a time, without a cache")
    assert sum(ttft["static"]) / REQUESTS > company
    assert ttft["continuous"][REQUESTS // 4] < ttft["static"][REQUESTS // 2]


if __name__ == "__main__":
    main()
