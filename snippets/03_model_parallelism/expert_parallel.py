"""Expert parallelism: all-to-alls send tokens to the ranks of their experts and back.

Each rank has e/n experts and its own tokens. The steps are: route, sort the choices by expert,
tell every rank how many tokens it will get for each of its experts, send them with an
all-to-all of uneven parts, compute, send the results back, and add them with their weights.
Autograd runs both all-to-alls in reverse. Output and all gradients are compared with those of
one process that has all experts and all tokens.
"""

import math
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn import functional as F

TOKENS, H, EXPERTS, K = 120, 32, 12, 2  # tokens of one rank; 1, 2, 3 and 4 ranks divide EXPERTS
KIB = 1024
sent = 0  # bytes of tokens that left this rank


class AllToAll(torch.autograd.Function):
    """Send rows to each rank by `send` counts and receive by `receive` counts."""

    @staticmethod
    def forward(ctx, rows, send, receive):
        global sent
        ctx.send, ctx.receive = send, receive
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        elsewhere = sum(send) - send[dist.get_rank()]
        sent += elsewhere * rows.shape[1] * rows.element_size()
        return out

    @staticmethod
    def backward(ctx, gradient):
        return AllToAll.apply(gradient, ctx.receive, ctx.send), None, None


def make_expert() -> nn.Module:
    return nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H))


def route(router: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts, both [tokens, k]."""
    weights, chosen = F.softmax(router(x), dim=-1).topk(K, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


def one_process(router, experts, x: torch.Tensor) -> torch.Tensor:
    """Every expert computes every token. Experts that were not chosen have weight zero."""
    logits = router(x)  # a softmax over the chosen experts only
    others = logits < logits.topk(K, dim=-1).values[:, -1:]
    gate = logits.masked_fill(others, -math.inf).softmax(dim=-1)
    return sum(gate[:, i, None] * expert(x) for i, expert in enumerate(experts))


def expert_parallel(router, local_experts, x: torch.Tensor) -> torch.Tensor:
    """x and the result: [tokens of this rank, h]; `local_experts` are e/n of them."""
    n = dist.get_world_size()
    weights, chosen = route(router, x)
    expert_of = chosen.flatten()  # [tokens · k]
    order = expert_of.argsort(stable=True)  # by expert, and therefore by rank
    outgoing = x[order // K]  # [tokens · k, h]

    # counts first: row j has the tokens for rank j's experts, then those of all ranks
    to_experts = expert_of.bincount(minlength=EXPERTS).view(n, -1)  # [n, e/n]
    from_ranks = torch.empty_like(to_experts)
    dist.all_to_all_single(from_ranks, to_experts)
    send, receive = to_experts.sum(1).tolist(), from_ranks.sum(1).tolist()

    dispatched = AllToAll.apply(outgoing, send, receive)
    # rows arrive by source rank, then by expert, but an expert needs its rows together
    expert_of_row = torch.arange(len(local_experts), device=x.device).repeat(n)
    expert_of_row = expert_of_row.repeat_interleave(from_ranks.flatten())
    by_expert = expert_of_row.argsort(stable=True)
    batches = dispatched[by_expert].split(from_ranks.sum(0).tolist())
    results = [expert(rows) for expert, rows in zip(local_experts, batches, strict=True)]
    results = torch.cat(results)[by_expert.argsort()]  # in the order of arrival again

    combined = AllToAll.apply(results, receive, send)
    weighted = combined * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, order // K, weighted)


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


def main() -> None:
    global sent
    if EXPERTS % int(os.environ.get("WORLD_SIZE", "1")):
        sys.exit(f"the number of ranks must divide {EXPERTS} experts")
    device = init_distributed()
    rank, n = dist.get_rank(), dist.get_world_size()

    # the same on every rank: the reference needs all of it, a rank needs a part
    torch.manual_seed(0)
    router = nn.Linear(H, EXPERTS, bias=False).to(device)
    experts = nn.ModuleList(make_expert() for _ in range(EXPERTS)).to(device)
    tokens = torch.randn(n * TOKENS, H).to(device).requires_grad_()
    truth = one_process(router, experts, tokens)
    truth.square().sum().backward()
    want_router = router.weight.grad.clone()
    want_experts = [p.grad.clone() for p in experts.parameters()]
    router.zero_grad(), experts.zero_grad()

    here = slice(rank * EXPERTS // n, (rank + 1) * EXPERTS // n)
    x = tokens.detach().chunk(n)[rank].clone().requires_grad_()
    out = expert_parallel(router, experts[here], x)
    forward, sent = sent, 0
    out.square().sum().backward()
    dist.all_reduce(router.weight.grad)  # the router is data parallel, the experts are not

    torch.testing.assert_close(out, truth.chunk(n)[rank], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad, tokens.grad.chunk(n)[rank], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(router.weight.grad, want_router, rtol=1e-4, atol=1e-4)
    per_expert = len(list(experts[0].parameters()))
    for i, parameter in enumerate(experts.parameters()):
        if here.start <= i // per_expert < here.stop:
            torch.testing.assert_close(parameter.grad, want_experts[i], rtol=1e-4, atol=1e-4)
        else:
            assert parameter.grad is None  # an expert of a different rank

    # a choice sends a row each way if its token or its expert, but not both, is on this rank
    expert_rank = router(tokens).topk(K).indices // (EXPERTS // n)  # [tokens of all ranks, k]
    token_rank = torch.arange(n, device=device).repeat_interleave(TOKENS)[:, None]
    rows = ((expert_rank == rank) != (token_rank == rank)).sum().item()
    assert forward == sent == rows * H * 4
    everyone: list = [None] * n
    dist.all_gather_object(everyone, (forward, sent))
    if rank == 0:
        theory = 2 * (n - 1) / n * K * TOKENS * H * 4
        print(f"{n} ranks, {EXPERTS // n} of {EXPERTS} experts on each: output and gradients")
        print("of tokens, router and experts equal one process")
        print(f"bytes if routing were even: 2(n-1)/n · k·b·s·h · 4 = {theory / KIB:.1f} KiB")
        for r, (first, second) in enumerate(everyone):
            print(f"  rank {r}: forward {first / KIB:.1f} KiB, backward {second / KIB:.1f} KiB")
        mean = sum(first for first, _ in everyone) / n
        if n > 1:
            print(f"  mean {mean / KIB:.1f} KiB, {mean / theory - 1:+.1%} from even")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
