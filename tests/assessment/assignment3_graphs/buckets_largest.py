"""Step 4: always the largest bucket"""

STEP, HINT = 4, "bucket"


class Buckets:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows, size = len(x), self.sizes[-1]
        if rows > size:
            return self.plain(x)
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
        graph = self.graphs[size]
        graph.input[:rows].copy_(x)
        graph.replay()
        return graph.output[:rows].clone()
