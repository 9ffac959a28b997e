"""Step 4: one collective for each parameter"""

STEP, HINT = 4, "one_by_one"


class LocalSGD:
    @torch.no_grad()
    def average(self) -> None:
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                dist.all_reduce(p.data)
                p /= dist.get_world_size()
