"""Step 3: no workers"""

STEP, HINT = 3, "reads_itself"


def make_loader(data: Dataset, workers: int, device: torch.device) -> DataLoader:
    return DataLoader(
        data,
        BATCH,
        sampler=order(data),
        pin_memory=device.type != "cpu",
    )
