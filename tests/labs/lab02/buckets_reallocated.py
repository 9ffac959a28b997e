"""Step 6: the view is assigned once and lost by zero_grad"""

STEP, HINT = 6, "reallocated"


class BucketDDP:
    def keep_in_bucket(self, parameter):
        if not hasattr(parameter, "was_kept"):
            view = self.bucket_of[parameter].views[parameter]
            view.copy_(parameter.grad)
            parameter.grad, parameter.was_kept = view, True
