"""Step 5: the mean of the batches' means"""

# ruff: noqa: F821

STEP, HINT = 5, "mean_of_means"


def train_epoch(model, optimizer, source):
    sums = torch.zeros(3, device=next(model.parameters()).device)
    batches = 0
    for x, y in source:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        known = (y >= 0).sum()
        right = (logits.argmax(1) == y).sum()
        sums += torch.stack([loss.detach(), right, known])
        batches = batches + 1
    total, right, count = sums.tolist()
    return total / batches, right / count
