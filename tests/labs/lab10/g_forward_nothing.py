"""Step 2: g does not sum in forward"""

STEP, HINT = 2, "g_forward"


class SumOverShards:
    @staticmethod
    def forward(ctx, part, group):
        return part.view_as(part)
