"""Must flatten tensors with uniform dtype: FSDP needs one dtype for the parameters of a unit.

The model has a base in bf16 and a head in fp32. FSDP1 concatenates all parameters of a unit, so
it refuses two dtypes when it wraps the model. FSDP2 refuses them in the first step, but only if
parameters of both dtypes are trained. Both accept one dtype, or one unit for each dtype. The
losses are compared with those of one process.
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

BATCH, H, STEPS = 24, 48, 5  # 1, 2, 3 and 4 ranks divide the batch
BF16, FP32 = torch.bfloat16, torch.float32


class Model(nn.Module):
    """A pretrained base in bf16, and a new head in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(H, H).to(BF16)
        self.head = nn.Linear(H, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base(x.to(self.base.weight.dtype)).tanh()
        return self.head(x.to(self.head.weight.dtype)).float()


# --8<-- [start:wrap]
def wrap(model: nn.Module, mesh, fsdp: int, case: str) -> nn.Module:
    """Shard the model with FSDP1 or FSDP2, as the case says."""
    old, new = None, MixedPrecisionPolicy()  # FSDP1 and FSDP2 cast nothing by default
    if case == "frozen base":
        model.base.requires_grad_(False)
    if case == "one dtype":
        model.to(FP32)  # the shards are in fp32, and the layers compute in bf16
        old = MixedPrecision(param_dtype=BF16, reduce_dtype=FP32)
        new = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    if fsdp == 1:
        options = {"device_mesh": mesh, "mixed_precision": old, "use_orig_params": True}
        device = model.head.weight.device
        if case == "own unit":
            model.head = FSDP(model.head, device_id=device, **options)
        return FSDP(model, device_id=device, **options)
    if case == "own unit":
        fully_shard(model.head, mesh=mesh, mp_policy=new)
    return fully_shard(model, mesh=mesh, mp_policy=new)


# --8<-- [end:wrap]


def train(model: nn.Module, inputs: torch.Tensor) -> list[float]:
    """The losses of some steps of SGD, each a mean over the rows of `inputs`."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(inputs) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return [loss.item() for loss in losses]


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
    inputs = torch.randn(BATCH, H).to(device)
    accepted = {}
    for case in ("two dtypes", "frozen base", "one dtype", "own unit"):
        reference = copy.deepcopy(alone)  # one process, the whole batch
        reference.base.requires_grad_(case != "frozen base")
        expected = train(reference, inputs)
        for fsdp in (1, 2):
            try:
                stage = "in the wrapper"
                model, computed = copy.deepcopy(alone), set()
                model.base.register_forward_hook(lambda _, __, y, s=computed: s.add(y.dtype))
                model = wrap(model, mesh, fsdp, case)
                stage = "in the first step"
                losses = torch.tensor(train(model, inputs[rank::n]), device=device)
            except (ValueError, AssertionError) as error:
                losses, result = None, f"{stage}, {type(error).__name__}: {error}"
                if result.endswith("}"):  # FSDP2 prints a set, whose order is not fixed
                    result = result.split("{")[0] + "{torch.bfloat16, torch.float32}"
                assert "with uniform dtype" in result or "uniform original parameter" in result
            else:
                dist.all_reduce(losses)
                losses = (losses / n).tolist()
                result = f"trains, loss {losses[0]:.3f} -> {losses[-1]:.3f}"
                worst = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
                dtypes = {parameter.dtype for parameter in model.parameters()}
                assert dtypes == ({FP32} if case == "one dtype" else {BF16, FP32})
                assert computed == {BF16}  # the base computes in bf16 in every case
                assert worst < 0.03, (case, fsdp, losses, expected)
                assert losses[-1] < 0.2 * losses[0]  # far more than the tolerance
            accepted[case, fsdp] = losses is not None
            if rank == 0:
                print(f"{case}, FSDP{fsdp}: {result}")
    refused = {key for key, each in accepted.items() if not each}
    assert refused == {("two dtypes", 1), ("two dtypes", 2), ("frozen base", 1)}


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
