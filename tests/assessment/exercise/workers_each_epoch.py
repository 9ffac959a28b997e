"""Step 5: a loader with workers for every epoch"""

STEP, HINT = 5, "workers"


def train(folder: Path, device: torch.device, epochs: int) -> tuple[list[float], list[float]]:
    """Train on what `write_data` wrote; losses of all steps, validation losses of all epochs.

    Writes log.csv, a line "step,loss" for each step.
    """
    images, labels = read(folder / "train.pt", device)
    unseen = read(folder / "validation.pt", device)
    torch.manual_seed(0)
    model = Net().to(device, memory_format=torch.channels_last)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)

    losses, validation = [], []
    for epoch in range(epochs):
        source = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(images.cpu(), labels.cpu()),
            batch_size=BATCH,
            sampler=order(len(labels), epoch),
            num_workers=1,
        )
        for x, y in source:
            x, y = x.to(device), y.to(device)
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
