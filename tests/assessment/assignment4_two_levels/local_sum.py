"""Step 4: the sum of the weights"""

STEP, HINT = 4, "sum"


class LocalSGD:
    @torch.no_grad()
    def average(self) -> None:
        weights = [p for group in self.optimizer.param_groups for p in group["params"]]
        flat = torch.cat([p.reshape(-1) for p in weights])
        dist.all_reduce(flat)
        for p, mean in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
            p.copy_(mean.view_as(p))
