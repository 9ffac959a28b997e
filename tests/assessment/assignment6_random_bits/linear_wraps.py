"""Step 5: sums of int8"""

STEP, HINT = 5, "int8_sums"


class Int8Linear:
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, row_scale = quantize_rows(x)
        sums = (rows @ self.weight.t()).float()
        return sums * row_scale * self.scale.t() + self.bias
