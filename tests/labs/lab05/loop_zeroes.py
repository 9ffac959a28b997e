"""Step 2: gradients are zeroed before each backward"""

import torch
import torch.distributed as dist

STEP, HINT = 2, "own_work"


def train_step(engine, rows):
    ranks = dist.get_world_size()
    mine = rows.chunk(ranks)[dist.get_rank()]
    total = torch.zeros((), device=rows.device)
    for x in mine.split(engine.train_micro_batch_size_per_gpu()):
        loss = mean_loss(engine(x), x)  # noqa: F821
        engine.zero_grad()
        engine.backward(loss)
        engine.step()
        total += loss.detach() / engine.gradient_accumulation_steps()
    dist.all_reduce(total)
    return total.item() / ranks
