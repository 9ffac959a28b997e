"""A 70-billion-parameter Llama over 1,024 ranks, laid out and stepped through on a laptop.

Two fakes make it possible. The fake process group has any number of ranks, and its collectives
return at once; FakeTensorMode runs every operation on shapes alone. What fully_shard does is
real: which rows each rank gets, which collectives it calls, with how many bytes. Rank 0 is
played here, forward, backward and AdamW, and every byte is counted beside the formulas:

    parameters, gradients, two moments: 4 · 4Ψ/N bytes, in fp32, plus what padding adds
    each parameter is gathered in bf16 for forward, again for backward, and its gradient reduced
    in fp32: a ring sends (N-1)/N · (2Ψ + 2Ψ + 4Ψ) bytes from each rank

One process, no GPU, no network. What it cannot tell is time.
"""

import os
import sys
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

H, LAYERS, HEADS, KV_HEADS, HIDDEN, V = 8192, 80, 64, 8, 28672, 128256  # Llama 3 70B
B, S = 1, 8192  # of each rank
GB = 1e9


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kv = H // HEADS * KV_HEADS
        self.norm1, self.norm2 = nn.RMSNorm(H), nn.RMSNorm(H)
        self.q, self.o = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
        self.k, self.v = nn.Linear(H, kv, bias=False), nn.Linear(H, kv, bias=False)
        self.gate, self.up = nn.Linear(H, HIDDEN, bias=False), nn.Linear(H, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        # [b, s, h] -> [b, a, s, h/a]
        q, k, v = (
            f(y).unflatten(2, (-1, H // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(H), nn.Linear(H, V, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CountBytes(TorchDispatchMode):
    """Count the collectives that pass by, and what each rank of a ring sends for them."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self.sent: dict[tuple[str, str], float] = defaultdict(float)
        self.phase = ""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op._schema.name
        if name.startswith("c10d::") and ("allgather" in name or "reduce_scatter" in name):
            # both take (output, input, …); the larger of the two is the whole tensor
            whole = max(t.nbytes for t in args[:2])
            kind = "all-gather" if "allgather" in name else "reduce-scatter"
            self.calls[self.phase, kind] += 1
            self.sent[self.phase, kind] += (self.ranks - 1) / self.ranks * whole
        return op(*args, **(kwargs or {}))


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) == 2 and sys.argv[1].isdigit() else 0
    if not ranks or "RANK" in os.environ:
        sys.exit("start this with: python seventy_billion.py 1024")
    # --8<-- [start:layout]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    mesh = init_device_mesh("cpu", (ranks,))
    with torch.device("meta"):
        model = Llama()
    psi = sum(p.numel() for p in model.parameters())
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)

    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")  # the shards of rank 0, as fakes
        optimizer = torch.optim.AdamW(model.parameters())

        tokens = torch.zeros(B, S, dtype=torch.long)
        with CountBytes(ranks) as counted:
            counted.phase = "forward"
            loss = F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())
            counted.phase = "backward"
            loss.backward()
        optimizer.step()
        # --8<-- [end:layout]

        shards = [p.to_local() for p in model.parameters()]
        kept = {"parameters": sum(t.nbytes for t in shards)}
        kept["gradients"] = sum(p.grad.to_local().nbytes for p in model.parameters())
        for moment in ("exp_avg", "exp_avg_sq"):
            states = (optimizer.state[p][moment] for p in model.parameters())
            kept[moment] = sum(t.to_local().nbytes for t in states)

    print(f"Ψ = {psi:,} parameters, N = {ranks:,} ranks, {B * S:,} tokens on each")
    print(f"on one rank without sharding: {16 * psi / GB:,.1f} GB")
    print("kept by rank 0, fp32     counted  4Ψ/N")
    for name, size in kept.items():
        print(f"  {name:20} {size / GB:8.4f}  {4 * psi / ranks / GB:.4f} GB")
    print("sent by each rank      calls   counted  formula")
    share = (ranks - 1) / ranks
    root = psi - sum(p.numel() for b in model.blocks for p in b.parameters())
    formulas = {
        ("forward", "all-gather"): 2 * psi,
        ("backward", "all-gather"): 2 * (psi - root),  # the root keeps its parameters
        ("backward", "reduce-scatter"): 4 * psi,
    }
    for key, size in formulas.items():
        row = f"{counted.sent[key] / GB:8.2f}  {share * size / GB:7.2f} GB"
        print(f"  {key[0]:8} {key[1]:14} {counted.calls[key]:3} {row}")
        assert abs(counted.sent[key] - share * size) < 1e-3 * size
    assert counted.calls.keys() == formulas.keys()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
