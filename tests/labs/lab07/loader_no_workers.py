"""Step 3: no workers"""

# ruff: noqa: F821

STEP, HINT = 3, "reads_itself"


def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    return DataLoader(
        data,
        BATCH,
        sampler=order(data),
        pin_memory=device.type != "cpu",
    )
