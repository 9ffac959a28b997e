"""Step 20: an attribute that changes"""

STEP, HINT = 20, "recompiles"


class Net:
    def __init__(self, width: int = 32):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 3, padding=1) for channels in (3, width, width)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.43))
        self.register_buffer("std", torch.full((3, 1, 1), 0.16))
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = (images / 255 - self.mean) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))


def train(folder: Path, device: torch.device, epochs: int) -> tuple[list[float], list[float]]:
    """Train on what `write_data` wrote; losses of all steps, validation losses of all epochs.

    Writes log.csv, a line "step,loss" for each step.
    """
    images, labels = read(folder / "train.pt", device)
    unseen = read(folder / "validation.pt", device)
    torch.manual_seed(0)
    model = Net().to(device, memory_format=torch.channels_last)
    compiled = torch.compile(model, backend=lambda graph, _: graph.forward)
    parameters = list(model.parameters())
    optimizer = make_optimizer(parameters)

    losses, validation = [], []
    for epoch in range(epochs):
        for indices in torch.tensor(order(len(labels), epoch), device=device).split(BATCH):
            loss = loss_of(compiled, images[indices], labels[indices])
            loss.backward()
            clip(parameters)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        validation.append(evaluate(compiled, *unseen))
    losses = torch.stack(losses).tolist()
    write_log(folder, losses)
    return losses, torch.stack(validation).tolist()
