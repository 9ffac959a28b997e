"""Step 7: captures the first call"""

# ruff: noqa: F821

STEP, HINT = 7, "no_warm_up"


class Replayed:
    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.graph is None:
            self.x, self.y = x.clone(), y.clone()
            self.graph, capture = new_graph(x.device)
            with capture(self.graph):
                self.step(self.x, self.y)
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
