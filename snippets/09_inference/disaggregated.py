"""Prefill runs in one process and decode in another, and the cache is sent between them.

Rank 0 runs the prompts and sends keys and values. Rank 1 receives them and writes the answers.
The bytes sent equal the formula: 2 · layers · h · 4 for each token of the prompt.
"""

import os
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

CONTEXT, ANSWER = 64, 12


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


def without_cache(model: CachedCharModel, ids: list[int]) -> torch.Tensor:
    """Logits [s, v] of the whole sequence at once."""

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    positions = torch.arange(len(ids))[None]
    return model(torch.tensor([ids]), positions, [causal] * len(model.blocks))[0]


# --8<-- [start:both]
def prefill(model: CachedCharModel, prompt: list[int]) -> tuple[torch.Tensor, int]:
    """Keys and values [layers, 2, a, s, h/a] of the prompt, and the first token after it."""
    kept = []

    def keep(q, k, v):
        kept.append(torch.cat([k, v]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    positions = torch.arange(len(prompt))[None]
    logits = model(torch.tensor([prompt]), positions, [keep] * len(model.blocks))
    return torch.stack(kept), int(logits[0, -1].argmax())


def decode(model: CachedCharModel, cache: torch.Tensor, first: int) -> list[int]:
    """ANSWER tokens. Prefill computed the first; the cache grows by a token in each step."""
    answer = [first]
    while len(answer) < ANSWER:
        position = torch.tensor([[cache.shape[3]]])
        grown = []

        def attend(layer: int, cache=cache, grown=grown):
            def append_and_mix(q, k, v):
                grown.append(torch.cat([cache[layer], torch.cat([k, v])], dim=2))
                return F.scaled_dot_product_attention(q, *grown[-1][:, None])

            return append_and_mix

        attends = [attend(layer) for layer in range(len(model.blocks))]
        logits = model(torch.tensor([[answer[-1]]]), position, attends)
        cache = torch.stack(grown)
        answer.append(int(logits[0, -1].argmax()))
    return answer


def hand_over(model: CachedCharModel, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """Rank 0 prefills and sends, rank 1 receives and decodes; the answers, and bytes sent."""
    answers, sent = [], 0
    for prompt in prompts:
        if dist.get_rank() == 0:
            cache, first = prefill(model, prompt)
            dist.send(torch.tensor([*cache.shape, first]), dst=1)
            dist.send(cache, dst=1)
            sent += cache.nbytes
        else:
            header = torch.empty(6, dtype=torch.long)
            dist.recv(header, src=0)
            *shape, first = header.tolist()
            cache = torch.empty(shape, dtype=model.token.weight.dtype)
            dist.recv(cache, src=0)
            answers.append(decode(model, cache, first))
    return answers, sent


# --8<-- [end:both]


@torch.no_grad()
def main() -> None:
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start this program with: torchrun --nproc-per-node=2 disaggregated.py")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    torch.manual_seed(0)  # both processes have the whole model
    model, dice = CachedCharModel(), random.Random(0)
    for block in model.blocks:
        block.out.weight *= 20  # make the untrained model depend on its context
    prompts = [[dice.randrange(42) for _ in range(n)] for n in (40, 7, 23)]
    known = prompts if rank == 0 else [[]] * len(prompts)  # rank 1 gets no token
    answers, sent = hand_over(model, known)

    counted = torch.tensor([sent])
    dist.all_reduce(counted)
    if rank == 1:
        for prompt, answer in zip(prompts, answers, strict=True):
            logits = without_cache(model, prompt + answer[:-1])[len(prompt) - 1 :]
            chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-4)
        tokens = sum(map(len, prompts))
        formula = 2 * len(model.blocks) * 64 * 4 * tokens
        print(f"{len(prompts)} prompts, {tokens} tokens: {counted.item():,} bytes sent, "
              f"2 · L · h · 4 · tokens = {formula:,}")  # fmt: skip
        print(f"rank 1 wrote {ANSWER} tokens for each: the same as one process without a cache")
        assert counted.item() == formula
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
