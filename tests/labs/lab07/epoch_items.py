"""Step 5: item in every step"""

# ruff: noqa: F821

STEP, HINT = 5, "asks_each_step"


def train_epoch(model, optimizer, source):
    total, right, count = 0.0, 0, 0
    for x, y in source:
        optimizer.zero_grad()
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
        loss.backward()
        optimizer.step()
        known = (y >= 0).sum().item()
        total += loss.item() * known
        right += (logits.argmax(1) == y).sum().item()
        count += known
    return total / count, right / count
