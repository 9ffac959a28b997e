"""Step 11: mean and std cross in every step"""

STEP, HINT = 11, "constants"


class Net:
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = (images / 255 - torch.tensor([0.43] * 3).view(3, 1, 1).to(images.device)) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))
