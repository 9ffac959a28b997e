"""Step 8: only the backward is in no_sync"""

STEP, HINT = 8, "forward_outside"


def accumulate_with_torch(ddp, loss_of, micro_batches):
    *silent, last = micro_batches
    for micro_batch in silent:
        loss = loss_of(ddp, micro_batch) / len(micro_batches)
        with ddp.no_sync():
            loss.backward()
    (loss_of(ddp, last) / len(micro_batches)).backward()
