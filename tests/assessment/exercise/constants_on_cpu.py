"""Step 2: the mean is made on the CPU"""

STEP, HINT = 2, "elsewhere"


class Net:
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = (images / 255 - torch.full((3, 1, 1), 0.43)) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))
