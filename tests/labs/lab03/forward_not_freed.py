"""Step 4: whole until backward"""

STEP, HINT = 4, "after_forward"


class Unit:
    def after_forward(self, module, inputs, output):
        output.register_hook(lambda gradient: self.gather())
