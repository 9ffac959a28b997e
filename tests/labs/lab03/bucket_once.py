"""Step 3: the count does not start again"""

import torch
import torch.distributed as dist

STEP, HINT = 3, "restart"


class Bucket:
    def ready(self, parameter):
        self.missing -= 1
        if self.missing:
            return
        flat, _ = lay_out([p.grad for p in self.parameters], self.n)  # noqa: F821
        for p in self.parameters:
            p.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(flat.chunk(self.n)))
        self.shard.grad /= self.n
