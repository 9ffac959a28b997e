"""Step 5: the weight's scale is left out"""

STEP, HINT = 5, "scales"


class Int8Linear:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, row_scale = quantize_rows(x)
        sums = rows.int() @ self.weight.int().t()
        return sums.float() * row_scale + self.bias
