"""Tensor-parallel decoding splits heads, caches and MLP over ranks and gives equal tokens.

Every rank stores whole heads, so the cache is never sent. A layer needs two all-reduces of the
activations of one token. They have few bytes, so their cost is mostly latency. The width of a
head times the number of heads differs from the width of the model, as in many new models.

The last part cuts a cache along the sequence. Each rank attends to its own tokens, and the
ranks merge their results with the sums of their exponentials. A plain mean gives wrong numbers.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

HIDDEN, HEADS, WIDTH, LAYERS, MOST, VOCABULARY = 64, 4, 24, 3, 32, 37


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


def draw_weights(device: torch.device) -> dict:
    """Return equal weights on every rank: q, k, v [h, 3, a, d], out [a, d, h], up, down."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, rows: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / rows**0.5).to(device)

    return {
        "token": draw(VOCABULARY, HIDDEN, rows=1),
        "layers": [
            (draw(HIDDEN, 3, HEADS, WIDTH, rows=HIDDEN),
             draw(HEADS, WIDTH, HIDDEN, rows=HEADS * WIDTH),
             draw(HIDDEN, 4 * HIDDEN, rows=HIDDEN),
             draw(4 * HIDDEN, HIDDEN, rows=4 * HIDDEN))
            for _ in range(LAYERS)
        ],
        "head": draw(VOCABULARY, HIDDEN, rows=HIDDEN),
    }  # fmt: skip


