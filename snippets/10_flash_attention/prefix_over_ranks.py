"""Context parallelism for linear attention sends states, whose size is the same for any length.

    torchrun --nproc-per-node=4 prefix_over_ranks.py

Each rank has a part of the sequence. A rank summarises its part in an update of the state: a
transition and an added state. Then each rank needs the state after all earlier parts. Finding
this state is an exclusive prefix scan over the ranks. The program does the scan in three ways:
as a chain, by doubling, and as an all-gather after which each rank combines the updates itself.
It compares the outputs with those of one process, and counts the bytes that each rank sends for
two sequence lengths. For comparison, it sends keys and values around a ring, as ring attention
does. The scans are only for the forward pass, because autograd does not record `send` and
`recv`.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F

LENGTHS, D = (96, 192), 16  # 1, 2, 3 and 4 ranks divide both lengths
count = {"bytes": 0}


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


def pass_on(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Give `tensors` to the next rank; return those of the rank before."""
    rank, n = dist.get_rank(), dist.get_world_size()
    arriving, ops = [torch.empty_like(x) for x in tensors], []
    for outgoing, incoming in zip(tensors, arriving, strict=True):
        ops.append(dist.P2POp(dist.isend, outgoing, (rank + 1) % n))
        ops.append(dist.P2POp(dist.irecv, incoming, (rank - 1) % n))
        count["bytes"] += outgoing.nbytes
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return arriving


# --8<-- [start:update]
def linear(q, k, v, log_decay, beta, state):
    """Linear attention with decay over a part of the sequence -> output, last state."""
    outputs = []
    for t in range(len(q)):
        state = log_decay[t].exp() * state + torch.outer(k[t], v[t])
        outputs.append(q[t] @ state)
    return torch.stack(outputs), state


def delta(q, k, v, log_decay, beta, state):
    """The gated delta rule over a part of the sequence -> output, last state."""
    outputs = []
    for t in range(len(q)):
        state = log_decay[t].exp() * state
        state = state + beta[t] * torch.outer(k[t], v[t] - k[t] @ state)
        outputs.append(q[t] @ state)
    return torch.stack(outputs), state


def summary(rule, q, k, v, log_decay, beta):
    """Return (transition, added): the part turns any state into transition @ state + added."""
    added = rule(q, k, v, log_decay, beta, torch.zeros_like(k.T @ v))[1]
    if rule is linear:  # the same factor for every entry: one number is enough
        return log_decay.sum().exp().reshape(1, 1), added
    identity = torch.eye(k.shape[1], device=k.device)
    return rule(q, k, torch.zeros_like(k), log_decay, beta, identity)[1], added


def apply(transition, state):
    return transition * state if transition.numel() == 1 else transition @ state


def join(earlier, later):
    """One update that has the same effect as two: first `earlier`, then `later`."""
    return apply(later[0], earlier[0]), apply(later[0], earlier[1]) + later[1]


# --8<-- [end:update]


# --8<-- [start:scans]
def chain(own):
    """Each rank waits for the state of the previous rank, then sends its own: n - 1 steps."""
    rank, n = dist.get_rank(), dist.get_world_size()
    state = torch.zeros_like(own[1])
    if rank > 0:
        dist.recv(state, rank - 1)
    if rank < n - 1:
        mine = apply(own[0], state) + own[1]
        dist.send(mine, rank + 1)
        count["bytes"] += mine.nbytes
    return state


def doubling(own):
    """Each round doubles the number of parts in an update. A last round shifts by one rank."""
    distance, n = 1, dist.get_world_size()
    while distance < n:
        before = exchange(own, distance)
        own = join(before, own) if before else own
        distance *= 2
    before = exchange(own, 1)
    return before[1] if before else torch.zeros_like(own[1])


def gather(own):
    """Each rank gets all updates through a ring and combines those of the earlier ranks."""
    rank, n = dist.get_rank(), dist.get_world_size()
    updates, block = {rank: own}, list(own)
    for step in range(1, n):
        block = pass_on(block)
        updates[(rank - step) % n] = tuple(block)
    state = torch.zeros_like(own[1])
    for earlier in range(rank):
        transition, added = updates[earlier]
        state = apply(transition, state) + added
    return state


