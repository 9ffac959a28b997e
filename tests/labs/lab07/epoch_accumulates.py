"""Step 5: no zero_grad"""

# ruff: noqa: F821

STEP, HINT = 5, "accumulated"


def train_epoch(model, optimizer, source):
    sums = torch.zeros(3, device=next(model.parameters()).device)
    for x, y in source:
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        known = (y >= 0).sum()
        right = (logits.argmax(1) == y).sum()
        sums += torch.stack([loss.detach() * known, right, known])
    total, right, count = sums.tolist()
    return total / count, right / count
