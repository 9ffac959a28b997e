"""The tracing front end: pipeline() cuts a model whose forward you do not want to rewrite.

torch.export traces the whole forward with one micro-batch. split_spec names the modules before
which to cut. Each rank builds its stage from the traced graph. Loss and gradients equal those
of one process, and the parameters keep their names.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline
from torch.nn.functional import cross_entropy

WORDS, HIDDEN, BATCH, M = 50, 16, 24, 8


class Net(nn.Module):
    """Not an nn.Sequential: the residual sums are Python in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)  # [b] -> [b, h]
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)  # [b, h] -> [b, words]


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
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start with 2 ranks: torchrun --nproc-per-node=2 pipelining_tracer.py")
    device = init_distributed()
    rank = dist.get_rank()

    torch.manual_seed(0)  # the same model and batch on every rank
    net = Net().to(device)
    tokens, target = torch.randint(WORDS, (2, BATCH)).to(device)
    x = net.embed.weight[tokens]  # the forward again, as plain code
    for block in net.blocks:
        x = x + torch.tanh(x @ block.weight.T + block.bias)
    true_loss = cross_entropy(x @ net.head.weight.T + net.head.bias, target)
    true_loss.backward()
    truth = {name: tensor.grad.clone() for name, tensor in net.named_parameters()}
    net.zero_grad()

    example = tokens[: BATCH // M]  # a micro-batch: the traced graph has its shape
    pipe = pipeline(net, mb_args=(example,), split_spec={"blocks.2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, device)
    schedule = ScheduleGPipe(stage, n_microbatches=M, loss_fn=cross_entropy)
    losses: list[torch.Tensor] = []
    inputs = (tokens,) if rank == 0 else ()
    schedule.step(*inputs, target=target if rank == 1 else None, losses=losses)
    if losses:
        torch.testing.assert_close(torch.stack(losses).mean(), true_loss)
    for name, tensor in stage.submod.named_parameters():
        torch.testing.assert_close(tensor.grad, truth[name])

    names: list = [None] * 2
    dist.all_gather_object(names, [name for name, _ in stage.submod.named_parameters()])
    if rank == 0:
        for r, held in enumerate(names):
            weights = " ".join(name for name in held if name.endswith("weight"))
            print(f"rank {r}: {weights}: gradients of one process")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
