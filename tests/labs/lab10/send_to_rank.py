"""Step 6: the stage is taken for a rank of the whole run"""

import torch.distributed as dist

STEP, HINT = 6, "group_rank"


class Pipeline:
    def send(self, tensor, to):
        tensor = tensor.detach().contiguous()
        work = dist.isend(tensor, dst=to, group=self.group_to(to))
        self.sends.append((work, tensor))
