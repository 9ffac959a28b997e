"""Parameters that change after wrapping: DDP never learns of the change.

DDP averages the gradients of the parameters that needed a gradient when its constructor ran.
The program makes one of four changes to a model of two layers, trains the model for three
steps, and compares the parameters of the ranks:

    unfreeze   a frozen layer gets requires_grad_(True)
    add        the model gets a third layer
    assign     load_state_dict(assign=True) replaces every parameter by a new one
    freeze     a layer gets requires_grad_(False), and DDP still waits for its gradients

    (no flag)      changes the model after it was wrapped: the ranks become different
    --fix          changes the model first and wraps it afterwards
    --wrap-again   changes the model after it was wrapped, then wraps it once more

With both fixes, the trained parameters must equal those of one process that trains on the data
of all ranks. This process uses neither DDP nor an optimizer.
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS, LEARNING_RATE = 3, 8, 0.1


def build(change: str, device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
    if change == "unfreeze":
        model[0].requires_grad_(False)
    return model


def apply_change(model: nn.Sequential, change: str, device: torch.device) -> None:
    torch.manual_seed(1)
    if change == "unfreeze":
        model[0].requires_grad_(True)
    elif change == "add":
        model.append(nn.Linear(4, 4).to(device))
    elif change == "assign":
        checkpoint = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(checkpoint, assign=True)
    else:
        model[0].requires_grad_(False)


def check_change(model: nn.Sequential, change: str, before: set[nn.Parameter]) -> None:
    """Assert that the change was made: `before` contains the parameters of the old model."""
    layers = {"unfreeze": [0, 1], "add": [0, 1, 2], "assign": [0, 1], "freeze": [1]}[change]
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == [f"{i}.{kind}" for i in layers for kind in ("weight", "bias")]
    new = [name for name, p in model.named_parameters() if p not in before]
    replaced = {"add": [2], "assign": [0, 1]}.get(change, [])
    assert new == [f"{i}.{kind}" for i in replaced for kind in ("weight", "bias")]


def train(ddp: DistributedDataParallel, data: torch.Tensor) -> None:
    """Train on the data of this rank, which has the shape [steps, rows, 4]."""
    trainable = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=LEARNING_RATE)
    for x in data:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()


def one_process(change: str, data: torch.Tensor, device: torch.device) -> list[torch.Tensor]:
    """Parameters after training on the data of all ranks, without DDP or an optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    if change == "add":
        torch.manual_seed(1)
        layers.append(nn.Linear(4, 4))
    weights = [p.detach().to(device) for layer in layers for p in layer.parameters()]
    first = 2 if change == "freeze" else 0  # the weight and the bias of layer 0 are not trained
    for weight in weights[first:]:
        weight.requires_grad_()
    for x in data:
        for weight, bias in zip(weights[::2], weights[1::2], strict=True):
            x = x @ weight.T + bias
        gradients = torch.autograd.grad(x.square().mean(), weights[first:])
        with torch.no_grad():
            for weight, gradient in zip(weights[first:], gradients, strict=True):
                weight -= LEARNING_RATE * gradient
    return weights


def drifted(model: nn.Module) -> list[str]:
    """Names of the parameters that are not bit for bit the same on every rank."""
    names = []
    for name, parameter in model.named_parameters():
        low, high = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        if not torch.equal(low, high):
            names.append(name)
    return names


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
    fixes = parser.add_mutually_exclusive_group()
    fixes.add_argument("--fix", action="store_true")
    fixes.add_argument("--wrap-again", action="store_true")
    args = parser.parse_args()

    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    data = torch.randn(n, STEPS, ROWS, 4, device=device)  # different data for each rank

    failed = False
    for change in ("unfreeze", "add", "assign", "freeze"):
        model = build(change, device)
        before = set(model.parameters())
        if args.fix:
            apply_change(model, change, device)
        ddp = DistributedDataParallel(model)
        if not args.fix:
            apply_change(model, change, device)
        if args.wrap_again:
            ddp = DistributedDataParallel(ddp.module)
        check_change(model, change, before)
        assert not drifted(model)  # training has not started yet
        initial = [p.detach().clone() for p in model.parameters()]

        try:
            train(ddp, data[rank])
        except RuntimeError as error:
            failed = True
            result = f"{type(error).__name__}: {str(error).split('. ')[0]}. …"
        else:
            for parameter, value in zip(model.parameters(), initial, strict=True):
                was_trained = not torch.equal(parameter, value)
                assert was_trained == parameter.requires_grad
            names = drifted(model)
            names_of_ranks = [None] * n
            dist.all_gather_object(names_of_ranks, names)
            assert all(names == other for other in names_of_ranks)
            expected = one_process(change, data.transpose(0, 1).flatten(1, 2), device)
            equal = all(map(torch.allclose, model.parameters(), expected))
            assert equal == (not names)  # equal ranks have the parameters of one process
            failed = failed or not equal
            result = f"drifted: {', '.join(names) or 'nothing'}"
            if equal:
                result += "; equal to one process with all the data"
        if rank == 0:
            print(f"{change:10}{result}", flush=True)

    dist.barrier()  # rank 0 has printed before any rank leaves with an error
    return 1 if failed else 0


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
