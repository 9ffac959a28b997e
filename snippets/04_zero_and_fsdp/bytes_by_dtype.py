"""How many bytes a step sends depends on the dtype: DDP and FSDP2 with bf16 and fp32.

Each rank of a ring sends (N - 1)/N times a tensor in an all-gather or a reduce-scatter, and
twice that in an all-reduce. The program leaves out this factor, so it prints bytes per
parameter. The bytes do not come from a formula. The program adds the sizes of the tensors
that PyTorch's DDP and FSDP2 pass to their collectives in one step.

Compare the sums in the output: FSDP2 with bf16 gathers and fp32 reduction sends as much as DDP
with fp32 gradients. Without resharding after forward, it sends less. FSDP2 entirely in fp32
sends 50% more.

One process plays rank 0 of 8. Its process group is fake: the collectives return immediately
and send nothing. Only the calls and their dtypes are real.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

RANKS, LAYERS, H = 8, 4, 64
BF16, FP32 = torch.bfloat16, torch.float32
Bytes = dict[str, int]  # for each kind of collective


def model(dtype: torch.dtype = FP32) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(H, H, bias=False, dtype=dtype) for _ in range(LAYERS)))


def bytes_of_ddp(dtype: torch.dtype) -> Bytes:
    """Return the bytes of the buckets that DDP reduces. An all-reduce counts twice.

    An fp32 model runs under autocast.
    """
    sizes: list[int] = []

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sizes.append(bucket.buffer().nbytes)  # DDP calls the hook instead of its all-reduce
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp = DistributedDataParallel(model(dtype))
    ddp.register_comm_hook(None, hook)
    with torch.autocast("cpu", BF16, enabled=dtype == FP32):
        output = ddp(torch.randn(4, H, dtype=dtype))
    assert output.dtype == BF16  # both models compute in bf16
    output.float().square().mean().backward()
    return {"all-reduce": 2 * sum(sizes)}


class CollectiveBytes(TorchDispatchMode):
    """Adds the bytes of the whole tensor of each all-gather and each reduce-scatter."""

    def __enter__(self) -> "CollectiveBytes":
        self.sizes: Bytes = {"all-gather": 0, "reduce-scatter": 0}
        self.calls = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            whole = max(args[0].nbytes, args[1].nbytes)  # the shard is the smaller one
            name = func.overloadpacket.__name__
            self.calls += 1
            self.sizes["all-gather" if "allgather" in name else "reduce-scatter"] += whole
        return func(*args, **(kwargs or {}))


def bytes_of_fsdp(policy: MixedPrecisionPolicy, reshard: bool = True) -> Bytes:
    """Return the bytes of FSDP2 with one group of parameters for each layer."""
    sharded, mesh = model(), init_device_mesh("cpu", (RANKS,))
    for layer in sharded:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    with CollectiveBytes() as collectives:
        sharded(torch.randn(4, H)).float().square().mean().backward()
    # every layer has collectives of its own: one or two all-gathers, and one reduce-scatter
    assert collectives.calls == LAYERS * (3 if reshard else 2)
    return collectives.sizes


def main() -> None:
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    bf16 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    mixed = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    rows = {  # the bytes per parameter that the page derives: 2 or 4 for each transfer
        "DDP, fp32 model under autocast": (bytes_of_ddp(FP32), 4 + 4),
        "DDP, bf16 model": (bytes_of_ddp(BF16), 2 + 2),
        "FSDP2, fp32": (bytes_of_fsdp(MixedPrecisionPolicy()), 4 + 4 + 4),
        "FSDP2, bf16 gathers, bf16 reduction": (bytes_of_fsdp(bf16), 2 + 2 + 2),
        "FSDP2, bf16 gathers, fp32 reduction": (bytes_of_fsdp(mixed), 2 + 2 + 4),
        "  bf16 reduction, no resharding": (bytes_of_fsdp(bf16, reshard=False), 2 + 2),
        "  fp32 reduction, no resharding": (bytes_of_fsdp(mixed, reshard=False), 2 + 4),
    }
    psi = LAYERS * H * H
    print("bytes per parameter and step            gathered  reduced   sum")
    for name, (sizes, expected) in rows.items():
        gathered = sizes.get("all-gather", 0) / psi
        total = sum(sizes.values()) / psi
        assert total == expected, (name, sizes)
        print(f"{name:38}  {gathered:8.0f}  {total - gathered:7.0f}  {total:4.0f}")

    default = bytes_of_fsdp(MixedPrecisionPolicy(param_dtype=BF16))["reduce-scatter"] / psi
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert default == (4 if release >= (2, 15) else 2)
    print("With bf16 gathers, fp32 shards and no reduce_dtype, FSDP2 reduces")
    print("2 bytes per parameter up to torch 2.14, and 4 since torch 2.15.")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
