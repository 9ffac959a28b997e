"""Expected to mark a variable ready only once: one parameter, two gradients in one iteration.

DDP counts: after each forward, every parameter reports its gradient once. Here one reports
twice, because two backward passes run within one iteration:

    --case checkpoint   a layer is used twice, each use checkpointed with use_reentrant=True,
                        which runs a backward pass of its own inside the backward pass
    --case heads        two losses, each with its own backward(), share the body
    --case whole        the same, but each loss reaches every parameter: the first backward
                        ends the iteration, DDP ignores the second, and nothing is raised

    --fix              use_reentrant=False; or one backward() of the sum of the losses
    --static-graph      fixes the checkpoint, and makes the two losses fail in silence
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


def step(model: nn.Module, shard: torch.Tensor, args: argparse.Namespace) -> None:
    """One forward and backward under DDP, which is gone when this returns."""
    ddp = DistributedDataParallel(model, static_graph=args.static_graph)
    backward(losses(ddp, shard, args.case), one_by_one=not args.fix)


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


def main() -> int:
    parser = argparse.ArgumentParser()
    cases = ["checkpoint", "heads", "whole"]
    parser.add_argument("--case", choices=cases, default="checkpoint")
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--static-graph", action="store_true")
    args = parser.parse_args()

    device = start()
    rank, n = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    batch = torch.randn(4 * n, 8, device=device)
    model = Model(reentrant=not args.fix if args.case == "checkpoint" else None).to(device)

    # the truth: one process, the whole batch, no checkpointing
    single = Model(reentrant=None).to(device)
    single.load_state_dict(model.state_dict())
    backward(losses(single, batch, args.case), one_by_one=False)

    rows, uses = [], []  # of the model; of the shared layer, recomputed or not
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    model.shared.register_forward_pre_hook(lambda *_: uses.append(1))
    failed = False
    try:
        step(model, batch.chunk(n)[rank], args)
    except RuntimeError as error:
        failed = True
        if rank == 0:
            print(f"{type(error).__name__}: {error}", flush=True)
    else:
        assert rows == [4]  # its shard, no more
        assert len(uses) == (4 if args.case == "checkpoint" else 2)
        wrong = []
        for (name, ours), truth in zip(
            model.named_parameters(), single.parameters(), strict=True
        ):
            if not torch.allclose(ours.grad, truth.grad, rtol=1e-4, atol=1e-6):
                wrong.append(name)
        failed = bool(wrong)
        if rank == 0:
            if failed:
                print(f"no error, and wrong gradients: {', '.join(wrong)}", flush=True)
            else:
                print("gradients equal to one process with the whole batch")

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
