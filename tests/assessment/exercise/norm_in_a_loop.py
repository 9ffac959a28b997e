"""Step 14: a loop over groups"""

STEP, HINT = 14, "launches"


class Net:
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = (images / 255 - self.mean) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            parts = []
            for part in convolution(x).chunk(4, dim=1):
                mean = part.mean((1, 2, 3), keepdim=True)
                variance = ((part - mean) ** 2).mean((1, 2, 3), keepdim=True)
                parts.append((part - mean) / torch.sqrt(variance + 1e-5))
            x = torch.cat(parts, dim=1) * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
            x = F.max_pool2d(F.relu(x), 2)
        return self.head(x.mean((2, 3)))
