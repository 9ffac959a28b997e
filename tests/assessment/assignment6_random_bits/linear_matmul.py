"""Step 5: integers, multiplied as floats"""

STEP, HINT = 5, "dequantized"


class Int8Linear:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, row_scale = quantize_rows(x)
        sums = torch.matmul(rows.float(), self.weight.float().t())
        return sums * row_scale * self.scale.t() + self.bias