# --8<-- [start:shard]
def shard(weights: dict, rank: int, n: int) -> dict:
    """Return this rank's heads, its columns of `up`, and the matching rows of `down`."""

    def part(size: int) -> slice:
        return slice(rank * size // n, (rank + 1) * size // n)

    layers = []
    for qkv, out, up, down in weights["layers"]:
        heads, wide = part(len(out)), part(len(down))
        layers.append((qkv[:, :, heads], out[heads], up[:, wide], down[wide]))
    return weights | {"layers": layers}


# --8<-- [end:shard]


# --8<-- [start:decode]
def decode(weights: dict, prompt: list[int], tokens: int, reduce) -> tuple:
    """Return greedy tokens, the last logits and the cache. `reduce` sums over the ranks."""
    heads, width = weights["layers"][0][1].shape[:2]
    token = weights["token"]
    cache = torch.zeros(LAYERS, 2, heads, MOST, width, device=token.device)
    ids = list(prompt)
    for at in range(len(prompt) + tokens - 1):
        x = token[ids[at]]  # [h]
        for i, (qkv, out, up, down) in enumerate(weights["layers"]):
            q, k, v = torch.einsum("h,hcad->cad", F.rms_norm(x, (HIDDEN,)), qkv)
            cache[i, 0, :, at], cache[i, 1, :, at] = k, v
            scores = torch.einsum("ad,asd->as", q, cache[i, 0, :, : at + 1]) / width**0.5
            mixed = torch.einsum("as,asd->ad", scores.softmax(-1), cache[i, 1, :, : at + 1])
            x = x + reduce(torch.einsum("ad,adh->h", mixed, out))
            x = x + reduce(F.gelu(F.rms_norm(x, (HIDDEN,)) @ up) @ down)
        logits = weights["head"] @ x
        if at + 1 == len(ids):
            ids.append(int(logits.argmax()))
    return ids, logits, cache


# --8<-- [end:decode]


# --8<-- [start:cut]
def attend_in_parts(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend to a cache that is cut along the sequence: q [a, d], this rank's rows [s, d]."""
    scores = q @ keys.T / keys.shape[1] ** 0.5  # [a, s], where s may be 0
    none = q.new_full((len(q), 1), -torch.inf)
    largest = torch.cat([scores, none], 1).amax(1, keepdim=True)  # also right without rows
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    weights = (scores - largest).exp()
    # numerator and denominator of the softmax, of this rank's rows alone: [a, d + 1]
    parts = torch.cat([weights @ values, weights.sum(1, keepdim=True)], 1)
    dist.all_reduce(parts)
    return parts[:, :-1] / parts[:, -1:]


# --8<-- [end:cut]


def at_once(weights: dict, ids: list[int]) -> torch.Tensor:
    """Return the logits [s, v] of one process for the whole text, without a cache."""
    x = weights["token"][ids]
    for qkv, out, up, down in weights["layers"]:
        q, k, v = torch.einsum("sh,hcad->casd", F.rms_norm(x, (HIDDEN,)), qkv)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        x = x + mixed.transpose(0, 1).flatten(1) @ out.flatten(0, 1)
        x = x + F.gelu(F.rms_norm(x, (HIDDEN,)) @ up) @ down
    return x @ weights["head"].T


@torch.no_grad()
def main() -> None:
    if HEADS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"{HEADS} heads are split evenly over 1, 2 or 4 ranks")
    device = init_distributed()
    torch.set_num_threads(1)
    rank, n = dist.get_rank(), dist.get_world_size()
    weights = draw_weights(device)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    whole_ids, whole_logits, whole_cache = decode(weights, prompt, 20, lambda x: x)
    assert len(set(whole_ids[8:])) > 5  # the tokens differ, so their keys and values differ too

    truth = at_once(weights, whole_ids[:-1])
    torch.testing.assert_close(whole_logits, truth[-1], rtol=1e-4, atol=1e-4)
    assert truth[7:].argmax(1).tolist() == whole_ids[8:]

    sums, sent = 0, 0

    def reduce(x: torch.Tensor) -> torch.Tensor:
        nonlocal sums, sent
        sums, sent = sums + 1, sent + x.nbytes
        dist.all_reduce(x)
        return x

    own = shard(weights, rank, n)
    ids, logits, cache = decode(own, prompt, 20, reduce)
    assert ids == whole_ids
    mine, whole = (
        sum(t.numel() for layer in w["layers"] for t in layer) for w in (own, weights)
    )
    assert mine * n == whole  # of each matrix, a rank reads only its part
    torch.testing.assert_close(logits, whole_logits, rtol=1e-4, atol=1e-4)
    mine = slice(rank * HEADS // n, (rank + 1) * HEADS // n)
    torch.testing.assert_close(cache, whole_cache[:, :, mine], rtol=1e-4, atol=1e-4)
    steps = len(prompt) + 20 - 1
    assert sums == 2 * LAYERS * steps and cache.nbytes * n == whole_cache.nbytes
    assert sent == sums * HIDDEN * 4  # the activations of one token in each sum

    # one head of keys and values, which no rank can split by heads, and two lengths
    generator = torch.Generator().manual_seed(1)
    q = (10 * torch.randn(HEADS, WIDTH, generator=generator)).to(device)
    # with two tokens, some of four ranks have none; exp() of a score in the hundreds overflows,
    # and it is zero for all tokens of a head if their scores are large and negative
    for length, scale in ((steps, 1), (2, 1), (steps, 50), (2, -50)):
        keys, values = whole_cache[0, :, 0, :length]
        together = F.scaled_dot_product_attention(scale * q[None], keys[None], values[None])[0]
        keys, values = keys[rank::n], values[rank::n]  # a rank has only these
        mine = attend_in_parts(scale * q, keys, values)
        count = torch.tensor(len(keys), device=device)
        dist.all_reduce(count)
        assert count == length  # no row is on two ranks
        factor = abs(scale)
        torch.testing.assert_close(mine, together, rtol=1e-4 * factor, atol=1e-5 * factor)
    keys, values = whole_cache[0, :, 0, :steps]
    rows = torch.arange(rank, steps, n, device=device)
    mean = F.scaled_dot_product_attention(q[None], keys[rows][None], values[rows][None])[0] / n
    dist.all_reduce(mean)
    together = F.scaled_dot_product_attention(q[None], keys[None], values[None])[0]
    error = float((mean - together).norm() / together.norm())
    assert error > 0.05 if n > 1 else error < 1e-5

    everyone: list = [None] * n
    dist.all_gather_object(everyone, ids)
    assert all(other == ids for other in everyone)
    if rank == 0:
        print(f"{n} rank{'s' * (n > 1)}: 20 tokens, logits and caches equal to one process")
        print(f"  all-reduces per token: {sums // steps} = 2 × {LAYERS} layers, "
              f"{sent // sums} bytes each")  # fmt: skip
        print(f"  cache per rank: {cache.nbytes} of {whole_cache.nbytes} bytes")
        print(f"cache cut along the sequence: {len(rows)} of {steps} tokens on rank 0, equal; "
              f"the mean of the ranks is off by {error:.0%}")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
