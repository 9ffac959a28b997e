"""Step 2: the piece is added up in the node again"""

STEP, HINT = 2, "twice"


def all_reduce_two_levels(flat: torch.Tensor, node: dist.ProcessGroup, rail: dist.ProcessGroup):
    dist.all_reduce(flat, group=node)
    pieces = list(flat.chunk(dist.get_world_size(node)))
    for piece in pieces:
        dist.all_reduce(piece, group=node)
        dist.all_reduce(piece, group=rail)
