"""Step 8: the last micro-batch is in no_sync too"""

STEP, HINT = 8, "not_reenabled"


def accumulate_with_torch(ddp, loss_of, micro_batches):
    with ddp.no_sync():
        for micro_batch in micro_batches:
            (loss_of(ddp, micro_batch) / len(micro_batches)).backward()
