"""DeepSpeed's ZeRO stages 0 to 3 give the losses of one process. Count their bytes and traffic.

One model is trained by one process with the whole batch, by FSDP2, and by DeepSpeed in each
stage. A step has m = 2 micro-batches. Between the two micro-batches, the program asks
Python's garbage collector for every live tensor of the process. Their bytes are what a rank
keeps: parameters, gradients, optimizer states and buffers. In a different step the program
looks at each collective and computes the elements that a ring would send for it.

In fp32, DeepSpeed keeps a flat fp32 copy of the parameters that a rank updates. This copy takes
4Ψ/N bytes, which FSDP2 does not need. In bf16, this copy is the master copy of mixed precision.
The formulas are then those of the ZeRO paper: 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N.

The elements that a rank sends in a step, each times (N - 1)/N:
FSDP2 does two all-gathers and one reduce-scatter in each micro-batch: 3mΨ.
Stage 0 does one all-reduce in the step: 2Ψ.
Stage 1 does one all-reduce and one all-gather in the step: 3Ψ.
Stage 2 does one all-reduce in each micro-batch, and one all-gather in the step: (2m + 1)Ψ.
Stage 3 does one all-gather and one reduction in each micro-batch: 2mΨ. It does not gather
again for backward, because this model is small enough to be kept from forward to backward.
The second table of the output has configuration keys that change these numbers.

Needs: pip install deepspeed
"""

import gc
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

logging.disable(logging.WARNING)  # DeepSpeed logs to stdout, with the date
warnings.simplefilter("ignore")
if torch.accelerator.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
    # DeepSpeed uses the GPU with the number LOCAL_RANK, so its ranks cannot share a GPU.
    os.environ |= {"DS_ACCELERATOR": "cpu", "NCCL_MULTI_RANK_GPU_ENABLE": "0"}

try:
    import deepspeed
    import deepspeed.ops
except ImportError:
    sys.exit("this program needs: pip install deepspeed")
# on a CPU, DeepSpeed would compile an all-reduce for inference, which training does not use
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

WIDTH, LAYERS, BATCH, STEPS = 128, 16, 24, 3
EPS = 1e-3  # with 1e-8, Adam would hide a factor that is missing in the gradients
BUCKET = WIDTH * WIDTH  # elements: one layer
TO_OWNER = {"use_multi_rank_bucket_allreduce": False}
NO_REUSE = {"stage3_max_reuse_distance": 0}
KEYS = (  # stage, keys, elements that two micro-batches send, in units of Ψ
    (1, TO_OWNER, 2),
    (2, TO_OWNER, 3),
    (3, NO_REUSE, 6 - 2 / LAYERS),  # backward begins with the layer that forward ended with
    (3, NO_REUSE | {"stage3_prefetch_bucket_size": WIDTH * WIDTH * LAYERS}, 4),
    (3, {"stage3_max_live_parameters": 0}, 4),
)


class TanhNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


PSI = LAYERS * WIDTH * WIDTH
Result = tuple[list[float], float, float]
"""Losses; bytes per parameter kept between the micro-batches; elements sent per parameter."""


def mark() -> None:
    """Make `made_since` count only tensors that are created from now on."""
    gc.collect()
    gc.freeze()  # get_objects() leaves out what is frozen


def made_since() -> int:
    """Return the bytes of all live tensors that were created since the last call of mark()."""
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor):
            for tensor in (found, found.grad if found.is_leaf else None):
                if tensor is not None:
                    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                    storage = local.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def let_go(done: Callable[[], bool]) -> None:
    """Wait up to half a second for `done`: gloo's threads free buffers a moment later."""
    end = time.monotonic() + 0.5
    while not done() and time.monotonic() < end:
        time.sleep(0.001)


class Traffic(TorchDispatchMode):
    """Add up the elements that a rank would send if every collective ran in a ring."""

    elements = 0.0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            whole, twice = {
                "allreduce": (args[0], 2),
                "allgather_base": (args[0], 1),
                "reduce_scatter_base": (args[1], 1),
                "reduce": (args[0], 1),  # to one rank; the average over all owners
            }[name]
            n = dist.get_world_size()
            count = sum(t.numel() for t in whole) if isinstance(whole, list) else whole.numel()
            self.elements += twice * (n - 1) / n * count
        return func(*args, **(kwargs or {}))


def config(stage: int, bf16: bool, ranks: int, keys: dict | None = None) -> dict:
    return {
        "train_micro_batch_size_per_gpu": BATCH // ranks // 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,  # no clipping. The default is a limit of 1.0
        "bf16": {"enabled": bf16},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": BUCKET,  # elements in the buffer of stages 1 to 3
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 0,  # no parameter is too small to shard
        }
        | (keys or {}),
    }


def with_deepspeed(
    stage: int, bf16: bool, device: torch.device, keys=None, expected: float = math.inf
) -> Result:
    rank, n = dist.get_rank(), dist.get_world_size()
    mark()
    torch.manual_seed(0)
    model = TanhNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
    # --8<-- [start:loop]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config(stage, bf16, n, keys)
    )
    losses, kept = [], 0
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        with Traffic() if step == 1 else nullcontext() as traffic:
            for x in micro_batches(step, rank, n, device):
                output = engine(x.bfloat16() if bf16 else x)
                loss = nn.functional.mse_loss(output.float(), target(x))
                engine.backward(loss)  # in place of loss.backward()
                engine.step()  # an optimizer step only after the second micro-batch
                total += loss.detach() / 2 / n
                # --8<-- [end:loop]
                if step == STEPS - 1 and kept == 0:
                    del output, loss, x
                    let_go(lambda: made_since() < (expected + 0.02) * PSI)
                    kept = made_since()
        if step == 1:
            sent = traffic.elements
        dist.all_reduce(total)
        losses.append(total.item())
    engine.destroy()
    return losses, kept / PSI, sent / PSI


