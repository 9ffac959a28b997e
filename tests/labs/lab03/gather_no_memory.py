"""Step 4: gather into no memory"""

import torch.distributed as dist

STEP, HINT = 4, "storage"


class Unit:
    def gather(self):
        dist.all_gather(list(self.whole.data.chunk(self.n)), self.shard.data)
