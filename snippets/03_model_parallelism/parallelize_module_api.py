"""Tensor and sequence parallelism by PyTorch's API: a plan for parallelize_module.

A transformer for one device, with an embedding, two blocks and an output head, is cut by
parallelize_module: first with tensor parallelism alone, in two ways, then with sequence
parallelism and loss_parallel. Loss and gradients equal those of one process, and CommDebugMode
counts the collectives.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

B, S, H, HEADS, LAYERS, V = 2, 24, 48, 12, 2, 96  # 1, 2, 3 and 4 ranks divide what is cut


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(H, H) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # -1 because a rank has a/t heads, [b, s, h/t] -> [b, a/t, s, h/a]
        q, k, v = (
            f(x).unflatten(2, (-1, H // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(H), Attention()
        self.norm2, self.mlp = nn.LayerNorm(H), MLP()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(H), nn.Linear(H, V, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def tensor_parallel(model: Transformer, mesh: DeviceMesh, shared: bool = True) -> None:
    """f and g: activations between the matrices are whole, as are embedding and head."""
    whole = Replicate()
    for block in model.blocks:
        # one DTensor for q, k and v, so that its gradients are added before they are sent
        entry = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        plan = ({"attention": entry} if shared else {}) | {
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def three_inputs(model: Transformer, mesh: DeviceMesh) -> None:
    """The same plan without PrepareModuleInput: q, k and v have three separate f."""
    tensor_parallel(model, mesh, shared=False)


def sequence_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """g and ḡ: activations between the matrices are Shard(1), [b, s/t, h] on each rank."""
    gather = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
    for block in model.blocks:
        plan = {
            "norm1": SequenceParallel(),
            "attention": gather,  # once, for q, k and v together
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),  # a reduce-scatter
            "norm2": SequenceParallel(),
            "mlp": gather,
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),  # the logits stay a DTensor, cut by vocabulary, for loss_parallel
    }
    parallelize_module(model, mesh, ends)


def sum_partial_gradients(model: Transformer) -> None:
    """Sum the Partial gradients of the norms under SequenceParallel, each of them once."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements[0].is_partial():
            parameter.grad = gradient.redistribute(placements=[Replicate()])


def count(mode: CommDebugMode) -> str:
    counts = {str(op).split(".")[-1]: n for op, n in mode.get_comm_counts().items()}
    return ", ".join(f"{n} {op}" for op, n in sorted(counts.items())) or "none"


def check(model: Transformer, alone: Transformer) -> None:
    for ours, truth in zip(model.parameters(), alone.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(gradient, truth.grad, rtol=1e-4, atol=1e-5)


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
    if HEADS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the {HEADS} heads")
    device = init_distributed()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = Transformer().to(device)
    tokens, targets = torch.randint(V, (2, B, S)).to(device)
    cuts = three_inputs, tensor_parallel, sequence_parallel
    models = {cut: copy.deepcopy(alone) for cut in cuts}
    # causal: without the last token the others' logits are the same
    torch.testing.assert_close(alone(tokens[:, :-1]), alone(tokens)[:, :-1])
    expected = F.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten())
    expected.backward()

    lines = [f"t = {mesh.size()}, {LAYERS} layers; loss of one process {expected.item():.4f}"]
    for cut, model in models.items():
        cut(model, mesh)
        with CommDebugMode() as forward:
            logits = model(tokens)
        with loss_parallel():  # has no effect if the logits are whole
            with CommDebugMode() as in_loss:
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            with CommDebugMode() as backward:
                loss.backward()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        torch.testing.assert_close(value, expected)
        check(model, alone)
        lines.append(f"{cut.__name__}: loss {value.item():.4f}, all gradients equal")
        for phase, mode in (("forward", forward), ("loss", in_loss), ("backward", backward)):
            lines.append(f"  {phase:8}  {count(mode)}")
    try:
        F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    except RuntimeError as error:
        lines.append(f"the loss outside of loss_parallel:\n  RuntimeError: {error}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with CommDebugMode() as unprepared:
        optimizer.step()
    with CommDebugMode() as summing:
        sum_partial_gradients(model)
    check(model, alone)
    with CommDebugMode() as prepared:
        optimizer.step()
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    for _ in range(2):  # with the same gradients, as above
        alone_optimizer.step()
    for (name, ours), truth in zip(model.named_parameters(), alone.parameters(), strict=True):
        # only the norms, because the gradient of the keys' bias consists of rounding errors,
        # which Adam enlarges
        if "norm" in name:
            torch.testing.assert_close(ours.full_tensor(), truth, rtol=1e-4, atol=1e-5)
    lines.append(f"AdamW's step: {count(unprepared)}")
    lines.append(f"norms' gradients summed first: {count(summing)}; step: {count(prepared)}")
    if mesh.get_rank() == 0:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches keep the mesh and its group alive until the end