def micro_batches(step: int, rank: int, ranks: int, device: torch.device):
    """This rank's two parts of the step's batch, one after the other."""
    for part in (2 * rank, 2 * rank + 1):
        torch.manual_seed(1000 + step)
        yield torch.randn(BATCH, WIDTH).chunk(2 * ranks)[part].clone().to(device)


def target(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def plain(
    device: torch.device, shard: bool, expected: float, empty_step: bool = False
) -> Result:
    """Train with one process and the whole batch, or with FSDP2 if `shard` is true.

    With `empty_step`, AdamW first takes one step with gradients of zero.
    """
    mark()
    rank, n = (dist.get_rank(), dist.get_world_size()) if shard else (0, 1)
    torch.manual_seed(0)
    model = TanhNet().to(device)
    if shard:
        mesh = init_device_mesh(device.type, (n,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=EPS)
    if empty_step:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()
    losses, kept = [], 0
    for step in range(STEPS):
        total = torch.zeros((), device=device)
        with Traffic() if step == 1 else nullcontext() as traffic:
            for x in micro_batches(step, rank, n, device):
                loss = nn.functional.mse_loss(model(x), target(x))
                (loss / 2).backward()
                total += loss.detach() / 2 / n
                if step == STEPS - 1 and kept == 0:
                    del loss, x
                    let_go(lambda: made_since() < (expected + 0.02) * PSI)
                    kept = made_since()
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            sent = traffic.elements
        if shard:
            dist.all_reduce(total)
        losses.append(total.item())
    return losses, kept / PSI, sent / PSI


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
    if int(os.environ.get("WORLD_SIZE", "1")) not in (1, 2, 4):
        sys.exit(
            "start this with 1, 2 or 4 ranks: others cut layers, and the count is not even"
        )
    device = init_distributed()
    n = dist.get_world_size()
    ring = (n - 1) / n
    truth, *counts = plain(device, shard=False, expected=16.0)
    rows = [("one process, fp32", truth, *counts, 16.0, 0.0, 0)]
    rows.append(("FSDP2, fp32", *plain(device, True, 16 / n), 16 / n, 6 * ring, 0))
    assert all(abs(kept - expected) < 0.02 for _, _, kept, _, expected, _, _ in rows), rows
    fp32 = (16.0, 8 + 12 / n, 4 + 16 / n, 20 / n)
    bf16 = (16.0, 4 + 12 / n, 2 + 14 / n, 16 / n)
    for name, expected in (("fp32", fp32), ("bf16", bf16)):
        for stage, formula in enumerate(expected):
            sends = (2, 3, 5, 4)[stage] * ring
            buffers = (0, 2, 1, 1)[stage]  # buckets, each as large as a layer
            extra = buffers * (2 if name == "bf16" else 4) / LAYERS
            result = with_deepspeed(stage, name == "bf16", device, expected=formula + extra)
            assert abs(result[1] - formula - extra) < 0.02, (stage, result)  # step counts
            rows.append((f"DeepSpeed stage {stage}, {name}", *result, formula, sends, buffers))
    ahead = plain(device, shard=False, expected=16.0, empty_step=True)[0]
    for name, losses, _, sent, _, sends, _ in rows:
        wide = 5e-3 if "bf16" in name else 1e-5
        # the Adam of this one row has counted a step without gradients
        right = ahead if name == "DeepSpeed stage 0, bf16" else truth
        torch.testing.assert_close(losses, right, rtol=wide, atol=wide)
        assert abs(sent - sends) < 0.001, (name, sent)  # flags of one element
    if dist.get_rank() == 0:
        print(f"Ψ = {PSI:,} parameters, {n} ranks; per rank, bytes kept and elements sent / Ψ")
        print(f"{'':24}{'losses of three steps':22}kept  formula  rest    sent  formula")
        for name, losses, kept, sent, expected, sends, buffers in rows:
            text = " ".join(
                f"{loss:.4f}" if "fp32" in name else f"≈{loss:.2f}" for loss in losses
            )
            print(
                f"{name:24}{text:20}{kept:6.2f}  {expected:7.2f}  {buffers:4}  {sent:6.2f}  "
                f"{sends:7.2f}"
            )
        print("rest: buckets for gradients, each as large as a layer")
        print(f"\n{'the same in fp32, with':67}sent  formula")
    for stage, keys, times in KEYS:
        # A bucket of two layers. Stages 1 and 3 keep it between two micro-batches. Stages 1 and
        # 2 keep the last gradient, which is one layer.
        formula = fp32[stage] + (3, 1, 2)[stage - 1] * 4 / LAYERS
        wide = keys | {"reduce_bucket_size": 2 * BUCKET}
        losses, kept, sent = with_deepspeed(stage, False, device, wide, formula)
        torch.testing.assert_close(losses, truth, rtol=1e-5, atol=1e-5)
        assert abs(kept - formula) < 0.02, (stage, keys, kept)
        assert abs(sent - times * ring) < 0.001, (keys, sent)
        if dist.get_rank() == 0:
            text = ", ".join(f"{key} {value}" for key, value in keys.items())
            text = f"stage {stage}: " + text.replace(f"size {PSI}", "size Ψ").replace(
                ", ", ",\n  "
            )
            lines = text.splitlines()
            print(*lines[:-1], f"{lines[-1]:65}{sent:6.2f}  {times * ring:7.2f}", sep="\n")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
