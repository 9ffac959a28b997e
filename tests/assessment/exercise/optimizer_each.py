"""Step 15: an optimizer for each parameter"""

STEP, HINT = 15, "optimizer"


def make_optimizer(parameters: list[nn.Parameter]):
    class Each:
        def __init__(self):
            self.all = [torch.optim.AdamW([p], lr=RATE, foreach=False) for p in parameters]

        def step(self):
            for optimizer in self.all:
                optimizer.step()

        def zero_grad(self):
            for optimizer in self.all:
                optimizer.zero_grad()

    return Each()
