"""Wrong answers to assessment/challenge_launches.py."""

# fmt: off
from wrong_answers import Table

wrong = Table("assessment/challenge_launches.py")

# step 1

wrong("gradients_elsewhere", step=1, hint="gradients",
      old="p.data, p.grad = own.copy_(p.data), grad",
      new="p.data, p.grad = own.copy_(p.data), None")
wrong("gradients_squared", step=1, hint="gradients", old="self.g.square()", new="self.g.square_()")
wrong("moments_uncorrected", step=1, hint="update",
      old="self.v / (1 - BETA2**self.t)", new="self.v / (1 - BETA2)")
wrong("moment_uncorrected", step=1, hint="update",
      old="self.m / (1 - BETA1**self.t)", new="self.m")
wrong("parameters_not_copied", step=1, hint="moved",
      old="p.data, p.grad = own.copy_(p.data), grad", new="p.data, p.grad = own, grad")
wrong("one_ratio", step=1, hint="ratio",
      old="self.owner = torch.arange(len(rows)).repeat",
      new="self.owner = torch.zeros(len(rows), dtype=int).repeat")
wrong("zeros_stay", step=1, hint="zeros",
      old="torch.where((weight > 0) & (length > 0), weight / length, 1.0)", new="weight / length")

# step 2

wrong("asks_the_step", step=2, hint="waits",
      old="self.m / (1 - BETA1**self.t)", new="self.m / (1 - BETA1 ** self.t.item())")
wrong("lists_the_step", step=2, hint="waits",
      old="self.m / (1 - BETA1**self.t)", new="self.m / (1 - BETA1 ** self.t.tolist())")
wrong("selects_by_a_mask", step=2, hint="waits",
      old="ratio = torch.where((weight > 0) & (length > 0), weight / length, 1.0)", new="""
ratio, some = torch.ones_like(weight), (weight > 0) & (length > 0)
ratio[some] = weight[some] / length[some]
""")

# step 3

wrong("loop_at_the_end", step=3, hint="grows",
      old="self.p -= RATE * ratio[self.owner, None] * update", new="""
for i in range(len(ratio)):
    self.p -= RATE * ratio[i] * update * (self.owner == i)[:, None]
""")

# step 4

wrong("step_in_python", step=4, hint="again",
      old="self.t = torch.zeros((), device=device)", new="self.t = 0")
wrong("decides_on_the_host", step=4, hint="graph",
      old="self.m.lerp_(self.g, 1 - BETA1)",
      new="self.m.lerp_(self.g, 1 - BETA1 if self.g.any() else 0)")
wrong("one_after_the_other", step=4, hint="kernels",
      old="self.p -= RATE * ratio[self.owner, None] * update", new="""
for p, r, u in zip(*(x.split(1) for x in (self.p, ratio[self.owner], update))):
    p -= RATE * r * u
""")
