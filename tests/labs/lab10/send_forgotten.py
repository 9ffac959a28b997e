"""Step 6: isend and nothing kept"""

import torch.distributed as dist

STEP, HINT = 6, "not_kept"


class Pipeline:
    def send(self, tensor, to):
        dist.isend(tensor.detach().contiguous(), group=self.group_to(to), group_dst=to)
