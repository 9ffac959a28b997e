"""Step 2: a pinned buffer is filled again before its copy"""

STEP, HINT = 2, "device_curve"


def train(folder: Path, device: torch.device, epochs: int) -> tuple[list[float], list[float]]:
    """Train on what `write_data` wrote; losses of all steps, validation losses of all epochs.

    Writes log.csv, a line "step,loss" for each step.
    """
    _, labels = read(folder / "train.pt", device)
    unseen = read(folder / "validation.pt", device)
    held = torch.empty(BATCH, 16, 16, 3, dtype=torch.uint8)
    held = held if device.type == "cpu" else held.pin_memory()
    kept = torch.load(folder / "train.pt")["images"]
    torch.manual_seed(0)
    model = Net().to(device, memory_format=torch.channels_last)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)

    losses, validation = [], []
    for epoch in range(epochs):
        numbers = torch.tensor(order(len(labels), epoch))
        pairs = zip(numbers.split(BATCH), labels[numbers.to(device)].split(BATCH), strict=True)
        for indices, y in pairs:
            held.copy_(kept[indices])
            x = held.to(device, non_blocking=True).permute(0, 3, 1, 2)
            loss = loss_of(model, x, y)
            loss.backward()
            clip(parameters)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        validation.append(evaluate(model, *unseen))
    losses = torch.stack(losses).tolist()
    write_log(folder, losses)
    return losses, torch.stack(validation).tolist()
