"""Step 8: the losses are not divided"""

STEP, HINT = 8, "loss_not_divided"


def accumulate_with_torch(ddp, loss_of, micro_batches):
    *silent, last = micro_batches
    with ddp.no_sync():
        for micro_batch in silent:
            loss_of(ddp, micro_batch).backward()
    loss_of(ddp, last).backward()
