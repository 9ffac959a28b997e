"""Step 2: all rows of the rank in one forward"""

import torch
import torch.distributed as dist

STEP, HINT = 2, "micro_size"


def train_step(engine, rows):
    ranks = dist.get_world_size()
    mine = rows.chunk(ranks)[dist.get_rank()]
    total = torch.zeros((), device=rows.device)
    for x in [mine]:
        loss = mean_loss(engine(x), x)  # noqa: F821
        engine.backward(loss)
        engine.step()
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    return total.item() / ranks
