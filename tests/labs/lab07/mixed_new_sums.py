"""Step 6: a new tensor under the name sums"""

# ruff: noqa: F821

STEP, HINT = 6, "not_in_place"


def mixed_step(model, optimizer, x, y, sums):
    optimizer.zero_grad()
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        logits = model(x)
        loss = F.cross_entropy(logits, y, ignore_index=-1)
    loss.backward()
    optimizer.step()
    known = (y >= 0).sum()
    right = (logits.argmax(1) == y).sum()
    sums = sums + torch.stack([loss.detach() * known, right, known])
