"""Step 7: the losses are not divided"""

STEP, HINT = 7, "loss_not_divided"


def accumulate(ddp, loss_of, micro_batches):
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch).backward()
    loss_of(ddp, last).backward()
    ddp.finish()
