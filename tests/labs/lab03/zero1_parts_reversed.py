"""Step 2: the parts go to other ranks"""

import torch
import torch.distributed as dist

STEP, HINT = 2, "wrong_part"


class ZeRO1:
    def step(self):
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(self.gradient.chunk(self.n))[::-1])
        self.shard.grad /= self.n
        self.adam.step()
        dist.all_gather(list(self.flat.chunk(self.n)), self.shard.detach())
        self.shard.grad = None
        self.gradient.zero_()
