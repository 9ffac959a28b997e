"""Step 3: pinned for the CPU, too"""

# ruff: noqa: F821

STEP, HINT = 3, "pinned_for_cpu"


def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    return DataLoader(
        data,
        BATCH,
        sampler=order(data),
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=True,
    )
