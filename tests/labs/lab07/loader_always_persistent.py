"""Step 3: persistent without workers"""

# ruff: noqa: F821

STEP, HINT = 3, "zero_workers"


def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    return DataLoader(
        data,
        BATCH,
        sampler=order(data),
        num_workers=workers,
        persistent_workers=True,
        pin_memory=device.type != "cpu",
    )
