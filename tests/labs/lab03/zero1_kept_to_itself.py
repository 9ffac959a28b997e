"""Step 2: no all-gather"""

import torch
import torch.distributed as dist

STEP, HINT = 2, "not_passed_round"


class ZeRO1:
    def step(self):
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(self.gradient.chunk(self.n)))
        self.shard.grad /= self.n
        self.adam.step()
        self.shard.grad = None
        self.gradient.zero_()
