"""Step 5: dequantized first"""

STEP, HINT = 5, "dequantized"


class Int8Linear:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, row_scale = quantize_rows(x)
        weight = self.weight.float() * self.scale
        return (rows.float() * row_scale) @ weight.t() + self.bias
