"""Wrong answers to assessment/exercise.py."""

# fmt: off
from wrong_answers import Body, Table

wrong = Table("assessment/exercise.py")

# step 1

wrong("gradients_add_up", step=1, hint="later",
      old="optimizer.zero_grad()", new="")
wrong("half_batches", step=1, hint="steps",
      old="split(BATCH)", new="split(BATCH // 2)")
wrong("last_line_only", step=1, hint="log",
      old='"".join(lines)', new="lines[-1]")
wrong("mean_of_means", step=1, hint="unseen",
      old="return loss_of(model, images, labels)", new="""
    parts = zip(images.split(60), labels.split(60), strict=True)
    return torch.stack([loss_of(model, x, y) for x, y in parts]).mean()
""")
wrong("pixels_not_divided", step=1, hint="first",
      old="images / 255", new="images.float()")
wrong("adam", step=1, hint="settings", old="optim.AdamW", new="optim.Adam")
wrong("clips_each", step=1, hint="later",
      old="nn.utils.clip_grad_norm_(parameters, CLIP)",
      new="for parameter in parameters:\n    nn.utils.clip_grad_norm_([parameter], CLIP)")
wrong("log_begins_at_0", step=1, hint="log", old="start=1", new="start=0")
wrong("losses_only", step=1, hint="returned",
      old="return losses, torch.stack(validation).tolist()", new="return losses")
wrong("twice_the_rate", step=1, hint="later",
      old="RATE, fused", new="2 * RATE, fused")

# step 2

wrong("buffer_overwritten", step=2, hint="device_curve", edits=[
    ("torch.manual_seed(0)", """
        held = torch.empty(BATCH, 16, 16, 3, dtype=torch.uint8)
        held = held if device.type == "cpu" else held.pin_memory()
        kept = torch.load(folder / "train.pt")["images"]
        torch.manual_seed(0)
    """),
    ("""
        for indices in torch.tensor(order(len(labels), epoch), device=device).split(BATCH):
            loss = loss_of(model, images[indices], labels[indices])
    """, """
        numbers = torch.tensor(order(len(labels), epoch))
        pairs = zip(numbers.split(BATCH), labels[numbers.to(device)].split(BATCH), strict=True)
        for indices, y in pairs:
            held.copy_(kept[indices])
            x = held.to(device, non_blocking=True).permute(0, 3, 1, 2)
            loss = loss_of(model, x, y)
    """)])
wrong("constants_on_cpu", step=2, hint="elsewhere",
      old="images / 255 - self.mean", new="images / 255 - torch.full((3, 1, 1), 0.43)")

# step 3

wrong("reads_each_step", step=3, hint="read",
      old="loss = loss_of(model, images[indices], labels[indices])", new="""
    images, labels = read(folder / "train.pt", device)
    loss = loss_of(model, images[indices], labels[indices])
""")

# step 4

wrong("through_lists", step=4, hint="lists",
      old='data["images"]', new='torch.tensor((data["images"] / 1.0).tolist())')
wrong("through_lists_of_bytes", step=4, hint="lists",
      old='data["images"]', new='torch.tensor(data["images"].tolist())')

# step 5

wrong("workers_each_epoch", step=5, hint="workers", old="""
    for indices in torch.tensor(order(len(labels), epoch), device=device).split(BATCH):
        loss = loss_of(model, images[indices], labels[indices])
""", new="""
    source = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(images.cpu(), labels.cpu()),
        batch_size=BATCH,
        sampler=order(len(labels), epoch),
        num_workers=1,
    )
    for x, y in source:
        x, y = x.to(device), y.to(device)
        loss = loss_of(model, x, y)
""")

# step 6

wrong("micro_batches", step=6, hint="micro",
      old="loss = loss_of(model, images[indices], labels[indices])\nloss.backward()", new="""
    loss = 0.0
    for part in indices.split(BATCH // 4):
        some = loss_of(model, images[part], labels[part]) / 4
        some.backward()
        loss = loss + some.detach()
""")

# step 7

