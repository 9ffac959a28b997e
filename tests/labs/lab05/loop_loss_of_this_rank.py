"""Step 2: the loss is not reduced"""

import torch
import torch.distributed as dist

STEP, HINT = 2, "loss_local"


def train_step(engine, rows):
    ranks = dist.get_world_size()
    mine = rows.chunk(ranks)[dist.get_rank()]
    total = torch.zeros((), device=rows.device)
    for x in mine.split(engine.train_micro_batch_size_per_gpu()):
        loss = mean_loss(engine(x), x)  # noqa: F821
        engine.backward(loss)
        engine.step()
        total += loss.detach() / engine.gradient_accumulation_steps()
    return total.item()
