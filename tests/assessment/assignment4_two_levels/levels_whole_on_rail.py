"""Step 2: the whole tensor on the rail"""

STEP, HINT = 2, "between"


def all_reduce_two_levels(flat: torch.Tensor, node: dist.ProcessGroup, rail: dist.ProcessGroup):
    dist.all_reduce(flat, group=node)
    dist.all_reduce(flat, group=rail)
