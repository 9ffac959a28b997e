"""Step 6: micro-batches stay live after their backward"""

STEP, HINT = 6, "not_forgotten"


class Pipeline:
    def backward(self, k):
        taken, output = self.live[k]
        if self.grid.last:
            output.backward()
        else:
            output.backward(self.receive(self.grid.stage + 1))
        if not self.grid.first:
            self.send(taken.grad, self.grid.stage - 1)