wrong("double", step=7, hint="float64", edits=[
    (Body("Net.__init__"), """
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 3, padding=1) for channels in (3, width, width)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.43))
        self.register_buffer("std", torch.full((3, 1, 1), 0.16))
        self.double()
    """),
    (Body("Net.forward"), """
        x = (images.double() / 255 - self.mean) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))
    """)])

# step 8

wrong("no_autocast", step=8, hint="no_autocast",
      old='kind != "cpu"', new="False")
wrong("parameters_in_bf16", step=8, hint="converted",
      old="parameters = list(model.parameters())", new="""
    model = model if device.type == "cpu" else model.bfloat16()
    parameters = list(model.parameters())
""")

# step 9

wrong("scaled", step=9, hint="scaler", edits=[
    ("losses, validation = [], []",
     "scaler = torch.amp.GradScaler(device.type)\nlosses, validation = [], []"),
    ("loss.backward()", "scaler.scale(loss).backward()\nscaler.unscale_(optimizer)"),
    ("optimizer.step()", "scaler.step(optimizer)\nscaler.update()")])

# step 10

wrong("pageable", step=10, hint="pageable", edits=[
    ("torch.manual_seed(0)",
     "images, labels = images.cpu(), labels.cpu()\ntorch.manual_seed(0)"),
    ("""
        for indices in torch.tensor(order(len(labels), epoch), device=device).split(BATCH):
            loss = loss_of(model, images[indices], labels[indices])
    """, """
        for indices in torch.tensor(order(len(labels), epoch)).split(BATCH):
            x, y = images[indices].to(device), labels[indices].to(device)
            loss = loss_of(model, x, y)
    """)])
wrong("pinned_and_blocking", step=10, hint="pageable", edits=[
    ("torch.manual_seed(0)",
     "images, labels = images.cpu(), labels.cpu()\ntorch.manual_seed(0)"),
    ("""
        for indices in torch.tensor(order(len(labels), epoch), device=device).split(BATCH):
            loss = loss_of(model, images[indices], labels[indices])
    """, """
        for indices in torch.tensor(order(len(labels), epoch)).split(BATCH):
            x, y = images[indices], labels[indices]
            if device.type != "cpu":
                x, y = x.pin_memory().to(device), y.pin_memory().to(device)
            loss = loss_of(model, x, y)
    """)])

# step 11

wrong("constants_each_step", step=11, hint="constants",
      old="- self.mean", new="- torch.tensor([0.43] * 3).view(3, 1, 1).to(images.device)")

# step 12

wrong("items_at_the_end", step=12,
      old="losses = torch.stack(losses).tolist()", new="losses = [loss.item() for loss in losses]")
wrong("item_before_backward", step=12, hint="asks",
      old="loss.backward()",
      new="if loss.isnan():\n    raise FloatingPointError\nloss.backward()")
wrong("item_each_step", step=12, hint="asks",
      old="losses.append(loss.detach())",
      new='losses.append(loss.detach())\nprint(f"{loss.item():.4f}")')
wrong("synchronizes", step=12, hint="synchronize", old="optimizer.zero_grad()", new="""
    optimizer.zero_grad()
    if device.type != "cpu":
        torch.accelerator.synchronize()
""")

# step 13

wrong("clip_by_hand", step=13, hint="clip", old=Body("clip"), new="""
    norm = sum(parameter.grad.norm().item() ** 2 for parameter in parameters) ** 0.5
    for parameter in parameters:
        parameter.grad.mul_(min(1.0, CLIP / norm))
""")

# step 14

wrong("norm_in_a_loop", step=14, hint="launches",
      old="x = F.max_pool2d(F.relu(norm(convolution(x))), 2)", new="""
    parts = []
    for part in convolution(x).chunk(4, dim=1):
        mean = part.mean((1, 2, 3), keepdim=True)
        variance = ((part - mean) ** 2).mean((1, 2, 3), keepdim=True)
        parts.append((part - mean) / torch.sqrt(variance + 1e-5))
    x = torch.cat(parts, dim=1) * norm.weight.view(-1, 1, 1) + norm.bias.view(-1, 1, 1)
    x = F.max_pool2d(F.relu(x), 2)
""")

