"""Step 7: no clipping"""

import torch
import torch.distributed as dist

STEP, HINT = 7, "fsdp_clip"


def fsdp_step(model, optimizer, rows, micro):
    mine = rows.chunk(dist.get_world_size())[dist.get_rank()].split(micro)
    total = torch.zeros((), device=rows.device)
    for x in mine:
        loss = mean_loss(model(x), x) / len(mine)  # noqa: F821
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
