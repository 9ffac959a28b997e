"""Shard a Llama of 70 billion parameters over 1,024 ranks and take one step, on a laptop.

Two fakes make this possible. The fake process group has any number of ranks, and its
collectives return immediately without sending anything. FakeTensorMode runs every operation
on shapes without data. The work of fully_shard is real: it decides which rows each rank gets,
which collectives it calls, and with how many bytes. This process is rank 0. It runs forward,
backward and AdamW, and compares the bytes with formulas:

    Parameters, gradients and two moments in fp32 take 4 · 4Ψ/N bytes, plus padding.
    The root's parameters stay gathered in bf16 from forward to backward.
    Each parameter is gathered in bf16 for forward and again for backward, and its gradient is
    reduced in fp32. A ring sends (N-1)/N · (2Ψ + 2Ψ + 4Ψ) bytes from each rank, plus padding.

One process, no GPU, no network. The program cannot predict the time of a step.
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
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

H, LAYERS, HEADS, KV_HEADS, HIDDEN, V = 8192, 80, 64, 8, 28672, 128256  # Llama 3 70B
B, S = 1, 8192  # sequences and tokens per sequence on each rank
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
    """Count the collectives, and the bytes that each rank of a ring would send for them."""

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
            gathered = sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))
            counted.phase = "backward"
            loss.backward()
        optimizer.step()
        # --8<-- [end:layout]

        shards = [p.to_local() for p in model.parameters()]
        stored = {"parameters": sum(t.nbytes for t in shards)}
        stored["gradients"] = sum(p.grad.to_local().nbytes for p in model.parameters())
        for moment in ("exp_avg", "exp_avg_sq"):
            states = (optimizer.state[p][moment] for p in model.parameters())
            stored[moment] = sum(t.to_local().nbytes for t in states)

    print(f"Ψ = {psi:,} parameters, N = {ranks:,} ranks, {B * S:,} tokens on each")
    print(f"on one rank without sharding: {16 * psi / GB:,.1f} GB")
    print("kept by rank 0, fp32     counted  4Ψ/N")
    # fully_shard pads the rows of each tensor to a multiple of the number of ranks
    padded = {p: -(-len(p) // ranks) * ranks * p.shape[1:].numel() for p in model.parameters()}
    for name, size in stored.items():
        print(f"  {name:20} {size / GB:8.4f}  {4 * psi / ranks / GB:.4f} GB")
        assert size == 4 * sum(padded.values()) / ranks  # rank 0 has no padding within its rows
    # between forward and backward, only the root's parameters are whole, in bf16
    root = [model.embedding.weight, model.norm.weight, model.head.weight]
    assert gathered == 2 * sum(p.numel() for p in root)
    assert all(isinstance(p, DTensor) for p in model.parameters())  # after backward
    print(f"from forward to backward, the whole root in bf16: {gathered / GB:.4f} GB")
    print("sent by each rank      calls   counted  formula")
    share = (ranks - 1) / ranks
    blocks = [p for block in model.blocks for p in block.parameters()]
    formulas = {  # bytes per element, and the tensors; the root keeps its parameters
        ("forward", "all-gather"): (2, list(padded)),
        ("backward", "all-gather"): (2, blocks),
        ("backward", "reduce-scatter"): (4, list(padded)),
    }
    for key, (element, tensors) in formulas.items():
        size = element * sum(p.numel() for p in tensors)
        row = f"{counted.sent[key] / GB:8.2f}  {share * size / GB:7.2f} GB"
        print(f"  {key[0]:8} {key[1]:14} {counted.calls[key]:3} {row}")
        exact = share * element * sum(padded[p] for p in tensors)
        assert abs(counted.sent[key] - exact) < 1e-9 * exact
    assert counted.calls.keys() == formulas.keys()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
