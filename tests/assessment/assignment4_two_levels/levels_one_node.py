"""Step 2: nothing goes between the nodes"""

STEP, HINT = 2, "one_node"


def all_reduce_two_levels(flat: torch.Tensor, node: dist.ProcessGroup, rail: dist.ProcessGroup):
    dist.all_reduce(flat, group=node)
