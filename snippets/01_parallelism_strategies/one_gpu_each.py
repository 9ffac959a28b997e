"""Six ways in which a rank chooses its GPU, and the error of CUDA or NCCL that each one causes.

The program simulates two nodes with four GPUs each. When NCCL creates a communicator, it
compares the host and the bus number of every two ranks, and rejects two ranks on one GPU. The
"CUDA device" in its message is this bus number in hexadecimal, and not an index: nvidia-smi
shows 1b000 as 1B:00.0.
"""

from collections.abc import Callable

NODES = 2
BUSES = (0x1B000, 0x43000, 0x52000, 0x9D000)  # bus numbers of the GPUs of a node
Habit = Callable[[int, int], int]


def first_fault(index_of: Habit, visible: Callable[[int], tuple[int, ...]], ranks: int) -> str:
    """The first error if each node starts `ranks` ranks, or an empty text if there is no error.

    `index_of` returns the index that a rank sets, from its rank and its local rank. `visible`
    returns the GPUs that CUDA_VISIBLE_DEVICES shows to a local rank. CUDA numbers them from 0.
    """
    taken: dict[tuple[int, int], int] = {}
    for rank in range(NODES * ranks):
        node, local_rank = divmod(rank, ranks)
        gpus, index = visible(local_rank), index_of(rank, local_rank)
        if index >= len(gpus):
            return f"rank {rank}: CUDA error: invalid device ordinal"
        gpu = node, BUSES[gpus[index]]
        if gpu in taken:
            both = f"rank {rank} and rank {taken[gpu]} both on CUDA device {gpu[1]:x}"
            return f"Duplicate GPU detected : {both}"
        taken[gpu] = rank
    return ""


def main() -> None:
    def every(local_rank: int) -> tuple[int, ...]:
        return tuple(range(len(BUSES)))

    def own(local_rank: int) -> tuple[int, ...]:
        return (local_rank,)

    habits = {
        "no device is set": (lambda rank, local_rank: 0, every, 4),
        "index = rank": (lambda rank, local_rank: rank, every, 4),
        "index = local rank": (lambda rank, local_rank: local_rank, every, 4),
        "index = local rank, one GPU visible to each": (
            lambda rank, local_rank: local_rank,
            own,
            4,
        ),
        "index = 0, one GPU visible to each": (lambda rank, local_rank: 0, own, 4),
        "index = local rank % 4, eight ranks on a node": (
            lambda rank, local_rank: local_rank % 4,
            every,
            8,
        ),
    }
    good = []
    for name, (index_of, visible, ranks) in habits.items():
        fault = first_fault(index_of, visible, ranks)
        print(f"{name}:\n    {fault or 'each rank has a GPU of its own'}")
        good += [name] if not fault else []
    assert good == ["index = local rank", "index = 0, one GPU visible to each"]


if __name__ == "__main__":
    main()
