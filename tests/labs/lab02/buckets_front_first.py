"""Step 6: the first parameters in the first bucket"""

import torch

STEP, HINT = 6, "fill_order"


def make_buckets(parameters, bucket_bytes):
    groups, room = [], 0
    for parameter in parameters:
        size = parameter.nbytes
        if not groups or size > room:
            groups.append([])
            room = bucket_bytes
        groups[-1].append(parameter)
        room -= size
    buckets = []
    for group in groups:
        sizes = [parameter.numel() for parameter in group]
        flat = torch.zeros(sum(sizes))
        pieces = zip(group, flat.split(sizes), strict=True)
        buckets.append(Bucket(flat, {p: piece.view_as(p) for p, piece in pieces}))  # noqa: F821
    return buckets
