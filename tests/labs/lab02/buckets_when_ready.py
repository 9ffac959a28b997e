"""Step 6: launched as they are complete, not in order"""

import torch.distributed as dist

STEP, HINT = 6, "launch_order"


class BucketDDP:
    def launch_in_order(self, parameter):
        bucket = self.bucket_of[parameter]
        bucket.waiting.discard(parameter)
        if not bucket.waiting:
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.launched += 1
