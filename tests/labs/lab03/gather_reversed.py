"""Step 4: the shards in another order"""

import torch.distributed as dist

STEP, HINT = 4, "gathered"


class Unit:
    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        dist.all_gather(list(self.whole.data.chunk(self.n))[::-1], self.shard.data)
