"""With data-parallel attention and expert parallelism, every cache is on one rank only.

A rank computes attention for its own requests and stores only their caches. In each layer an
all-to-all sends the tokens to the ranks of their experts, and a second one returns the results.
Six requests are distributed unevenly, and the last rank gets none. That rank runs all layers
with zero rows, because the all-to-alls of the other ranks need it.

The tokens must equal those of one process that computes whole texts without a cache. The bytes
that each rank sends must follow from the routing of that process. At the end, tensor-parallel
attention serves the same requests: each rank has some heads and the latent cache of all
requests.

    --skip-idle    a rank without requests skips the layers
"""

import argparse
import math
import os
import re
import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn import functional as F

HIDDEN, HEADS, LATENT, LAYERS, MOST, VOCABULARY = 48, 12, 8, 2, 16, 37
EXPERTS, K = 12, 2
PROMPTS = [[3, 1, 4], [1, 5, 9, 2], [6, 5], [3, 5, 8], [9, 7, 9], [3, 2]]
ANSWERS = [7, 4, 9, 3, 6, 5]  # new tokens of each request
OWNERS = [0, 0, 0, 1, 1, 2]  # the last of several ranks owns none


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def make_weights(device: torch.device) -> dict:
    """Return equal weights on every rank: query, down, out, router and experts of a layer."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, rows: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / rows**0.5).to(device)

    return {
        "token": draw(VOCABULARY, HIDDEN, rows=1),
        "place": draw(MOST, HIDDEN, rows=1),
        "layers": [
            {
                "query": draw(HIDDEN, HEADS, LATENT, rows=HIDDEN),  # contains up_key
                "down": draw(HIDDEN, LATENT, rows=HIDDEN),  # its result is cached
                "out": draw(HEADS, LATENT, HIDDEN, rows=HEADS * LATENT),  # contains up_value
                "router": draw(HIDDEN, EXPERTS, rows=HIDDEN),
                "wide": draw(EXPERTS, HIDDEN, 2 * HIDDEN, rows=HIDDEN),
                "narrow": draw(EXPERTS, 2 * HIDDEN, HIDDEN, rows=2 * HIDDEN),
            }
            for _ in range(LAYERS)
        ],
        "head": draw(VOCABULARY, HIDDEN, rows=HIDDEN),
    }


def norm(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (HIDDEN,))


def at_once(weights: dict, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reference: logits [s, v] of a text, and its experts [LAYERS, s, K]."""
    x, choices = weights["token"][ids] + weights["place"][: len(ids)], []
    for w in weights["layers"]:
        latent = norm(x) @ w["down"]
        scores = torch.einsum(
            "sal,tl->ast", torch.einsum("sh,hal->sal", norm(x), w["query"]), latent
        )
        hidden = torch.ones(len(ids), len(ids), device=x.device).triu(1).bool()
        mixed = (scores / LATENT**0.5).masked_fill(hidden, -math.inf).softmax(-1) @ latent
        x = x + torch.einsum("asl,alh->sh", mixed, w["out"])
        logits = norm(x) @ w["router"]
        chosen = logits.topk(K, dim=-1).indices
        others = torch.ones_like(logits).scatter(1, chosen, 0.0).bool()
        gates = logits.masked_fill(others, -math.inf).softmax(-1)  # [s, EXPERTS], most are zero
        every = torch.einsum("sh,ehw->esw", norm(x), w["wide"])
        x = x + torch.einsum("se,esh->sh", gates, F.gelu(every) @ w["narrow"])
        choices.append(chosen)
    return x @ weights["head"].T, torch.stack(choices)


# --8<-- [start:attend]
def attend(w: dict, heads: slice, x: torch.Tensor, cache: torch.Tensor, at: list[int]):
    """Attend with one new token of each request: x [b, h], cache [b, MOST, LATENT]."""
    row = torch.arange(len(at))
    cache[row, at] = norm(x) @ w["down"]
    query = torch.einsum("bh,hal->bal", norm(x), w["query"][:, heads])
    scores = torch.einsum("bal,bsl->bas", query, cache) / LATENT**0.5
    later = torch.arange(MOST, device=x.device) > torch.tensor(at, device=x.device)[:, None]
    mixed = scores.masked_fill(later[:, None], -math.inf).softmax(-1) @ cache
    return torch.einsum("bal,alh->bh", mixed, w["out"][heads])


