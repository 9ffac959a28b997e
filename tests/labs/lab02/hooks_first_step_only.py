"""Step 5: finish does not let the next step begin"""

import torch.distributed as dist

STEP, HINT = 5, "first_step_only"


class HookDDP:
    def start(self, parameter):
        if len(self.started) < len([p for p in self.module.parameters() if p.requires_grad]):
            self.started.append((parameter, dist.all_reduce(parameter.grad, async_op=True)))

    def finish(self):
        for parameter, work in self.started:
            if not getattr(work, "seen", False):
                work.seen = True
                work.wait()
                parameter.grad /= dist.get_world_size()
