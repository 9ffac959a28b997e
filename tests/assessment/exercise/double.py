"""Step 7: a model in float64"""

STEP, HINT = 7, "float64"


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
        self.double()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = (images.double() / 255 - self.mean) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))
