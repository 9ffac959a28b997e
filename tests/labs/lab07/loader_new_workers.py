"""Step 3: new workers in each epoch"""

# ruff: noqa: F821

STEP, HINT = 3, "workers_end"


def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    return DataLoader(
        data,
        BATCH,
        sampler=order(data),
        num_workers=workers,
        pin_memory=device.type != "cpu",
    )
