"""A server with continuous batching that speaks OpenAI's protocol, from sockets up.

    python serve.py --port 8000        any client may come: base_url http://127.0.0.1:8000/v1
    python serve.py --save tiny        the same model as a folder that other engines load
    python serve.py                    starts one, and asks it all that follows over the wire

The engine runs one step at a time in a thread; requests come and go between steps. The model is
the chapter's with random weights, its tokens are characters, and it answers greedily.
"""

import argparse
import asyncio
import http.client
import json
import string
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

SLOTS, CONTEXT, ALPHABET = 8, 64, "\n" + string.ascii_lowercase + string.digits + " .,-'"
NAME, QUEUE, LARGEST = "tiny", 64, 1 << 20  # the model; requests that may wait; bytes of one


class CachedBlock(nn.Module):
    """Attention, then an MLP; the caller decides what the new tokens attend to."""

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
    """ids and positions [b, s] -> logits [b, s, v]; `attends` has one function per layer."""

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
    """A cache [layers, 2, slots, a, context, h/a]; every slot has its own length."""

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
        here = self.length[rows]  # the place of the new key in each row
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


# --8<-- [start:protocol]
class Refused(Exception):
    """An error for the client: a status and the error object of the protocol."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        kind = "invalid_request_error" if status < 429 else "server_error"
        self.status = status
        self.error = {"message": message, "type": kind, "param": param, "code": code}


@dataclass(eq=False)
class Request:
    """The request of a client, and the queue of its tokens."""

    prompt: list[int]
    left: int  # tokens still to make
    chat: bool
    stream: bool
    usage: bool  # wanted at the end of a stream
    tokens: asyncio.Queue = field(default_factory=asyncio.Queue)  # None: there are no more
    last: int = -1


TAKEN = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "stream"}
TAKEN |= {"stream_options", "temperature"}


def understand(path: str, body: bytes) -> Request:
    """Read a request. Raises Refused if it asks for anything that we cannot do."""
    try:
        asked = json.loads(body)
        chat = path == "/v1/chat/completions"
        if asked.get("model", NAME) != NAME:
            raise Refused(404, "model_not_found", f"the model here is {NAME}", "model")
        for name in asked.keys() - TAKEN:
            raise Refused(400, "unsupported_parameter", f"{name} is not known here", name)
        if asked.get("temperature"):
            raise Refused(400, "unsupported_value", "all answers are greedy", "temperature")
        turns = [f"{turn['role']} {turn['content']}\n" for turn in asked.get("messages", [])]
        text = "".join(turns) + "assistant " if chat else asked["prompt"]
        room = CONTEXT - len(text)
        left = max(1, room) if chat else 16
        for name in ("max_tokens", "max_completion_tokens"):
            left = left if asked.get(name) is None else asked[name]
        if not (isinstance(text, str) and isinstance(left, int)):
            raise TypeError("one text, and a whole number of tokens")
        prompt = [ALPHABET.index(character) for character in text]
        if not 0 < left <= room or not prompt:
            message = f"{len(prompt)} tokens and {left} more: the context is {CONTEXT} tokens"
            raise Refused(400, "context_length_exceeded", message, "prompt")
        options = asked.get("stream_options") or {}
        usage = bool(options.get("include_usage"))
        return Request(prompt, left, chat, bool(asked.get("stream")), usage)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Refused(400, "invalid_request", "not a request of this protocol") from error


def choice(request: Request, text: str | None, finish: str | None, whole: bool) -> dict:
    """The `choices` entry of an answer, or of a piece of a stream; no text: the end."""
    if not request.chat:
        said = {"text": text or "", "logprobs": None}
    elif whole:
        said = {"message": {"role": "assistant", "content": text}}
    else:
        said = {"delta": {} if text is None else {"role": "assistant", "content": text}}
    return {"index": 0, **said, "finish_reason": finish}


async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
    """Write the tokens one by one, or all of them at the end."""
    thing = "chat.completion" if request.chat else "text_completion"
    piece = thing + ".chunk" * (request.chat and request.stream)
    common = {"id": f"cmpl-{uuid.uuid4().hex}", "object": piece, "created": int(time.time())}
    common["model"] = NAME

    def send(choices: list[dict], **more: dict) -> None:
        event = json.dumps(common | {"choices": choices} | more)
        writer.write(b"data: %s\n\n" % event.encode())

    if request.stream:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Connection: close\r\n\r\n")
    said = []
    while (token := await request.tokens.get()) is not None:
        said.append(ALPHABET[token])
        if request.stream:
            send([choice(request, said[-1], None, whole=False)])
            await writer.drain()
    counts = {"prompt_tokens": len(request.prompt), "completion_tokens": len(said)}
    counts["total_tokens"] = sum(counts.values())
    if not request.stream:
        whole = choice(request, "".join(said), "length", whole=True)
        return reply(writer, 200, common | {"choices": [whole], "usage": counts})
    send([choice(request, None, "length", whole=False)])
    if request.usage:
        send([], usage=counts)
    writer.write(b"data: [DONE]\n\n")


# --8<-- [end:protocol]


# --8<-- [start:server]
class Server:
    """One engine, and the connections that wait for its tokens."""

    def __init__(self, model: CachedCharModel, slots: int = SLOTS, queue: int = QUEUE) -> None:
        self.engine, self.free, self.queue = Slots(model), list(range(slots)), queue
        self.waiting: list[Request] = []
        self.running: dict[int, Request] = {}
        self.arrived = asyncio.Event()
        self.watch = True  # a connection, for its end
        self.made = self.joined = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: one request, and its answer."""
        try:
            try:
                await self.serve(reader, writer)
            except Refused as refused:
                reply(writer, refused.status, {"error": refused.error})
            await writer.drain()
        except (ConnectionError, EOFError):
            pass  # the client has gone
        finally:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path, body = await read(reader)
        if path == "/v1/models":
            card = {"id": NAME, "object": "model", "created": 0, "owned_by": "the book"}
            return reply(writer, 200, {"object": "list", "data": [card]})
        if path not in ("/v1/completions", "/v1/chat/completions"):
            raise Refused(404, "not_found", f"there is no {path}")
        request = understand(path, body)
        if len(self.waiting) >= self.queue:
            raise Refused(429, "queue_full", f"{self.queue} requests wait already")
        self.waiting.append(request)
        self.arrived.set()
        gone = asyncio.create_task(reader.read())  # returns when the client closes
        if self.watch:
            gone.add_done_callback(lambda _: request.tokens.put_nowait(None))
        try:
            await answer(request, writer)
        finally:  # answered, disconnected or failed
            gone.cancel()
            request.left = 0
            if request in self.waiting:
                self.waiting.remove(request)

    @torch.no_grad()  # gradient mode belongs to the thread that runs this
    def turn(self, new: dict[int, Request], running: dict[int, Request]) -> dict[int, int]:
        """Prefill the new requests, one more token for the others; the tokens, by slot."""
        drawn = {}
        if running:
            last = torch.tensor([request.last for request in running.values()])
            logits = self.engine.step(list(running), last)
            drawn = dict(zip(running, logits.argmax(-1).tolist(), strict=True))
        for slot, request in new.items():
            logits = self.engine.prefill(slot, torch.tensor(request.prompt))
            drawn[slot] = int(logits.argmax())
        return drawn

    async def run(self) -> None:
        """The loop: free slots, admit requests, run a step, hand out tokens."""
        while True:
            for slot, request in list(self.running.items()):
                if request.left == 0:
                    self.free.append(slot)
                    del self.running[slot]
            while not self.running and not self.waiting:
                self.arrived.clear()
                await self.arrived.wait()
            room = min(len(self.free), len(self.waiting))
            new = {self.free.pop(): self.waiting.pop(0) for _ in range(room)}
            self.joined += len(new) if self.running else 0
            drawn = await asyncio.to_thread(self.turn, new, self.running)
            self.running |= new
            for slot, token in drawn.items():
                request = self.running[slot]
                request.last, self.made = token, self.made + 1
                if request.left:  # the client is still connected
                    request.left -= 1
                    request.tokens.put_nowait(token)
                    if request.left == 0:
                        request.tokens.put_nowait(None)