# step 15

wrong("optimizer_each", step=15, hint="optimizer", old=Body("make_optimizer"), new="""
    class Each:
        def __init__(self):
            self.all = [torch.optim.AdamW([p], lr=RATE, foreach=False) for p in parameters]

        def step(self):
            for optimizer in self.all:
                optimizer.step()

        def zero_grad(self):
            for optimizer in self.all:
                optimizer.zero_grad()

    return Each()
""")
wrong("optimizer_loop", step=15, hint="optimizer",
      old="RATE, fused=True", new="RATE, foreach=False")

# step 16

wrong("channels_first", step=16, hint="format",
      old="(0, 3, 1, 2)", new="(0, 3, 1, 2).contiguous()")

# step 17

wrong("histograms", step=17, hint="histograms", old="optimizer.zero_grad()", new="""
    optimizer.zero_grad()
    for p in parameters:
        torch.histc(p.detach().cpu(), bins=32)
""")
wrong("log_each_step", step=17, hint="log_opened", old="losses.append(loss.detach())", new=r"""
    losses.append(loss.detach())
    with (folder / "log.csv").open("a") as file:
        file.write(f"{len(losses)},{loss.item()}\n")
""")

# step 18

wrong("collects_garbage", step=18, hint="garbage",
      old="optimizer.zero_grad()", new='optimizer.zero_grad()\n__import__("gc").collect()')

# step 19

wrong("looks_for_anomalies", step=19, hint="anomaly",
      old="torch.manual_seed(0)",
      new="torch.autograd.set_detect_anomaly(True)\ntorch.manual_seed(0)")

# step 20

wrong("compiles_for_debugging", step=20, hint="debug_backend", edits=[
    ("parameters = list(model.parameters())",
     'compiled = torch.compile(model, backend="eager")\nparameters = list(model.parameters())'),
    ("model, images[indices]", "compiled, images[indices]"),
    ("evaluate(model, *unseen)", "evaluate(compiled, *unseen)")])
wrong("counts_in_forward", step=20, hint="recompiles", edits=[
    (Body("Net.__init__"), """
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels, width, 3, padding=1) for channels in (3, width, width)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)
        self.register_buffer("mean", torch.full((3, 1, 1), 0.43))
        self.register_buffer("std", torch.full((3, 1, 1), 0.16))
        self.calls = 0
    """),
    (Body("Net.forward"), """
        self.calls += 1
        x = (images / 255 - self.mean) / self.std
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.max_pool2d(F.relu(norm(convolution(x))), 2)
        return self.head(x.mean((2, 3)))
    """),
    (Body("train"), """
        images, labels = read(folder / "train.pt", device)
        unseen = read(folder / "validation.pt", device)
        torch.manual_seed(0)
        model = Net().to(device, memory_format=torch.channels_last)
        compiled = torch.compile(model, backend=lambda graph, _: graph.forward)
        parameters = list(model.parameters())
        optimizer = make_optimizer(parameters)

        losses, validation = [], []
        for epoch in range(epochs):
            for indices in torch.tensor(order(len(labels), epoch), device=device).split(BATCH):
                loss = loss_of(compiled, images[indices], labels[indices])
                loss.backward()
                clip(parameters)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            validation.append(evaluate(compiled, *unseen))
        losses = torch.stack(losses).tolist()
        write_log(folder, losses)
        return losses, torch.stack(validation).tolist()
    """)])

# step 21

wrong("replicas", step=21, hint="replicas",
      old="parameters = list(model.parameters())",
      new="model = nn.DataParallel(model)\nparameters = list(model.parameters())")

# step 22

wrong("evaluates_with_graph", step=22, hint="eval_graph",
      old="with torch.no_grad():", new="if True:")

# step 23

wrong("evaluates_each_step", step=23, hint="slow",
      old="optimizer.zero_grad()",
      new="optimizer.zero_grad()\nfor _ in range(120):\n    evaluate(model, *unseen)")
