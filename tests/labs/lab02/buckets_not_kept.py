"""Step 6: the gradients never reach the bucket"""

STEP, HINT = 6, "copy_reduced"


class BucketDDP:
    def keep_in_bucket(self, parameter):
        pass
