"""MixedPrecisionPolicy: in which precision parameters are gathered, gradients reduced, kept.

The shard which the optimizer updates stays in fp32, so FSDP needs no master weights beside it.
param_dtype is that of the gathered copy, of the computation and of the all-gather; reduce_dtype
of the reduce-scatter; output_dtype of what forward returns.
"""

import copy
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

BATCH, H, LAYERS = 48, 48, 4  # 1, 2, 3 and 4 ranks divide the batch
BF16, FP32 = torch.bfloat16, torch.float32
# --8<-- [start:policies]
POLICIES = {
    "none": MixedPrecisionPolicy(),
    "param bf16": MixedPrecisionPolicy(param_dtype=BF16),
    "+ reduce bf16": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16),
    "+ reduce fp32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32),
    "+ output fp32": MixedPrecisionPolicy(
        param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32
    ),
}
# --8<-- [end:policies]
# --8<-- [start:keep]
KEEP_FP32 = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)  # of one module
# --8<-- [end:keep]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Count(TorchDispatchMode):
    """Count collectives and their bytes. Measure the gathered parameters at every operator."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls, self.bytes, self.peak = model, Counter(), Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_").removesuffix("_base")
            self.calls[name] += 1
            whole = args[1] if name == "reduce_scatter" else args[0]
            self.bytes[name] += whole.nbytes
        self.peak = max(self.peak, whole_bytes(self.model))
        return func(*args, **(kwargs or {}))


def whole_bytes(model: nn.Module) -> int:
    """Return the bytes of the parameters that are gathered at this moment."""
    # a gathered parameter is a plain tensor, and a sharded parameter is a DTensor
    return sum(p.nbytes for p in model.parameters() if not isinstance(p, DTensor))


def short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP32: "fp32"}[dtype]


def start() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.accelerator.device_count() < local_world or torch.backends.mps.is_available():
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank)
    torch.accelerator.set_device_index(local_rank)
    dist.init_process_group(device_id=device)
    return device


def main() -> None:
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    alone = nn.Sequential(*(Block() for _ in range(LAYERS))).to(device)
    psi = sum(p.numel() for p in alone.parameters())
    inputs = torch.randn(BATCH, H).to(device)
    whole = alone(inputs).square().mean()
    whole.backward()
    if rank == 0:
        print(f"N = {n}; bytes through collectives per parameter and step")
        print("policy         gathered  reduced  compute  output  shard  gradient  Adam  error")
    for name, policy in POLICIES.items():
        model = copy.deepcopy(alone)
        model.zero_grad()
        # --8<-- [start:shard]
        for block in model:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        # --8<-- [end:shard]
        seen: list[torch.dtype] = []
        model[0].up.register_forward_pre_hook(
            lambda m, _, seen=seen: seen.append(m.weight.dtype)
        )
        with Count(model) as count:
            output = model(inputs[rank::n])
            loss = output.float().square().mean()
            loss.backward()
        assert n == 1 or not torch.isclose(loss, whole, 0.01)  # of a part of the rows
        off = sum(
            (p.grad.full_tensor() - q.grad).square().sum()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True)
        )
        error = (off / sum(q.grad.square().sum() for q in alone.parameters())).sqrt().item()
        assert error < 1e-5 if name == "none" else 1e-3 < error < 2e-2, (name, error)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        shard = model[0].up.weight
        dtypes = [shard.dtype, shard.grad.dtype, optimizer.state[shard]["exp_avg"].dtype]
        if rank == 0:
            print(
                f"{name:13}  {count.bytes['allgather'] / psi:8.1f}"
                f"  {count.bytes['reduce_scatter'] / psi:7.1f}  {short(seen[0]):7}"
                f"  {short(output.dtype):6}  {short(dtypes[0]):5}  {short(dtypes[1]):8}"
                f"  {short(dtypes[2]):4}  ≈{error:.0e}"
            )
    for name, policy in (
        ("fp32", MixedPrecisionPolicy(param_dtype=FP32)),
        ("fp32, output bf16", KEEP_FP32),
    ):
        block = copy.deepcopy(alone[0])
        fully_shard(block.up, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=POLICIES["param bf16"])
        kept: list[torch.dtype] = []
        block.up.register_forward_pre_hook(lambda m, _, kept=kept: kept.append(m.weight.dtype))
        try:
            told = f"returns {short(block(inputs[rank::n]).dtype)}"
            assert policy is KEEP_FP32 and kept == [FP32]
        except RuntimeError as error:
            told = f"RuntimeError: {error}"
        if rank == 0:
            print(f"`up` in {name}: {told}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
