"""The mean of the ranks' mean losses is not the mean over all tokens.

Sequences differ in length, so the ranks have different numbers of tokens. DDP averages the
gradients of the means of the ranks, so a token counts more on a rank with few tokens. The fix
sums the loss, counts the tokens of all ranks, and multiplies by N / total. The factor N cancels
the division by N that DDP does. One process that accumulates the gradients of N micro-batches
makes the same error.
"""

import os
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

VOCABULARY, HIDDEN, PADDING = 50, 16, -100
LENGTHS = [30, 28, 25, 27, 9, 12, 14, 10, 20, 18, 15, 22]  # tokens per sequence: [12]


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


def make_model(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY))
    return model.to(device)


def make_batch(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences, padded: tokens and the next tokens to predict, both [12, 30]."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (len(lengths), max(lengths) + 1), generator=generator)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    for row, length in enumerate(lengths):
        targets[row, length:] = PADDING  # cross_entropy's ignore_index
    return inputs.to(device), targets.to(device)


def local_mean(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The usual loss: the mean over the tokens of this rank."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def global_mean(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The part of this rank in the mean over the tokens of all ranks, times N."""
    total = (targets != PADDING).sum()
    dist.all_reduce(total)  # one integer; with accumulation, count all micro-batches at once
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
    return loss * dist.get_world_size() / total


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def mean_of_means(lengths: list[int], parts: int, device: torch.device) -> torch.Tensor:
    """The gradient that one process accumulates over `parts` micro-batches."""
    model, batch = make_model(device), make_batch(lengths, device)
    for part in zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True):
        (local_mean(model, *part) / parts).backward()
    return gradients(model)


def main() -> None:
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()
    inputs, targets = make_batch(LENGTHS, device)

    # the reference: one process with all tokens
    model = make_model(device)
    true_loss = local_mean(model, inputs, targets)
    true_loss.backward()
    truth = gradients(model)

    # each rank takes consecutive sequences
    my_inputs, my_targets = inputs.tensor_split(n)[rank], targets.tensor_split(n)[rank]
    tokens = (my_targets != PADDING).sum()
    tokens_by_rank = [torch.zeros_like(tokens) for _ in range(n)]
    dist.all_gather(tokens_by_rank, tokens)
    if rank == 0:
        print(f"tokens by rank: {[int(count) for count in tokens_by_rank]}")
        print(f"one process, all {sum(LENGTHS)} tokens: loss {true_loss.item():.4f}")

    for loss_of in (local_mean, global_mean):
        ddp = DDP(make_model(device))
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counter:
            loss = loss_of(ddp, my_inputs, my_targets)
        sent = [call.args[0].numel() for call in counter.call_args_list]
        assert sent == [1] * (loss_of is global_mean)  # the fix sends one number
        loss.backward()
        error = (gradients(ddp) - truth).norm() / truth.norm()
        if loss_of is local_mean:
            torch.testing.assert_close(gradients(ddp), mean_of_means(LENGTHS, n, device))
        else:
            torch.testing.assert_close(gradients(ddp), truth)

        average = loss.detach().clone()
        dist.all_reduce(average)
        average /= n  # the averaged gradient of DDP is the gradient of this loss
        if rank == 0:
            print(f"DDP with {loss_of.__name__}: loss {average.item():.4f}, ", end="")
            if loss_of is local_mean:
                print(f"gradient off by {100 * error.item():.1f}%")
            else:
                torch.testing.assert_close(average, true_loss.detach())
                print("gradient equal to one process")

    # two controls: micro-batches in place of the ranks, and equal numbers of tokens
    error = (mean_of_means(LENGTHS, n, device) - truth).norm() / truth.norm()
    equal = [30] * len(LENGTHS)
    if len(equal) % n == 0:
        for lengths in (LENGTHS, equal):
            one, several = (mean_of_means(lengths, parts, device) for parts in (1, n))
            same = torch.allclose(one, several, rtol=1e-4, atol=1e-6)
            assert same == (lengths is equal or n == 1)
    if rank == 0:
        print(f"one process, {n} micro-batches, local_mean: gradient off by {100 * error:.1f}%")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
