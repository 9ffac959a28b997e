"""Expected to mark a variable ready only once: one parameter, two gradients in one step.

After each forward, DDP expects one gradient from every parameter. Here a parameter reports two
gradients, because two backward passes run in one step:

    --case checkpoint   a layer is used twice, and each use is checkpointed with
                        use_reentrant=True, which runs a backward pass inside the backward pass
    --case heads        two losses, each with its own backward(), share the body of the model
    --case whole        the same, but each loss reaches every parameter. The first backward
                        completes the step, DDP ignores the second, and nothing is raised.

    --fix               checkpoints with use_reentrant=False, or calls backward() once, for the
                        sum of the losses
    --static-graph      is a fix for the checkpoint. With two losses, it hides the error in the
                        first step: the gradients are wrong, and the next step raises.

The program makes three steps with different data. In each step it compares the gradients with
those of one process, which computes the formulas of the model in float64, without DDP.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

STEPS, ROWS = 3, 4


class Model(nn.Module):
    """`shared` is applied twice, as in a transformer that ties its layers."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant  # None: no checkpointing
        self.first = nn.Linear(8, 8)
        self.shared = nn.Linear(8, 8)
        self.head_a = nn.Linear(8, 1)
        self.head_b = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tanh(self.first(x))
        for _ in range(2):
            if self.reentrant is None:
                x = torch.tanh(self.shared(x))
            else:
                x = torch.tanh(checkpoint(self.shared, x, use_reentrant=self.reentrant))
        return self.head_a(x), self.head_b(x)


def losses(model: nn.Module, x: torch.Tensor, case: str) -> list[torch.Tensor]:
    a, b = model(x)
    if case == "checkpoint":
        return [(a + b).square().mean()]
    if case == "heads":
        return [a.square().mean(), b.square().mean()]
    return [(a + b).square().mean(), (a * b).mean()]


def backward(parts: list[torch.Tensor], one_by_one: bool) -> None:
    if one_by_one:
        for part in parts:
            part.backward(retain_graph=part is not parts[-1])
    else:
        sum(parts).backward()


def one_process(model: Model, x: torch.Tensor, case: str) -> dict[str, torch.Tensor]:
    """The gradients for the whole batch x, in float64, without modules or checkpoints."""
    values = {
        name: p.detach().double().requires_grad_() for name, p in model.named_parameters()
    }

    def linear(layer: str, x: torch.Tensor) -> torch.Tensor:
        return x @ values[f"{layer}.weight"].T + values[f"{layer}.bias"]

    x = x.double()
    for layer in ("first", "shared", "shared"):
        x = torch.tanh(linear(layer, x))
    a, b = linear("head_a", x), linear("head_b", x)
    if case == "heads":
        loss = (a**2).mean() + (b**2).mean()
    else:
        loss = ((a + b) ** 2).mean() + ((a * b).mean() if case == "whole" else 0)
    gradients = torch.autograd.grad(loss, list(values.values()))
    return dict(zip(values, gradients, strict=True))


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


def main() -> int:
    parser = argparse.ArgumentParser()
    cases = ["checkpoint", "heads", "whole"]
    parser.add_argument("--case", choices=cases, default="checkpoint")
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--static-graph", action="store_true")
    args = parser.parse_args()

    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    batches = torch.randn(STEPS, ROWS * n, 8, device=device)
    model = Model(reentrant=not args.fix if args.case == "checkpoint" else None).to(device)
    ddp = DistributedDataParallel(model, static_graph=args.static_graph)
    rows, uses = [], []  # of each forward of the model; of the shared layer, recomputed or not
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    model.shared.register_forward_pre_hook(lambda *_: uses.append(1))

    failed = False
    for step, batch in enumerate(batches):
        expected = one_process(model, batch, args.case)
        model.zero_grad()
        try:
            parts = losses(ddp, batch.chunk(n)[rank], args.case)
            backward(parts, one_by_one=not args.fix)
        except RuntimeError as error:
            failed = True
            if rank == 0:
                print(f"{type(error).__name__}: {error}", flush=True)
            break
        wrong = []
        for name, parameter in model.named_parameters():
            ours = parameter.grad.double()
            if not torch.allclose(ours, expected[name], rtol=1e-4, atol=1e-6):
                wrong.append(name)
        failed = failed or bool(wrong)
        if args.case == "whole" and not args.fix:
            # DDP averages the gradients of the first loss, which is the loss of the case
            # "checkpoint". Each rank then adds its own gradients of the second loss.
            averaged, shard = one_process(model, batch, "checkpoint"), batch.chunk(n)[rank]
            both, first = (one_process(model, shard, case) for case in ("whole", "checkpoint"))
            for name, parameter in model.named_parameters():
                mixed = averaged[name] + both[name] - first[name]
                torch.testing.assert_close(parameter.grad.double(), mixed, rtol=1e-4, atol=1e-6)
        if wrong and rank == 0:
            print(f"step {step}: no error, but wrong gradients: {', '.join(wrong)}", flush=True)
    else:
        assert rows == [ROWS] * STEPS  # each rank computes its own shard, and no more
        assert len(uses) == STEPS * (4 if args.case == "checkpoint" else 2)
        if rank == 0 and not failed:
            print(f"{STEPS} steps: gradients equal to one process with the whole batch")

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
