"""Step 1: pixels from 0 to 255, as from 0 to 1"""

STEP, HINT = 1, "first"


class Net:
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = (images.float() - self.mean) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))
