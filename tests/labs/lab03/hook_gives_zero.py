"""Step 4: the hook returns something"""

STEP, HINT = 4, "hook_returns"


class Unit:
    def after_forward(self, module, inputs, output):
        def again(gradient):
            self.gather()
            return 0 * gradient

        self.free()
        output.register_hook(again)
