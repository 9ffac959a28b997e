"""Step 4: a full bucket is too small"""

STEP, HINT = 4, "bucket"


class Buckets:
    def __call__(self, x):
        size = min((s for s in self.sizes if s > len(x)), default=None)
        if size is None:
            return self.plain(x)
        if size not in self.graphs:
            self.graphs[size] = self.capture(size)
        g = self.graphs[size]
        g.input[: len(x)].copy_(x)
        g.replay()
        return g.output[: len(x)].clone()
