"""Step 4: a capture for each call"""

STEP, HINT = 4, "captures_each"


class Buckets:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        size = next((size for size in self.sizes if size >= rows), None)
        if size is None:
            return self.plain(x)
        graph = self.capture(size)
        graph.input[:rows].copy_(x)
        graph.replay()
        return graph.output[:rows].clone()
