"""LoRA and QLoRA give the same losses with DDP, FSDP2 and one process. Their bytes differ.

LoRA trains two narrow matrices A [r, in] and B [out, r] next to each frozen weight. QLoRA
also stores the frozen weight as NF4 codes. One byte has two codes, and 64 weights share one
scale. The weight is decoded for forward, and decoded again for backward. DDP sends only the
gradients of A and B. fully_shard also gathers the shards of the frozen weights. The table
shows the bytes that a rank keeps and sends.
"""

import copy
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, STEPS, H, LAYERS, R, ALPHA = 24, 3, 128, 4, 4, 8  # 1 to 4 ranks divide BATCH and H
NF4 = torch.tensor([
    -1.0, -0.6961928, -0.5250730, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
])  # fmt: skip


# --8<-- [start:lora]
class LoRALinear(nn.Module):
    """x Wᵀ + bias + (α/r) x Aᵀ Bᵀ. Only A and B are trained, and B is zero at first.

    W and the bias come from `linear` and are frozen. A [r, in] and B [out, r] have W's dtype.
    """

    def __init__(self, linear: nn.Linear, r: int = R, alpha: float = ALPHA) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.requires_grad_(False)
        rows, columns = linear.weight.shape
        self.a = nn.Parameter(linear.weight.new_empty(r, columns).normal_(std=columns**-0.5))
        self.b = nn.Parameter(linear.weight.new_zeros(rows, r))
        self.scale = alpha / r

    def frozen(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.scale * (x @ self.a.T) @ self.b.T


# --8<-- [end:lora]


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[out, in] -> codes [out, in/2] as bytes, and one fp32 scale per block: [out, in/64].

    Raises ValueError unless 64 divides `in`, because a block must not continue in the next row.
    """
    if weight.shape[1] % 64:
        raise ValueError(f"64 must divide the row length, which is {weight.shape[1]}")
    blocks = weight.float().unflatten(1, (-1, 64))
    scales = blocks.abs().amax(-1)
    levels = NF4.to(weight.device)
    codes = torch.bucketize(blocks / scales[..., None], (levels[1:] + levels[:-1]) / 2)
    low, high = codes.flatten(1).view(len(weight), -1, 2).to(torch.uint8).unbind(-1)
    return low | high << 4, scales


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [out, in/2] and scales [out, in/64] -> the weight [out, in] in fp32."""
    both = torch.stack([codes & 15, codes >> 4], dim=-1)  # [out, in/2, 2]
    levels = NF4.to(codes.device)[both.int()].view(*scales.shape, 64)
    return (levels * scales[..., None]).flatten(1)


class DecodedProduct(torch.autograd.Function):
    """x Wᵀ + bias. Forward and backward each decode W, so the decoded W is not kept."""

    @staticmethod
    def forward(ctx, x, codes, scales, bias):
        ctx.save_for_backward(codes, scales)
        return F.linear(x, decode(codes, scales).to(x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient):
        bias = gradient.sum_to_size(gradient.shape[-1:]) if ctx.needs_input_grad[3] else None
        return gradient @ decode(*ctx.saved_tensors).to(gradient.dtype), None, None, bias


class QLoRALinear(LoRALinear):
    """A LoRALinear whose weight is stored as codes and scales.

    Both are parameters without a gradient, because fully_shard does not shard buffers.
    """

    def __init__(self, linear: nn.Linear, r: int = R, alpha: float = ALPHA) -> None:
        super().__init__(linear, r, alpha)
        codes, scales = encode(self.weight)
        del self.weight
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)

    def frozen(self, x: torch.Tensor) -> torch.Tensor:
        return DecodedProduct.apply(x, self.codes, self.scales, self.bias)


def make(kind: type[nn.Module] | None) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(H, H, bias=False) for _ in range(LAYERS)]
    torch.manual_seed(1)
    blocks = [nn.Sequential(kind(x) if kind else x, nn.GELU()) for x in linears]
    return nn.Sequential(*blocks)


class Sent(TorchDispatchMode):
    """Add up the bytes of the whole tensors in all collectives, separately for each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
        if func.namespace == "c10d" and name in ("allreduce", "allgather", "reduce_scatter"):
            whole = args[1] if name == "reduce_scatter" else args[0]
            self.bytes[name] += (whole[0] if name == "allreduce" else whole).nbytes
        return func(*args, **(kwargs or {}))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --8<-- [start:train]
def train(model: nn.Module, batches: list[torch.Tensor]) -> tuple[list, torch.optim.Optimizer]:
    """Train on this rank's rows. Return the losses, and the optimizer of A and B."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=0.01), []
    for x in batches:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.sin())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, optimizer


