"""Step 2: only lengths that are multiples"""

STEP, HINT = 2, "not_padded"


def all_reduce_two_levels(flat: torch.Tensor, node: dist.ProcessGroup, rail: dist.ProcessGroup):
    piece = flat.new_empty(len(flat) // dist.get_world_size(node))
    dist.reduce_scatter_tensor(piece, flat.clone(), group=node)
    dist.all_reduce(piece, group=rail)
    dist.all_gather_into_tensor(flat, piece, group=node)
