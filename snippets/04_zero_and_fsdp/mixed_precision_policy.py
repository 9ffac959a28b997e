"""A MixedPrecisionPolicy sets the dtype of gathered parameters, gradient sums and outputs.

The optimizer updates the shards. The shards stay in fp32, so FSDP needs no extra master copy.
param_dtype is the dtype of the all-gather and of the computation, reduce_dtype is the dtype of
the reduce-scatter, and output_dtype is the dtype of the tensors that forward returns. Look at
the bytes per parameter in the columns `gathered` and `reduced`. The last lines keep one module,
and then one parameter, in fp32.
"""

import copy
import os
import sys
from collections import Counter
from dataclasses import fields, replace

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
KEEP_FP32 = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)  # for one module
# --8<-- [end:keep]
SINCE_2_15 = any(f.name == "param_dtype_override_fn" for f in fields(MixedPrecisionPolicy))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class RMSNorm(nn.Module):
    """This norm computes in fp32 for every dtype of its input and of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() * x.float().square().mean(-1, keepdim=True).rsqrt()
        return (self.weight.float() * y).to(x.dtype)


class Model(nn.Module):
    """Blocks with a unit each. The norm, the head and the buffer belong to the root's unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = RMSNorm(), nn.Linear(H, H, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale.to(x.dtype)


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


# --8<-- [start:override]
def vectors_in_fp32(parameter: nn.Parameter) -> torch.dtype | None:
    """Return the own dtype of a vector, and None for a matrix, which then gets param_dtype."""
    return parameter.dtype if parameter.ndim == 1 else None


# --8<-- [end:override]


def record_dtypes(module: nn.Module) -> list[torch.dtype]:
    """Record the dtype of the module's weight whenever its forward begins."""
    seen: list[torch.dtype] = []
    module.register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    return seen


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
    if BATCH % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide the batch of {BATCH}")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (n,))
    torch.manual_seed(0)
    alone = Model().to(device)
    psi = sum(p.numel() for p in alone.parameters())
    inputs = torch.randn(BATCH, H).to(device)
    whole = alone(inputs).square().mean()
    whole.backward()
    if rank == 0:
        print(f"N = {n}; bytes through collectives per parameter and step")
        print("policy         gathered  reduced  compute  output  shard  gradient  Adam  error")
    errors = {}
    for name, policy in POLICIES.items():
        model = copy.deepcopy(alone)
        model.zero_grad()
        # --8<-- [start:shard]
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=replace(policy, output_dtype=None))
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        # --8<-- [end:shard]
        seen = record_dtypes(model.blocks[0].up), record_dtypes(model.norm)
        with Count(model) as count:
            output = model(inputs[rank::n])
            loss = output.float().square().mean()
            loss.backward()
        assert n == 1 or not torch.isclose(loss, whole, 0.01)  # each rank has other rows
        off = sum(
            (p.grad.full_tensor() - q.grad).square().sum()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True)
        )
        error = (off / sum(q.grad.square().sum() for q in alone.parameters())).sqrt().item()
        assert error < 1e-5 if name == "none" else 1e-3 < error < 2e-2, (name, error)
        errors[name] = error
        compute = policy.param_dtype or FP32
        default = FP32 if SINCE_2_15 else compute  # of the reduction
        assert seen == ([compute], [compute])  # in a block, and in the root's unit
        assert count.bytes["allgather"] == 2 * compute.itemsize * psi
        assert count.bytes["reduce_scatter"] == (policy.reduce_dtype or default).itemsize * psi
        assert output.dtype == (policy.output_dtype or compute)
        assert model.scale.dtype == FP32  # no policy casts a buffer
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        shard = model.blocks[0].up.weight
        dtypes = [shard.dtype, shard.grad.dtype, optimizer.state[shard]["exp_avg"].dtype]
        if rank == 0:
            print(
                f"{name:13}  {count.bytes['allgather'] / psi:8.1f}"
                f"  {count.bytes['reduce_scatter'] / psi:7.1f}  {short(compute):7}"
                f"  {short(output.dtype):6}  {short(dtypes[0]):5}  {short(dtypes[1]):8}"
                f"  {short(dtypes[2]):4}  ≈{error:.0e}"
            )
    # computing in bf16 causes most of the error: reducing in bf16 as well adds little
    assert errors["+ reduce bf16"] < 1.5 * errors["+ reduce fp32"]

    model = copy.deepcopy(alone)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=POLICIES["+ output fp32"])
    try:
        model(inputs[rank::n])
        raise AssertionError("the head of the root accepts the fp32 output of the last block")
    except RuntimeError as error:
        if rank == 0:
            print(f"output fp32 on every block: RuntimeError: {error}")
    for name, policy in (
        ("fp32", MixedPrecisionPolicy(param_dtype=FP32)),
        ("fp32, output bf16", KEEP_FP32),
    ):
        block = copy.deepcopy(alone.blocks[0])
        fully_shard(block.up, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=POLICIES["param bf16"])
        weights = record_dtypes(block.up)
        try:
            result = f"returns {short(block(inputs[rank::n]).dtype)}"
            assert policy is KEEP_FP32 and weights == [FP32]
        except RuntimeError as error:
            result = f"RuntimeError: {error}"
        if rank == 0:
            print(f"`up` in {name}: {result}")

    if not SINCE_2_15:
        if rank == 0:
            print("param_dtype_override_fn: torch 2.15 and newer have it")
        return
    override = MixedPrecisionPolicy(param_dtype=BF16, param_dtype_override_fn=vectors_in_fp32)
    model = copy.deepcopy(alone)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICIES["param bf16"])
    fully_shard(model, mesh=mesh, mp_policy=override, reshard_after_forward=True)
    norm, head = record_dtypes(model.norm), record_dtypes(model.head)
    with Count(model) as count:
        model(inputs[rank::n])
    assert (norm, head) == ([FP32], [BF16])
    assert count.calls["allgather"] == LAYERS + 1  # the root's unit needs one all-gather
    assert count.bytes["allgather"] == 2 * psi + 2 * H  # two bytes more for each of H weights
    if rank == 0:
        print("param_dtype_override_fn: the root's unit has its norm in fp32, its head in bf16")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
