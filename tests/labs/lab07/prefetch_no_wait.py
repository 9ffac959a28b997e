"""Step 4: compute does not wait"""

# ruff: noqa: F821

STEP, HINT = 4, "not_waited"


def prefetch(source, device):
    copies = torch.Stream(device=device)
    compute = torch.accelerator.current_stream(device)

    def start(batch):
        arrived = torch.Event(device)
        with copies:
            there = [tensor.to(device, non_blocking=True) for tensor in batch]
            arrived.record(copies)
        return there, arrived

    def hand_over(there, arrived):
        for tensor in there:
            tensor.record_stream(compute)
        return tuple(there)

    upcoming = None
    for batch in source:
        following = start(batch)
        if upcoming is not None:
            yield hand_over(*upcoming)
        upcoming = following
    if upcoming is not None:
        yield hand_over(*upcoming)
