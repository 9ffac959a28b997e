"""Step 5: the sum is not detached"""

# ruff: noqa: F821

STEP, HINT = 5, "graph_kept"


def train_epoch(model, optimizer, source):
    sums = torch.zeros(3, device=next(model.parameters()).device)
    for x, y in source:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        known = (y >= 0).sum()
        right = (logits.argmax(1) == y).sum()
        sums = sums + torch.stack([loss * known, right, known])
    total, right, count = sums.detach().tolist()
    return total / count, right / count
