"""Step 7: the captured batch is lost"""

# ruff: noqa: F821

STEP, HINT = 7, "not_replayed"


class Replayed:
    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        if self.warm > 0:
            self.warm -= 1
            self.step(x, y)
            return
        if self.graph is None:
            self.x, self.y = x.clone(), y.clone()
            self.graph, capture = new_graph(x.device)
            with capture(self.graph):
                self.step(self.x, self.y)
            return
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
