"""Step 6: gradients are copied in and out"""

import torch.distributed as dist

STEP, HINT = 6, "not_views"


class BucketDDP:
    def keep_in_bucket(self, parameter):
        self.bucket_of[parameter].views[parameter].copy_(parameter.grad)

    def finish(self):
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.flat /= dist.get_world_size()
            for parameter, view in bucket.views.items():
                parameter.grad.copy_(view)
        self.begin()
