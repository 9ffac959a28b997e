"""Step 16: channels first"""

STEP, HINT = 16, "format"


def read(path: Path, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 3, 16, 16] and labels [n] of a file, on the device: bytes, read once.

    The file has the channels last, as decoders of images give them. Seen with the channels
    first, not a byte moves, and the convolutions get the memory format they are fastest with.
    """
    data = torch.load(path)
    return data["images"].to(device).permute(0, 3, 1, 2).contiguous(), data["labels"].to(device)


def train(folder: Path, device: torch.device, epochs: int) -> tuple[list[float], list[float]]:
    """Train on what `write_data` wrote; losses of all steps, validation losses of all epochs.

    Writes log.csv, a line "step,loss" for each step.
    """
    images, labels = read(folder / "train.pt", device)
    unseen = read(folder / "validation.pt", device)
    torch.manual_seed(0)
    model = Net().to(device)
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
            losses.append(loss.detach())
        validation.append(evaluate(model, *unseen))
    losses = torch.stack(losses).tolist()
    write_log(folder, losses)
    return losses, torch.stack(validation).tolist()
