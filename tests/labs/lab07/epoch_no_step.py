"""Step 5: no step"""

# ruff: noqa: F821

STEP, HINT = 5, "not_trained"


def train_epoch(model, optimizer, source):
    sums = torch.zeros(3, device=next(model.parameters()).device)
    for x, y in source:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
        known = (y >= 0).sum()
        right = (logits.argmax(1) == y).sum()
        sums += torch.stack([loss.detach() * known, right, known])
    total, right, count = sums.tolist()
    return total / count, right / count
