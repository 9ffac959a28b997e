"""Step 2: buffers that are not pinned"""

# ruff: noqa: F821

STEP, HINT = 2, "pageable"


class Sender:
    def __init__(self, like: torch.Tensor, slots: int, device: torch.device):
        self.device, self.slots, self.count = device, slots, 0
        self.buffers = [torch.empty_like(like) for _ in range(slots)]
        self.events = [None] * slots
