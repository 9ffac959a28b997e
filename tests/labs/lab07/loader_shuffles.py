"""Step 3: an order of its own"""

# ruff: noqa: F821

STEP, HINT = 3, "order"


def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    return DataLoader(
        data,
        BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type != "cpu",
    )
