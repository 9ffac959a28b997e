"""Step 6: `if` where `while` belongs"""

import torch.distributed as dist

STEP, HINT = 6, "one_launch"


class BucketDDP:
    def launch_in_order(self, parameter):
        self.bucket_of[parameter].waiting.discard(parameter)
        bucket = self.buckets[self.launched]
        if not bucket.waiting:
            bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.launched += 1
