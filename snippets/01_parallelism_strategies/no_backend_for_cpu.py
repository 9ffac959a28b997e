"""No backend type associated with device type cpu: the group has no backend for CPU tensors.

A process group has one backend for each type of device. `init_process_group("nccl")` creates a
group for CUDA tensors only, and a collective on a CPU tensor then fails. Without a GPU the
program makes the same kind of group with gloo: `"cuda:gloo"` is a group for CUDA tensors only.
It also tries `barrier`, which creates its own tensor.

    (no flag)      a group for CUDA tensors only
    --fix          a group with a backend for each of the two device types
    --second       the CPU tensors use a second group with gloo
"""

import argparse
import os
import sys

import torch
import torch.distributed as dist


def all_reduce_ranks(group: dist.ProcessGroup | None) -> float:
    """The sum of the numbers of all ranks, from an all-reduce of a tensor on the CPU."""
    number = torch.tensor(float(1 + dist.get_rank()))
    dist.all_reduce(number, group=group)
    return number.item()


def outcome(call, *arguments) -> str:
    """The result of the call, or the first line of its error."""
    try:
        return f"{call(*arguments)}"
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fix", action="store_true")
    parser.add_argument("--second", action="store_true")
    args = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_world
    for_cuda = "nccl" if gpus else "gloo"
    if gpus:
        torch.cuda.set_device(local_rank)

    # --8<-- [start:groups]
    backend = f"cpu:gloo,cuda:{for_cuda}" if args.fix else f"cuda:{for_cuda}"
    dist.init_process_group(backend)
    group = dist.new_group(backend="gloo") if args.second else None
    # --8<-- [end:groups]
    n = dist.get_world_size()
    result = outcome(all_reduce_ranks, group)
    done = outcome(dist.barrier, group)

    if dist.get_rank() == 0:
        second = ", and a second group with gloo" if args.second else ""
        print(f"init_process_group({backend!r}){second}")
        print(f"  all_reduce of a CPU tensor: {result}")
        print(f"  barrier: {'completed' if done == 'None' else done}")
    if args.fix or args.second:
        assert result == str(n * (n + 1) / 2) and done == "None"
    else:
        assert result == "RuntimeError: No backend type associated with device type cpu"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