def shard(model: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# --8<-- [end:train]
def bytes_on_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the bytes of parameters, gradients and moments on this rank."""
    parameters = list(model.parameters())
    moments = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    tensors = (parameters, [p.grad for p in parameters if p.grad is not None], moments)
    return [sum(local(x).nbytes for x in group) for group in tensors]


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


def main() -> None:
    if R % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"for even shards the number of ranks must divide {R}, the rows of A")
    if torch.__version__ < "2.12":
        sys.exit("fully_shard takes parameters of bytes since torch 2.12, and this is older")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(2)
    batches = [torch.randn(BATCH, H).to(device) for _ in range(STEPS)]
    ours = [x[rank::n] for x in batches]
    psi, adapters = LAYERS * H * H, LAYERS * 2 * R * H
    base = {"all weights": 4 * psi, "LoRA": 4 * psi, "QLoRA": psi / 2 + 4 * psi / 64}
    lines = [f"N = {n}, Ψ = {psi:,} frozen, ψ = {adapters:,} in A and B; KiB on a rank"]
    lines += ["                     parameters  gradients  moments  sent in a step"]
    for name, kind in (("all weights", None), ("LoRA", LoRALinear), ("QLoRA", QLoRALinear)):
        alone = make(kind).to(device)
        if kind is LoRALinear:  # B is zero, so the first result is that of the frozen model
            torch.testing.assert_close(alone(batches[0]), make(None).to(device)(batches[0]))
        models = {"DDP": DistributedDataParallel(copy.deepcopy(alone)),
                  "FSDP2": shard(copy.deepcopy(alone), mesh)}  # fmt: skip
        expected, _ = train(alone, batches)
        trained = 4 * (adapters if kind else psi)
        frozen = base[name] if kind else 0
        for layout, model in models.items():
            if layout == "DDP":  # its own all-reduce, called from Python, where it is counted
                model.register_comm_hook(None, allreduce_hook)
            with Sent() as count:
                losses, optimizer = train(model, ours)
            for mine, truth in zip(losses, expected, strict=True):
                dist.all_reduce(mine)
                torch.testing.assert_close(mine / n, truth)
            for mine, truth in zip(model.parameters(), alone.parameters(), strict=True):
                mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
                torch.testing.assert_close(mine.detach(), truth.detach())
                assert truth.requires_grad or truth.grad is None
            counted = bytes_on_rank(model, optimizer)
            cut = n if layout == "FSDP2" else 1
            assert counted == [(frozen + trained) / cut, trained / cut, 2 * trained / cut]
            sent = 2 * count.bytes["allreduce"]
            sent += count.bytes["allgather"] + count.bytes["reduce_scatter"]
            theory = 2 * trained + (trained + 2 * frozen if layout == "FSDP2" else 0)
            assert sent == STEPS * theory
            row = [x / 1024 for x in (*counted, sent / STEPS * (n - 1) / n)]
            lines.append(
                f"{name:12} {layout:7}" + "{:11.1f}{:11.1f}{:9.1f}{:16.1f}".format(*row)
            )

    # QLoRA must equal LoRA with rounded frozen weights, and B A can be added to the weight
    rounded = make(LoRALinear).to(device)
    for block in rounded:
        exact = block[0].weight.clone()
        block[0].weight.copy_(decode(*encode(exact)))
        off = ((block[0].weight - exact).norm() / exact.norm()).item()
    torch.testing.assert_close(torch.stack(train(rounded, batches)[0]), torch.stack(expected))
    with torch.no_grad():
        first = rounded[0][0]
        merged = first.weight + ALPHA / R * first.b @ first.a
        torch.testing.assert_close(batches[0] @ merged.T, first(batches[0]))
        biased = QLoRALinear(nn.Linear(H, H).to(device))
        biased.b.normal_()
        merged = decode(biased.codes, biased.scales) + ALPHA / R * biased.b @ biased.a
        truth = batches[0] @ merged.T + biased.bias
        torch.testing.assert_close(biased(batches[0]), truth, rtol=1e-4, atol=1e-4)
    if rank == 0:
        print("\n".join(lines))
        print("losses and weights of 3 steps: equal to those of one process")
        print(f"QLoRA equals LoRA with rounded frozen weights; error of the weights: {off:.2%}")
        print("B A added to the weight: one product gives the output of the whole layer")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
