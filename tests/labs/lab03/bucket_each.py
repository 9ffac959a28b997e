"""Step 3: a reduce-scatter for every parameter"""

import torch
import torch.distributed as dist

STEP, HINT = 3, "each_parameter"


class Bucket:
    def ready(self, parameter):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        flat, _ = lay_out(grads, self.n)  # noqa: F821
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter(self.shard.grad, list(flat.chunk(self.n)))
        self.shard.grad /= self.n
