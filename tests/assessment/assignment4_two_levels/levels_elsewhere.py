"""Step 2: the sum goes into another tensor"""

STEP, HINT = 2, "in_place"


def all_reduce_two_levels(flat: torch.Tensor, node: dist.ProcessGroup, rail: dist.ProcessGroup):
    local = dist.get_world_size(node)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % local)).clone()
    piece = padded.new_empty(len(padded) // local)
    dist.reduce_scatter_tensor(piece, padded, group=node)
    dist.all_reduce(piece, group=rail)
    dist.all_gather_into_tensor(padded, piece, group=node)
    flat = padded[: len(flat)]
