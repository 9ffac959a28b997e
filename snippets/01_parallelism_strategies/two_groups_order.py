"""Two ranks that use two groups in a different order wait for each other: a deadlock.

Ranks 0 and 1 train, and each has one half of every layer. Rank 2 generates text and needs the
new weights. The halves are joined by an all-gather in the group of the trainers, and rank 0
broadcasts the whole layer in a second group, to which all three ranks belong. Rank 0 broadcasts
each layer as soon as it is gathered. Rank 1 first gathers all layers. At layer 1, rank 1 waits
for rank 0 in the first group, and rank 0 waits for rank 1 in the second group.

    (no flag)   ranks 0 and 1 belong to both groups: a deadlock, which ends with a time-out
    --apart     the second group has only ranks 0 and 2, and the same loops complete
    --fix       the second group has all three ranks, and the order is the same on every rank
"""

import argparse
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

TRAINERS, LAYERS, SIZE = (0, 1), 2, 1024  # SIZE is the number of elements of a layer


def layer(index: int) -> torch.Tensor:
    """The whole layer, [SIZE], which all ranks can compute to check what they received."""
    return torch.arange(SIZE) + 10_000.0 * index


class Weights:
    """Gathers and broadcasts the layers. Records the collective that this rank has entered."""

    def __init__(self, receivers: list[int], in_vain: bool) -> None:
        self.waits_in = "nothing"
        # the limit of rank 0 is shorter, so its error is a time-out, not a broken connection
        limit = timedelta(seconds=(3 if dist.get_rank() == 0 else 5) if in_vain else 60)
        # every rank creates both groups, member or not
        self.trainers = dist.new_group(list(TRAINERS), timeout=limit)
        self.transfer = dist.new_group(receivers, timeout=limit)
        self.receives = dist.get_rank() in receivers

    def gather(self, index: int) -> torch.Tensor:
        self.waits_in = f"the all-gather of layer {index}"
        half = layer(index).chunk(2)[dist.get_rank()].clone()
        halves = [torch.empty_like(half) for _ in TRAINERS]
        dist.all_gather(halves, half, group=self.trainers)
        return torch.cat(halves)

    def send(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        if self.receives:
            self.waits_in = f"the broadcast of layer {index}"
            dist.broadcast(whole, src=0, group=self.transfer)
        return whole

    def update(self, same_order: bool) -> list[torch.Tensor]:
        """Return all layers, on every rank."""
        rank = dist.get_rank()
        if rank not in TRAINERS:
            return [self.send(i, torch.empty(SIZE)) for i in range(LAYERS)]
        if rank == 0 or same_order:
            return [self.send(i, self.gather(i)) for i in range(LAYERS)]
        gathered = [self.gather(i) for i in range(LAYERS)]  # a different order from rank 0
        return [self.send(i, whole) for i, whole in enumerate(gathered)]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "3":
        sys.exit("start this program with: torchrun --nproc-per-node=3 two_groups_order.py")
    dist.init_process_group("gloo")  # the default group only collects the reports
    rank = dist.get_rank()
    receivers = [0, 2] if args.apart else [0, 1, 2]
    weights = Weights(receivers, in_vain=not (args.apart or args.fix))
    if args.fix:  # only the order differs from the deadlock, and not the members
        assert dist.get_process_group_ranks(weights.transfer) == [0, 1, 2]
    dist.barrier()

    report, failed = "has all layers", False
    try:
        received = weights.update(args.fix)
        torch.testing.assert_close(received, [layer(index) for index in range(LAYERS)])
    except RuntimeError as error:
        failed, report = True, f"waits in {weights.waits_in}"
        if rank == 0:
            report += f"\n  {type(error).__name__}: {str(error).split('] ')[-1]}"
    reports = [""] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if rank == 0:
        for number, line in enumerate(reports):
            print(f"rank {number}: {line}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
