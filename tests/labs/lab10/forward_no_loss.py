"""Step 6: self.loss stays 0"""

STEP, HINT = 6, "loss_not_added"


class Pipeline:
    def forward(self, k):
        grid = self.grid
        taken = self.inputs[k] if grid.first else self.receive(grid.stage - 1).requires_grad_()
        output = self.stage(taken)
        if grid.last:
            output = vocabulary_parallel_loss(output, self.targets[k], grid) / self.m  # noqa: F821
        else:
            self.send(output, grid.stage + 1)
        self.live[k] = taken, output
        self.peak = max(self.peak, len(self.live))
