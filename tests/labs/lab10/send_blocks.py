"""Step 7: sends that wait: right in GPipe, stuck in 1F1B"""

import torch.distributed as dist

STEP, HINT = 7, "blocking_send"


class Pipeline:
    def send(self, tensor, to):
        dist.send(tensor.detach().contiguous(), group=self.group_to(to), group_dst=to)
