"""Six heads on four ranks: the error, and a check that raises a clearer one earlier.

The columns of q, k and v divide evenly: 6 heads of 16 are 96 columns, which is 24 for each of
four ranks. So cutting the weights raises no error. The view into heads fails in the forward
pass.
"""

import os
import sys

import torch
import torch.distributed as dist

B, S, HEAD = 2, 16, 16


def split_by_the_whole_model(q: torch.Tensor, heads: int) -> torch.Tensor:
    """The code for one device, unchanged: it reshapes for all heads."""
    return q.view(B, S, heads, HEAD)


def split_by_what_is_here(q: torch.Tensor, heads: int) -> torch.Tensor:
    """-1 instead of the number of heads: right if the rank has whole heads."""
    return q.view(B, S, -1, HEAD)


def split_after_a_check(q: torch.Tensor, heads: int) -> torch.Tensor:
    t = dist.get_world_size()
    if heads % t:
        possible = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ValueError(f"{heads} heads cannot be cut over t = {t}: choose t from {possible}")
    return q.view(B, S, heads // t, HEAD)


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
    device = init_distributed()
    rank, t = dist.get_rank(), dist.get_world_size()
    status = 0
    for heads in (8, 6):
        numbers = torch.arange(heads, device=device)  # every column has its head's number
        whole = numbers.repeat_interleave(HEAD).expand(B, S, -1)
        q = whole.tensor_split(t, dim=2)[rank].contiguous()  # [b, s, h/t]
        for split in (split_by_the_whole_model, split_by_what_is_here, split_after_a_check):
            try:
                mine = split(q, heads)  # [b, s, a/t, h/a]
                assert (mine == numbers.tensor_split(t)[rank][:, None]).all()  # whole heads
                result = f"{mine.shape[2]} heads on a rank"
            except (RuntimeError, ValueError) as error:
                result, status = f"{type(error).__name__}: {error}", 1
            dist.barrier()  # no rank has failed an assertion
            if rank == 0:
                print(f"{heads} heads, t = {t}, {split.__name__}\n  {result}", flush=True)
    dist.barrier()
    return status


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
