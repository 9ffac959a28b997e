"""Step 3: not pinned"""

# ruff: noqa: F821

STEP, HINT = 3, "loader_pageable"


def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    return DataLoader(
        data,
        BATCH,
        sampler=order(data),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
