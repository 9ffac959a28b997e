"""Two ranks that use two groups in a different order wait for each other: a deadlock.

Ranks 0 and 1 train, and each has one half of every layer. Rank 2 generates text and needs the
new weights. The halves are joined by an all-gather in the group of the trainers, and rank 0
broadcasts the whole layer in a second group, to which all three ranks belong. Rank 0 broadcasts
each layer as soon as it is gathered. Rank 1 first gathers all layers. So rank 1 waits for rank
0 in the all-gather of layer 1, and rank 0 waits for rank 1 in the broadcast of layer 0.

    (no flag)   ranks 0 and 1 belong to both groups: a deadlock, which ends with a time-out
    --apart     the second group has only ranks 0 and 2, and the same loops complete
    --fix       the second group has all three ranks, and the order is the same on every rank
"""

import argparse
import faulthandler
import os
import re
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

TRAINERS, LAYERS = (0, 1), 2
SIZE = 2**22  # elements of a layer, 16 MiB, too many for the buffers of NCCL


def layer(index: int) -> torch.Tensor:
    """The whole layer, [SIZE], which all ranks can compute to check what they received."""
    return torch.arange(SIZE) + 10_000.0 * index


class Weights:
    """Gathers and broadcasts the layers. Records the collectives that this rank has entered."""

    def __init__(self, receivers: list[int], in_vain: bool) -> None:
        self.entered: list[str] = []
        # the limit of rank 0 is shorter, so its error is a time-out, not a broken connection
        limit = timedelta(seconds=(3 if dist.get_rank() == 0 else 5) if in_vain else 60)
        # every rank creates both groups, member or not
        self.trainers = dist.new_group(list(TRAINERS), timeout=limit)
        self.transfer = dist.new_group(receivers, timeout=limit)
        self.receives = dist.get_rank() in receivers

    def gather(self, index: int) -> torch.Tensor:
        self.entered.append(f"all-gather {index}")
        half = layer(index).chunk(2)[dist.get_rank()].clone()
        halves = [torch.empty_like(half) for _ in TRAINERS]
        dist.all_gather(halves, half, group=self.trainers)
        return torch.cat(halves)

    def send(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        if self.receives:
            self.entered.append(f"broadcast {index}")
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

    def abort(self) -> None:
        """Abort the groups of this rank, because another rank may have aborted them.

        Since NCCL 2.31, no rank can destroy a group that another rank has aborted.
        """
        for group in (self.trainers, self.transfer):
            if isinstance(group, dist.ProcessGroup):  # this rank is a member
                group.abort()


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


def init_with_limits() -> torch.device:
    """Join the process group so that no wait is endless, also with NCCL. Return the device.

    With NCCL, a time-out raises an exception, as with gloo. TORCH_NCCL_BLOCKING_WAIT=0 restores
    the default of NCCL: a watchdog thread aborts the process. New tensors are on the device.
    """
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")  # a new group connects its ranks at once
    device = init_distributed()
    if device.type == "cuda":
        torch.set_default_device(device)
        # A call that blocks before its kernel starts has no timeout: print its line, and exit.
        faulthandler.dump_traceback_later(60, exit=True)
    return device


def reason(error: RuntimeError) -> str:
    """The first line of the message, without the prefix of gloo or NCCL in brackets."""
    message = re.sub(r"^\[[^]]*\] ", "", str(error).splitlines()[0])
    return re.sub(r"ran for (\d+)", r"ran for ≈\1", message)  # NCCL measures this time


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--fix", action="store_true")
    args = parser.parse_args()
    if os.environ.get("WORLD_SIZE") != "3":
        sys.exit("start this program with: torchrun --nproc-per-node=3 two_groups_order.py")
    # NCCL sends at most this number of bytes per channel before the other ranks receive.
    os.environ.setdefault("NCCL_BUFFSIZE", "32768")
    init_with_limits()  # the default group only collects the reports
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
        failed, report = True, f"waits in {weights.entered[-1]}"
        if rank == 0:
            report += f"\n  {type(error).__name__}: {reason(error)}"
    report = f"{', '.join(weights.entered)}: {report}"
    reports = [""] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if rank == 0:
        for number, line in enumerate(reports):
            print(f"rank {number}: {line}", flush=True)
    dist.barrier()
    weights.abort()
    dist.destroy_process_group()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
