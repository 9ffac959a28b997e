"""Step 6: means are added up"""

# ruff: noqa: F821

STEP, HINT = 6, "mean_of_means"


def mixed_step(model, optimizer, x, y, sums):
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
    loss.backward()
    optimizer.step()
    known = (y >= 0).sum()
    right = (logits.argmax(1) == y).sum()
    sums += torch.stack([loss.detach(), right, known])
