"""Step 4: no bucket for many rows"""

STEP, HINT = 4, "too_large"


class Buckets:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        size = next(size for size in self.sizes if size >= rows)
        graph = self.graphs.setdefault(size, None) or self.capture(size)
        self.graphs[size] = graph
        graph.input[:rows].copy_(x)
        graph.replay()
        return graph.output[:rows].clone()
