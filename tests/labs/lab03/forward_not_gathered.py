"""Step 4: no gather before forward"""

STEP, HINT = 4, "before_forward"


class Unit:
    def before_forward(self, module, inputs):
        pieces = self.whole.split(self.lengths)
        for (owner, name, shape), piece in zip(self.slots, pieces, strict=False):
            setattr(owner, name, piece.view(shape))
