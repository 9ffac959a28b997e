"""Step 7: finish after each micro-batch"""

STEP, HINT = 7, "no_sync_sends"


def accumulate(ddp, loss_of, micro_batches):
    for micro_batch in micro_batches:
        (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
        ddp.finish()
