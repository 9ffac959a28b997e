"""Tied embeddings at both ends of a pipeline become two copies that drift apart.

The embedding on the first stage and the output projection on the last stage are one matrix in
the unsplit model, and its gradient is the sum of both uses. In a pipeline, each stage has a
copy and gets only the gradient of its own use.

    (no flag)   each stage steps with its own gradient
    --fix      all-reduce of the gradient over the two stages before the step
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # not left to torch: imported after init, it keeps the group alive
from torch import nn
from torch.nn.functional import cross_entropy, embedding

WORDS, HIDDEN, BATCH, STEPS = 50, 16, 32, 5


def split_backward(table: torch.Tensor, layer: nn.Module, tokens, target) -> None:
    """Rank 0 embeds, rank 1 applies `layer` and projects with its own copy of the table."""
    if dist.get_rank() == 0:
        x = embedding(tokens, table)  # [b, h]
        dist.send(x.detach(), 1)
        grad = torch.empty_like(x)
        dist.recv(grad, 1)
        x.backward(grad)
    else:
        x = torch.empty(BATCH, HIDDEN)
        dist.recv(x, 0)
        x.requires_grad_()
        cross_entropy(layer(x) @ table.T, target).backward()
        dist.send(x.grad, 0)


def main() -> int:
    if os.environ.get("WORLD_SIZE") != "2":
        sys.exit("start with 2 ranks: torchrun --nproc-per-node=2 tied_embeddings.py")
    dist.init_process_group("gloo")
    rank, fix = dist.get_rank(), "--fix" in sys.argv
    torch.manual_seed(0)  # the same table, layer and tokens on both ranks
    table = nn.Parameter(torch.randn(WORDS, HIDDEN))
    layer = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    tokens, target = torch.randint(WORDS, (2, BATCH))
    true_table = nn.Parameter(table.detach().clone())  # the unsplit model, on both ranks
    true_layer = copy.deepcopy(layer)
    first, last = (nn.Parameter(table.detach().clone()) for _ in range(2))  # without the tie
    untied_layer = copy.deepcopy(layer)

    ours = torch.optim.SGD([table, *layer.parameters()], lr=1.0)
    true = torch.optim.SGD([true_table, *true_layer.parameters()], lr=1.0)
    untied = torch.optim.SGD([first, last, *untied_layer.parameters()], lr=1.0)
    for step in range(STEPS):
        ours.zero_grad()
        true.zero_grad()
        untied.zero_grad()
        split_backward(table, layer, tokens, target)
        if fix:
            dist.all_reduce(table.grad)  # with more stages: a group of the first and the last
        output = true_layer(embedding(tokens, true_table)) @ true_table.T
        cross_entropy(output, target).backward()
        output = untied_layer(embedding(tokens, first)) @ last.T
        cross_entropy(output, target).backward()
        if step == 0:  # a copy lacks exactly the gradient of the other use
            total = table.grad.clone()
            if not fix:
                dist.all_reduce(total)
            torch.testing.assert_close(total, true_table.grad)
        ours.step()
        true.step()
        untied.step()

    if not fix:  # the ranks have trained a model without the tie
        torch.testing.assert_close(table, (first, last)[rank])

    copies = [torch.empty_like(table) for _ in range(2)]
    dist.all_gather(copies, table.detach())
    equal = torch.equal(*copies)
    right = torch.allclose(table, true_table, rtol=0, atol=1e-5)
    if rank == 0:
        print(f"after {STEPS} steps the two copies are equal: {equal}", flush=True)
        print(f"equal to the unsplit model's: {right}", flush=True)
    dist.barrier()
    return int(not (equal and right))


if __name__ == "__main__":
    status = main()
    dist.destroy_process_group()
    sys.exit(status)
