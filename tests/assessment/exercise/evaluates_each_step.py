"""Step 23: evaluates again and again"""

STEP, HINT = 23, "slow"


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
        for indices in torch.tensor(order(len(labels), epoch), device=device).split(BATCH):
            loss = loss_of(model, images[indices], labels[indices])
            loss.backward()
            clip(parameters)
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(120):
                evaluate(model, *unseen)
            losses.append(loss.detach())
        validation.append(evaluate(model, *unseen))
    losses = torch.stack(losses).tolist()
    write_log(folder, losses)
    return losses, torch.stack(validation).tolist()