# --8<-- [end:attend]


def experts(w: dict, mine: range, x: torch.Tensor, expert_of: torch.Tensor) -> torch.Tensor:
    """Multiply each row by its expert if the expert is on this rank; other rows become 0."""
    out = torch.zeros_like(x)
    for i in mine:
        rows = (expert_of == i).nonzero().flatten()
        out[rows] = F.gelu(x[rows] @ w["wide"][i]) @ w["narrow"][i]
    return out


# --8<-- [start:travel]
class Travel:
    """Send each token to its K experts and return the results; b may be 0 on any rank.

    `mine` are the experts of this rank. Every rank has the same number of experts, in order.
    """

    def __init__(self, mine: range) -> None:
        self.mine, self.sent = mine, 0

    def exchange(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        if rows.is_floating_point():  # count tokens, not the numbers of their experts
            elsewhere = sum(send) - send[dist.get_rank()]
            self.sent += elsewhere * rows.shape[1] * rows.element_size()
        return out

    def __call__(self, w: dict, x: torch.Tensor) -> torch.Tensor:  # [b, h] -> [b, h]
        n = dist.get_world_size()
        gates, chosen = (x @ w["router"]).topk(K, dim=-1)  # [b, K]
        expert_of = chosen.flatten()
        order = expert_of.argsort(stable=True)
        counts = (expert_of // len(self.mine)).bincount(minlength=n)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts)
        send, receive = counts.tolist(), incoming.tolist()
        rows = self.exchange(x[order // K], send, receive)
        names = self.exchange(expert_of[order], send, receive)
        back = self.exchange(experts(w, self.mine, rows, names), receive, send)
        home = torch.empty_like(back)
        home[order] = back
        return (gates.softmax(-1)[..., None] * home.unflatten(0, (-1, K))).sum(1)


# --8<-- [end:travel]


class Partial:
    """For comparison: every rank has all tokens; an all-reduce adds the experts' results."""

    def __init__(self, mine: range) -> None:
        self.mine, self.summed = mine, 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        self.summed += x.nbytes
        return x

    def __call__(self, w: dict, x: torch.Tensor) -> torch.Tensor:
        gates, chosen = (x @ w["router"]).topk(K, dim=-1)
        each = experts(w, self.mine, x.repeat_interleave(K, 0), chosen.flatten())
        parts = (gates.softmax(-1)[..., None] * each.unflatten(0, (-1, K))).sum(1)
        return self.all_reduce(parts)


# --8<-- [start:serve]
def serve(weights: dict, requests: list[int], mix: Callable, heads: slice, share: Callable,
          skip_idle: bool = False) -> tuple[dict, dict, int]:  # fmt: skip
    """Return greedy answers, the logits of their last tokens, and the bytes of cache."""
    device = weights["token"].device
    ids = {r: list(PROMPTS[r]) for r in requests}
    slot = {r: i for i, r in enumerate(requests)}
    caches = torch.zeros(LAYERS, len(requests), MOST, LATENT, device=device)
    at, last = dict.fromkeys(requests, 0), {}
    while True:
        live = [r for r in requests if at[r] < len(PROMPTS[r]) + ANSWERS[r] - 1]
        anyone = torch.tensor(len(live), device=device)
        dist.all_reduce(anyone)  # a rank may stop only when no rank has a request
        if not anyone:
            return ids, last, caches.nbytes
        if skip_idle and not live:
            continue
        here, places = [slot[r] for r in live], [at[r] for r in live]
        tokens = torch.tensor([ids[r][at[r]] for r in live], dtype=torch.long, device=device)
        x = weights["token"][tokens] + weights["place"][places]  # [b, h], b may be 0
        for layer, w in zip(caches, weights["layers"], strict=True):
            cache = layer[here]
            x = x + share(attend(w, heads, x, cache, places))
            layer[here] = cache
            x = x + mix(w, norm(x))
        for r, logits in zip(live, x @ weights["head"].T, strict=True):
            at[r] += 1
            last[r] = logits
            if at[r] == len(ids[r]):
                ids[r].append(int(logits.argmax()))


# --8<-- [end:serve]


@torch.no_grad()
def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-idle", action="store_true")
    skip = parser.parse_args().skip_idle
    if EXPERTS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {EXPERTS} experts and heads")
    if skip and "RANK" in os.environ:  # gloo has this message; rank 0 times out first
        patience = 600 if int(os.environ["RANK"]) else 10
        dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
    device = torch.device("cpu") if dist.is_initialized() else init_distributed()
    torch.set_num_threads(1)
    rank, n = dist.get_rank(), dist.get_world_size()
    weights = make_weights(device)

    def owned(by: int) -> list[int]:
        return [r for r, owner in enumerate(OWNERS) if min(owner, max(n - 2, 0)) == by]

    mine = range(rank * EXPERTS // n, (rank + 1) * EXPERTS // n)
    travel = Travel(mine)
    try:
        ids, last, cache = serve(weights, owned(rank), travel, slice(None), lambda x: x, skip)
    except RuntimeError as error:
        if rank == 0:
            told = re.search(r"Timed out waiting \d+ms", str(error))
            print(f"rank 0 in an all-to-all: {told[0] if told else error}", flush=True)
        os._exit(1)  # ending the broken group would wait, too

    # the reference, one request after another, and the ranks to which its routing sends rows
    truth, expected, leaves = {}, {}, torch.zeros(n, dtype=torch.long)  # rows that leave a rank
    for r, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for _ in range(ANSWERS[r]):
            text.append(int(at_once(weights, text)[0][-1].argmax()))
        truth[r], home = text, min(OWNERS[r], max(n - 2, 0))
        logits, choices = at_once(weights, text[:-1])
        expected[r], goes = logits[-1], choices // (EXPERTS // n)
        for there in range(n):
            rows = 0 if there == home else int((goes == there).sum())
            leaves[home] += rows
            leaves[there] += rows
    row = HIDDEN * 4
    assert all(ids[r] == truth[r] for r in owned(rank))
    for r in owned(rank):
        torch.testing.assert_close(last[r], expected[r], rtol=1e-3, atol=1e-3)
    assert travel.sent == int(leaves[rank]) * row, (travel.sent, int(leaves[rank]) * row)

    partial = Partial(mine)
    heads = slice(rank * HEADS // n, (rank + 1) * HEADS // n)
    everything, last, duplicated = serve(
        weights, list(range(len(PROMPTS))), partial, heads, partial.all_reduce
    )
    assert everything == truth
    assert len({token for ids in truth.values() for token in ids}) > 15  # different tokens
    torch.testing.assert_close(last, expected, rtol=1e-3, atol=1e-3)
    steps = sum(len(ids) - 1 for ids in truth.values())  # of all requests
    assert partial.summed == 2 * LAYERS * steps * row

    everyone: list = [None] * n
    dist.all_gather_object(everyone, (len(owned(rank)), cache, travel.sent, duplicated))
    if rank == 0:
        cached, total, twice = (sum(column) for column in list(zip(*everyone, strict=True))[1:])
        print(f"{n} rank{'s' * (n > 1)}, {EXPERTS // n} of {EXPERTS} experts on each: "
              f"{len(PROMPTS)} requests, every token equals that of one process")  # fmt: skip
        for r, (requests, stored, sent, _) in enumerate(everyone):
            print(f"  rank {r}: {requests} requests, {stored:5} bytes of cache, {sent:6} sent")
        even = 2 * (n - 1) / n * K * LAYERS * steps * row
        print(f"  all ranks: {cached:17} bytes of cache, {total:6} sent, "
              f"{even:.0f} with even routing")  # fmt: skip
        rings = 2 * (n - 1) * partial.summed
        print(f"  tensor-parallel attention: {twice} bytes of cache, {rings:6} sent by rings")
        assert twice == n * cached
        assert n == 1 or abs(total / even - 1) < 0.15
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
