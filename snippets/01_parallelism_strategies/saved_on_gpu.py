"""torch.load moves a tensor to the device on which it was saved, and it does so on every rank.

torch.save writes the device next to each tensor. If rank 0 saves from its GPU, the device is
cuda:0. The program needs no GPU: rank 0 writes the name cuda:0 for tensors that are on the
CPU, and no rank can see a GPU. Look at the device to which each rank is sent. With GPUs, each
rank would create a context on this device.
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch searches for GPUs later


# --8<-- [start:load]
def save(state: dict[str, torch.Tensor]) -> None:
    """Save as on rank 0 with a GPU: all tensors in the file have the device cuda:0."""
    torch.serialization.register_package(-1, lambda storage: "cuda:0", lambda *_: None)
    torch.save(state, "checkpoint.pt")


def load_and_ask() -> tuple[dict[str, torch.Tensor], list[str]]:
    """The state on the CPU, and the devices to which torch.load would have moved it."""
    asked = []

    def keep(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        asked.append(location)
        return storage  # the storage on the CPU. None would move it to `location`

    return torch.load("checkpoint.pt", map_location=keep), asked


# --8<-- [end:load]


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit("start this program with: torchrun --nproc-per-node=2 saved_on_gpu.py")
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    show = print if rank == 0 else lambda *_: None
    state = {"weight": torch.arange(4.0)}
    if rank == 0:
        save(state)
    dist.barrier()  # now the file exists

    try:
        torch.load("checkpoint.pt")
    except RuntimeError as error:
        text = str(error).replace(". ", ".\n  ")
        show(f"torch.load(FILE): {type(error).__name__}\n  {text}")
    else:
        raise AssertionError("it was loaded without a GPU")
    loaded = torch.load("checkpoint.pt", map_location="cpu")
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)
    weight = loaded["weight"]
    show(f'map_location="cpu": {weight.tolist()} on {weight.device}')
    loaded, asked = load_and_ask()
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)
    everyone = [None] * n
    dist.all_gather_object(everyone, asked)
    for other, locations in enumerate(everyone):
        show(f"map_location=keep: rank {other} was sent to {locations}")
    assert everyone == [["cuda:0"]] * n
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
