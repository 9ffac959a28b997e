"""Step 5: the Works of earlier steps are kept"""

import torch.distributed as dist

STEP, HINT = 5, "not_forgotten"


class HookDDP:
    def finish(self):
        for parameter, work in self.started:
            work.wait()
            parameter.grad /= dist.get_world_size()