# --8<-- [end:server]


async def read(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The path and the body of one request of HTTP."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        length = head.lower().partition("\r\ncontent-length:")[2].partition("\r\n")[0]
        path, length = head.split(" ", 2)[1], int(length or 0)
        if length > LARGEST:
            raise Refused(413, "too_large", f"{length} bytes: at most {LARGEST} are read")
        return path, await reader.readexactly(length)
    except (ValueError, IndexError, asyncio.LimitOverrunError):
        raise Refused(400, "invalid_request", "not a request of HTTP") from None


def reply(writer: asyncio.StreamWriter, status: int, answer: dict) -> None:
    """Write a whole answer of HTTP, after which the connection is closed."""
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} {http.client.responses[status]}\r\nConnection: close\r\n"
    head += "Retry-After: 1\r\n" * (status == 429)
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


def save(model: CachedCharModel, folder: Path) -> None:
    """Write the model and its alphabet as other engines read them: it is a small GPT-2."""
    from safetensors.torch import save_file

    names = {"token": "wte", "position": "wpe", "norm": "ln_f", "blocks": "h", "norm1": "ln_1"}
    names |= {"qkv": "attn.c_attn", "out": "attn.c_proj", "norm2": "ln_2"}
    names |= {"up": "mlp.c_fc", "down": "mlp.c_proj"}
    tensors = {}
    for key, tensor in model.state_dict().items():
        if key == "head.bias":
            assert not tensor.any(), "a GPT-2 has none"
            continue
        name = ".".join(names.get(word, word) for word in key.split("."))
        across = ".c_" in name and tensor.dim() == 2  # it keeps them as [in, out]
        name = "lm_head.weight" if key == "head.weight" else f"transformer.{name}"
        tensors[name] = (tensor.T if across else tensor).contiguous()
    shape = {"n_embd": model.token.embedding_dim, "n_head": model.blocks[0].heads}
    shape |= {"n_layer": len(model.blocks), "n_positions": CONTEXT, "vocab_size": len(ALPHABET)}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    config |= {"activation_function": "gelu", "tie_word_embeddings": False}
    config |= {"bos_token_id": None, "eos_token_id": None} | shape
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated"}
    words = {"type": "WordLevel", "vocab": {c: i for i, c in enumerate(ALPHABET)}}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": split | {"invert": False},
    }
    tokenizer |= {"model": words | {"unk_token": "\n"}, "decoder": {"type": "Fuse"}}
    loader = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, what in (("config", config), ("tokenizer", tokenizer)):
        (folder / f"{name}.json").write_text(json.dumps(what))
    (folder / "tokenizer_config.json").write_text(json.dumps(loader))
    numbers = sum(tensor.numel() for tensor in tensors.values())
    print(f"{folder}: {numbers:,} parameters, {len(ALPHABET)} characters")


