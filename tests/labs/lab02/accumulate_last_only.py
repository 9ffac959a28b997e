"""Step 7: only the last micro-batch counts"""

STEP, HINT = 7, "micro_batch_lost"


def accumulate(ddp, loss_of, micro_batches):
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch)
    (loss_of(ddp, last) / len(micro_batches)).backward()
    ddp.finish()
