"""Step 6: divided by bucket and by gradient"""

import torch.distributed as dist

STEP, HINT = 6, "divided_twice"


class BucketDDP:
    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= dist.get_world_size()
            for parameter in bucket.views:
                parameter.grad /= dist.get_world_size()
        self.begin()
