"""torch.load takes a tensor back to the device on which it was saved, on every rank.

torch.save writes that device beside each tensor: cuda:0, if rank 0 saved it from its GPU. No
GPU is needed to see what follows: rank 0 writes that name here for tensors on the CPU, and no
rank sees a GPU. Look for the device that each rank is sent to; with GPUs each would make a
context there.
"""

import os
import sys

import torch
import torch.distributed as dist

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # torch asks for GPUs later than this


# --8<-- [start:load]
def save(state: dict[str, torch.Tensor]) -> None:
    """What rank 0 of a run on GPUs saves: the file says that all of it was on cuda:0."""
    torch.serialization.register_package(-1, lambda storage: "cuda:0", lambda *_: None)
    torch.save(state, "checkpoint.pt")


def load_and_ask() -> tuple[dict[str, torch.Tensor], list[str]]:
    """The state, on the CPU, and the devices to which torch.load would have taken it."""
    asked = []

    def keep(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        asked.append(location)
        return storage  # which is on the CPU still; None would mean: go on to `location`

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
    dist.barrier()  # the file is there

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
