"""Step 6: each gradient has its own memory"""

import torch

STEP, HINT = 6, "not_views"


def make_buckets(parameters, bucket_bytes):
    groups, room = [], 0
    for parameter in reversed(parameters):
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
        buckets.append(Bucket(flat, {p: piece.view_as(p).clone() for p, piece in pieces}))  # noqa: F821
    return buckets
