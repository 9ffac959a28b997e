"""Step 4: the mean gets the name of the weight"""

STEP, HINT = 4, "never"


class LocalSGD:
    def average(self):
        ps = [p for g in self.optimizer.param_groups for p in g["params"]]
        flat = torch.cat([p.flatten() for p in ps])
        dist.all_reduce(flat)
        flat = flat / dist.get_world_size()
        i = 0
        for p in ps:
            p = flat[i : i + p.numel()].view_as(p)
            i += p.numel()