# --- what it answers, over the wire ----------------------------------------------------------


def request_of(path: str, asked: dict) -> bytes:
    """A request as it goes over the wire."""
    body = json.dumps(asked).encode()
    return b"POST %s HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(body)) + body


async def ask(port: int, path: str, asked: dict) -> tuple[int, str]:
    """Status and body of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request_of(path, asked))
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


@torch.no_grad()
def check_alone(model: CachedCharModel, prompt: list[int], answer: list[int]) -> None:
    """Without a cache, each token has the largest logit."""
    ids = torch.tensor([prompt + answer])
    logits = model(ids, torch.arange(ids.shape[1])[None], [causal] * len(model.blocks))
    logits = logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-4)


def events(body: str) -> Iterator[dict]:
    """The pieces of a stream, which ends as the protocol says."""
    *lines, end = body.split("\n\n")[:-1]
    assert end == "data: [DONE]", end
    return (json.loads(line.removeprefix("data: ")) for line in lines)


async def show(model: CachedCharModel) -> None:
    """Send requests to a server, and compare its answers with the model alone."""
    server = Server(model, queue=24)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    path = "/v1/completions"
    asked = {"prompt": "hello", "max_tokens": 4, "stream": True}
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        # before the engine begins nobody leaves the queue
        load = [{"prompt": "ab" * (1 + n % 5), "max_tokens": 2 + 5 * n % 37} for n in range(24)]
        asking = [group.create_task(ask(port, path, each)) for each in load]
        while len(server.waiting) < len(load):
            await asyncio.sleep(0.001)
        status, body = await ask(port, path, asked)
        print(
            f"a queue of {server.queue} is full: {status} {json.loads(body)['error']['code']}"
        )
        engine = group.create_task(server.run())
        answers = [json.loads((await each)[1]) for each in asking]
        for each, answer in zip(load, answers, strict=True):
            text, usage = answer["choices"][0]["text"], answer["usage"]
            assert usage["completion_tokens"] == each["max_tokens"] == len(text)
            prompt = [ALPHABET.index(c) for c in each["prompt"]]
            check_alone(model, prompt, [ALPHABET.index(c) for c in text])
        assert server.joined == len(load) - SLOTS, "whoever finds no slot joins a running batch"
        print(
            f"{len(load)} requests in {SLOTS} slots: each answered as if alone, without a cache"
        )

        status, body = await ask(
            port, path, asked | {"stream_options": {"include_usage": True}}
        )
        print(f"POST {path} {json.dumps(asked)}: {status}")
        pieces = list(events(body))
        for piece in pieces:
            print("  ", json.dumps(piece["choices"]), json.dumps(piece.get("usage", "")))
        text = "".join(piece["choices"][0]["text"] for piece in pieces if piece["choices"])
        _, body = await ask(port, path, asked | {"stream": False})
        assert json.loads(body)["choices"][0]["text"] == text
        talk = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        _, body = await ask(port, "/v1/chat/completions", talk)
        said = json.loads(body)["choices"][0]["message"]["content"]
        _, body = await ask(port, "/v1/chat/completions", talk | {"stream": True})
        deltas = [piece["choices"][0]["delta"] for piece in events(body)]
        assert "".join(delta.get("content", "") for delta in deltas) == said
        _, body = await ask(port, path, {"prompt": "user hello\nassistant ", "max_tokens": 4})
        assert json.loads(body)["choices"][0]["text"] == said, "a chat is one prompt"
        print("streamed and whole, as a completion and as a chat: the same text")

        for words, wrong in {
            "61 + 4 tokens": {"prompt": "a" * 61},
            "no tokens": {"max_tokens": 0},
            "another model": {"model": "large"},
            "temperature 1": {"temperature": 1},
            "two answers": {"n": 2},
            "a number": {"prompt": 7},
        }.items():
            status, body = await ask(port, path, asked | wrong)
            error = json.loads(body)["error"]
            print(f"{words:14} {status} {error['code']:24} {error['message']}")
        status, body = await ask(port, path, asked | {"prompt": "a" * 60})
        assert status == 200, "60 + 4 tokens fit"

        made = {}
        for server.watch in (False, True):
            before = server.made
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request_of(path, {"prompt": "a", "max_tokens": 63}))
            while server.made == before:
                await asyncio.sleep(0.001)
            writer.close()
            while len(server.free) < SLOTS:
                await asyncio.sleep(0.001)
            made[server.watch] = server.made - before
        assert made[False] == 63 > 2 * made[True], "it goes on for a client that has gone"
        print("its client gone: of 63 tokens 63 are made; fewer than half if it is watched")
        engine.cancel()
    listener.close()


async def listen(server: Server, port: int) -> None:
    """Serve until it is stopped. An error of the engine ends it, so that no client waits."""
    listener = await asyncio.start_server(server.handle, "127.0.0.1", port)
    port = listener.sockets[0].getsockname()[1]
    print(f"base_url http://127.0.0.1:{port}/v1", flush=True)
    async with listener, asyncio.TaskGroup() as group:
        group.create_task(server.run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, help="serve there; 0 takes a free one")
    parser.add_argument("--slots", type=int, default=SLOTS, choices=range(1, SLOTS + 1))
    parser.add_argument("--queue", type=int, default=QUEUE, help="requests that may wait")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="write the model there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = CachedCharModel(len(ALPHABET), heads=2)
    nn.init.zeros_(model.head.bias)
    if options.save:
        return save(model, options.save)
    if options.port is None:
        return asyncio.run(show(model))
    try:
        asyncio.run(listen(Server(model, options.slots, options.queue), options.port))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        sys.exit(f"cannot listen on port {options.port}: {error.strerror}")


if __name__ == "__main__":
    main()
