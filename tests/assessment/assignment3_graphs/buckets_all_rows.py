"""Step 4: the rows of the bucket"""

STEP, HINT = 4, "rows"


class Buckets:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = len(x)
        size = next((size for size in self.sizes if size >= rows), None)
        if size is None:
            return self.plain(x)
        graph = self.graphs.setdefault(size, None) or self.capture(size)
        self.graphs[size] = graph
        graph.input[:rows].copy_(x)
        graph.replay()
        return graph.output.clone()