# --8<-- [end:scans]


def exchange(own, distance):
    """Send `own` to rank + distance. Return the update of rank - distance, or None."""
    rank, n = dist.get_rank(), dist.get_world_size()
    before, ops = [torch.empty_like(x) for x in own], []
    for outgoing, incoming in zip(own, before, strict=True):
        if rank + distance < n:
            ops.append(dist.P2POp(dist.isend, outgoing.contiguous(), rank + distance))
            count["bytes"] += outgoing.nbytes
        if rank - distance >= 0:
            ops.append(dist.P2POp(dist.irecv, incoming, rank - distance))
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    return tuple(before) if rank - distance >= 0 else None


def ring(k, v):
    """What ring attention sends forward: each block of keys and values visits all ranks."""
    block = [k.contiguous(), v.contiguous()]
    for _ in range(dist.get_world_size() - 1):
        block = pass_on(block)


def most_bytes(device: torch.device) -> int:
    """The bytes that the busiest rank has sent since the last call."""
    total = torch.tensor(count["bytes"], device=device)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    count["bytes"] = 0
    return int(total)


def main() -> None:
    if 96 % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit("the number of ranks must divide 96 tokens")
    device = init_distributed()
    torch.set_num_threads(1)
    rank, n = dist.get_rank(), dist.get_world_size()
    sent, errors = {}, {}
    for length in LENGTHS:
        torch.manual_seed(0)
        q, k, v = torch.randn(3, length, D, device=device)
        k = F.normalize(k, dim=-1)
        log_decay = F.logsigmoid(torch.randn(length, device=device) + 4)
        beta = torch.rand(length, device=device)
        inputs, mine = (
            (q, k, v, log_decay, beta),
            slice(*(length // n * r for r in (rank, rank + 1))),
        )
        part = [x[mine] for x in inputs]
        for rule in (linear, delta):
            zero = torch.zeros(D, D, device=device)
            wanted = rule(*inputs, zero)[0][mine]
            before = rule(*(x[: mine.start] for x in inputs), zero)[1] if rank else zero
            own = summary(rule, *part)
            for scan in (chain, doubling, gather):
                state = scan(own)
                sent[rule.__name__, scan.__name__, length] = most_bytes(device)
                torch.testing.assert_close(state, before, rtol=1e-3, atol=1e-4)
            out = rule(*part, state)[0]
            torch.testing.assert_close(out, wanted, rtol=1e-3, atol=1e-4)
            added = [torch.empty_like(own[1]) for _ in range(n)]
            dist.all_gather(added, own[1].contiguous())
            # a wrong idea: the sum of the earlier states, without transitions
            wrong = rule(*part, sum(added[:rank], zero))[0]
            errors[rule.__name__] = float((wrong - wanted).norm() / wanted.norm())
        ring(k[mine], v[mine])
        sent["ring", length] = most_bytes(device)

    for rule, numbers in (("linear", D * D + 1), ("delta", 2 * D * D)):
        rounds = (n - 1).bit_length() + (n > 1)
        for length in LENGTHS:
            assert sent[rule, "chain", length] == 4 * D * D * (n > 1)
            assert sent[rule, "doubling", length] == 4 * numbers * rounds  # rank 0 always sends
            assert sent[rule, "gather", length] == 4 * numbers * (n - 1)
            assert sent["ring", length] == 4 * 2 * length * D * (n - 1) // n
        assert sent[rule, "doubling", 96] == sent[rule, "doubling", 192]
        assert (errors[rule] > 0.05) == (rank > 1)  # ranks 0 and 1 need no transition
    if rank == 0:
        print(f"{n} ranks, one head of {D}: bytes sent by the busiest rank")
        print(f"{'':28}{LENGTHS[0]:>5} tokens{LENGTHS[1]:>5} tokens")
        for key in sent:
            if key[-1] == LENGTHS[0]:
                name = " ".join(key[:-1])
                both = (sent[(*key[:-1], length)] for length in LENGTHS)
                print(f"{name:24}" + "".join(f"{value:>12,}" for value in both))
        print("outputs are equal to those of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
