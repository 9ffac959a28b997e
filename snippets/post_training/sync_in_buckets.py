"""New weights arrive in buckets while the sampler writes answers. When does it switch to them?

While the sampler computes a token, the next bucket arrives. The trainer gathers a bucket while
the previous bucket is being sent, so it needs two buffers. Each token is labelled with the
version of its weights. At the end, the trainer recomputes the log-probability of each token
with the weights of this version. There are four ways to switch:

    in place     each bucket overwrites the weights at once
    drain        a spare copy is filled, and used when all running answers have ended
    keep cache   a spare copy is filled, and used for the next token
    new cache    the same, and the keys and values of the running answers are computed again
"""

import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

TOKENS = [".", "$", "(", "[", ")", "]"]  # padding, end of sequence, opening, closing brackets
PAD, END, OPENING, CLOSING = 0, 1, 2, 4  # a closing bracket is its opening bracket + 2
LENGTH, NEW, ANSWERS, LIMIT = 6, 8, 24, 8192  # a bucket has at most LIMIT elements
WAYS = {  # for each way to switch: are the labels "old" and "new" true?
    "in place": [False, False],
    "drain": [True, True],
    "keep cache": [True, False],
    "new cache": [True, True],
}


class PolicyBlock(nn.Module):
    """A transformer block on [b, s, h] with optional cached keys and values."""

    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(h), nn.RMSNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h, bias=False), nn.Linear(h, h, bias=False)
        self.up, self.down = nn.Linear(h, 4 * h, bias=False), nn.Linear(4 * h, h, bias=False)

    def forward(self, x: torch.Tensor, cache: list[torch.Tensor], mask: torch.Tensor):
        b, s, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [b, heads, s, h / heads]
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    """A causal transformer over TOKENS: token numbers [b, s] -> logits [b, s, vocabulary]."""

    def __init__(self, h: int = 32, heads: int = 4, layers: int = 2, longest: int = 16) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(len(TOKENS), h), nn.Embedding(longest, h)
        self.blocks = nn.ModuleList(PolicyBlock(h, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(h), nn.Linear(h, len(TOKENS), bias=False)

    def forward(self, tokens: torch.Tensor, caches: list[list] | None = None) -> torch.Tensor:
        """With `caches` (one list per block), `tokens` continue the sequences in the cache."""
        caches = [[] for _ in self.blocks] if caches is None else caches
        past = caches[0][0].shape[2] if caches[0] else 0
        s = tokens.shape[1]
        mask = torch.ones(s, past + s, dtype=torch.bool, device=tokens.device).tril(past)
        x = self.token(tokens) + self.position.weight[past : past + s]
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, cache, mask)
        return self.head(self.norm(x))


def draw_prompts(n: int, length: int, rng: torch.Generator) -> torch.Tensor:
    """Return n random rows of `length` opening brackets, [n, length]."""
    return torch.randint(OPENING, CLOSING, (n, length), generator=rng)


def log_probs_of(policy: Policy, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token of the answers in one forward pass, [n, new]."""
    logits = policy(torch.cat([prompts, answers], 1)[:, :-1])[:, prompts.shape[1] - 1 :]
    return logits.log_softmax(-1).gather(2, answers[..., None])[..., 0]


def answer_mask(answers: torch.Tensor) -> torch.Tensor:
    """1.0 for each token up to and including the first END, 0.0 for padding, [n, new]."""
    is_end = (answers == END).int()
    return (is_end.cumsum(1) - is_end == 0).float()


def teach(policy: Policy, rng: torch.Generator, steps: int) -> None:
    """Train on right answers, which close every bracket and then end."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts = draw_prompts(64, LENGTH, rng)
        answers = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
        loss = -log_probs_of(policy, prompts, answers).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def init_distributed() -> torch.device:
    """Join the process group: one accelerator per local rank where there are enough.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 or newer), several ranks share a GPU.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start this program with: torchrun --nproc-per-node=2 {sys.argv[0]}")
    local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    count = torch.accelerator.device_count()
    shared = count > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if (count < local_world and not shared) or torch.backends.mps.is_available():
        if count and torch.version.cuda and local_rank == 0:
            advice = "NCCL_MULTI_RANK_GPU_ENABLE=1 lets ranks share a GPU (NCCL 2.30 or newer)"
            print(f"{local_world} ranks use the CPU and gloo. {advice}", file=sys.stderr)
        dist.init_process_group("gloo")  # on the CPU; mps has no collectives
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator().type, local_rank % count)
    torch.accelerator.set_device_index(device.index)
    dist.init_process_group(device_id=device)
    return device


def buckets_of(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names of parameters in order. A bucket has at most `limit` elements, or one parameter."""
    buckets: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1].append(name)
        room -= size
    return buckets


def send(policy: Policy, buckets: list[list[str]], group, rank: int) -> list[str]:
    """Gather each bucket on rank 0, and broadcast it. Returns what this rank did, in order."""
    parameters, pending, done = dict(policy.named_parameters()), [], []
    for index, bucket in enumerate(buckets):
        size = sum(parameters[name].numel() for name in bucket)
        flat, offset = torch.empty(size if rank == 0 else 0).to(policy.head.weight.device), 0
        for name in bucket:
            whole = parameters[name].detach().full_tensor().flatten()  # on all trainer ranks
            if rank == 0:
                flat[offset : offset + len(whole)] = whole
                offset += len(whole)
        done.append(f"gathered {index}")
        if rank == 0:
            wait_for(pending, done)  # for the broadcast of the previous bucket
            work = dist.broadcast(flat, src=0, group=group, async_op=True)
            pending = [(index, work, flat)]
    wait_for(pending, done)
    return done


def wait_for(pending: list, done: list[str]) -> None:
    """Wait for a broadcast that was started, and record that it has ended."""
    for index, work, _ in pending:
        work.wait()
        done.append(f"ended {index}")


class Engine:
    """The sampler: the weights in use, a spare copy, and the progress of the sync."""

    def __init__(self, policy: Policy, way: str, buckets: list[list[str]], group) -> None:
        self.live, self.way, self.buckets, self.group = policy, way, buckets, group
        self.spare = policy if way == "in place" else copy.deepcopy(policy)
        self.arrived = self.version = self.recomputed = 0
        self.done: list[str] = []  # what the engine did, in order

    def start_bucket(self):
        """Start to receive the next bucket, if there is one."""
        if self.arrived == len(self.buckets):
            return None
        parameters = dict(self.spare.named_parameters())
        size = sum(parameters[name].numel() for name in self.buckets[self.arrived])
        flat = self.live.head.weight.new_empty(size)
        self.done.append(f"started {self.arrived}")
        return dist.broadcast(flat, src=0, group=self.group, async_op=True), flat

    @torch.no_grad()
    def finish_bucket(self, started) -> None:
        work, flat = started
        wait_for([(self.arrived, work, flat)], self.done)
        parameters = dict(self.spare.named_parameters())
        tensors = [parameters[name] for name in self.buckets[self.arrived]]
        parts = flat.split([tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))
        self.arrived += 1

    def switch(self) -> None:
        assert self.arrived == len(self.buckets), "all buckets must have arrived"
        self.live, self.spare = self.spare, self.live
        self.version = 1

    @torch.no_grad()
    def answer(self, prompts: torch.Tensor, rng: torch.Generator) -> list[torch.Tensor]:
        """Return the answers, the log-probabilities and the versions, each [n, NEW]."""
        caches: list[list] = [[] for _ in self.live.blocks]
        tokens, answers, log_probs, versions = prompts, [], [], []
        for _ in range(NEW):
            started = self.start_bucket()  # it arrives while the token is computed
            scores = self.live(tokens, caches)[:, -1].log_softmax(-1)
            tokens = torch.multinomial(scores.exp().cpu(), 1, generator=rng).to(scores.device)
            answers.append(tokens)
            log_probs.append(scores.gather(1, tokens))
            versions.append(torch.full_like(tokens, self.version))
            self.done.append(f"token {len(answers) - 1}")
            if started:
                self.finish_bucket(started)
                if self.arrived == len(self.buckets) and self.way != "drain":
                    self.switch()
                    if self.way == "new cache":
                        self.recomputed = caches[0][0].shape[2]  # the discarded positions
                        caches = [[] for _ in self.live.blocks]
                        tokens = torch.cat([prompts, *answers], 1)
        if self.way == "drain":
            self.switch()
        return [torch.cat(parts, 1) for parts in (answers, log_probs, versions)]


def check(old: Policy, new: Policy, results: list[list[torch.Tensor]], way: str):
    """Compare every token with the weights of its label.

    Returns a line of the table, and a message if the results differ from the recorded ones.
    """
    worst, counts, mixed = [0.0, 0.0], [0, 0], 0
    for prompts, answers, log_probs, versions in results:
        mask = answer_mask(answers).bool()
        truth = torch.stack([log_probs_of(policy, prompts, answers) for policy in (old, new)])
        difference = (log_probs - truth.gather(0, versions[None])[0]).abs()
        for version in (0, 1):
            chosen = mask & (versions == version)
            counts[version] += int(chosen.sum())
            if chosen.any():
                worst[version] = max(worst[version], difference[chosen].max().item())
        ends = (versions * mask).amax(1) != versions[:, 0]
        mixed += int(ends.sum())
        assert ((truth[0] - truth[1]).abs() * mask).max() > 0.1, "the versions must differ"
    right = [error < 1e-4 for error in worst]
    surprise = ""
    if right != WAYS[way]:
        surprise = f"{way}: with the recorded settings, the labels (old, new) are right: "
        surprise += f"{WAYS[way]}; with your settings, they are right: {right}"
    elif not all(right) and max(worst) <= 0.1:
        surprise = f"{way}: with the recorded settings, a wrong label has an error above 0.1"
    elif not (mixed == 0) == (counts[1] == 0) == (way == "drain"):
        surprise = f"{way}: with the recorded settings, only drain has no token with the new "
        surprise += "version and no answer with two versions; your settings give "
        surprise += f"{counts[1]} of these tokens and {mixed} of these answers"
    errors = " ".join(f"{error:10.3f}" for error in worst)
    return f"{way:11} {counts[0]:9} {counts[1]:9} {mixed:13} {errors}", surprise


def main() -> None:
    torch.set_num_threads(1)
    device = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    trains = rank < TRAINERS
    train_group = dist.new_group(list(range(TRAINERS)))  # every rank creates both groups
    group = dist.new_group([0, *range(TRAINERS, world)])

    torch.manual_seed(0)
    old = Policy()
    if rank == 0:
        teach(old, torch.Generator().manual_seed(0), steps=20)
    new = copy.deepcopy(old)
    if rank == 0:
        teach(new, torch.Generator().manual_seed(1), steps=8)
    old, new = old.to(device), new.to(device)
    for parameter in (*old.parameters(), *new.parameters()):
        dist.broadcast(parameter.detach(), src=0)
    sharded = copy.deepcopy(new)
    if trains:
        fully_shard(sharded, mesh=DeviceMesh.from_group(train_group, device.type))
    buckets = buckets_of({n: p.numel() for n, p in new.named_parameters()}, LIMIT)
    if len(buckets) > NEW:
        sys.exit(f"{len(buckets)} buckets cannot arrive while {NEW} tokens are computed")

    lines, surprises = [], []
    for way in WAYS:
        prompts = draw_prompts(ANSWERS, LENGTH, torch.Generator().manual_seed(rank)).to(device)
        shape, recomputed = (ANSWERS, NEW), 0
        kinds = (torch.int64, torch.float32, torch.int64)
        mine = [prompts, *(torch.zeros(shape, dtype=kind, device=device) for kind in kinds)]
        if trains:
            done = send(sharded, buckets, group, rank)
        else:
            engine = Engine(copy.deepcopy(old), way, buckets, group)
            mine[1:] = engine.answer(prompts, torch.Generator().manual_seed(rank))
            recomputed = engine.recomputed
            # a token is computed between the start and the end of each broadcast
            steps = [(f"started {i}", f"token {i}", f"ended {i}") for i in range(len(buckets))]
            later = [f"token {i}" for i in range(len(buckets), NEW)]
            assert engine.done == [*sum(steps, ()), *later]
            for name, parameter in engine.live.named_parameters():
                assert torch.equal(parameter, new.get_parameter(name)), name
        results = [[torch.empty_like(part) for part in mine] for _ in range(world)]
        for index, part in enumerate(mine):
            dist.all_gather([result[index] for result in results], part)
        extra = torch.tensor(recomputed, device=device)
        dist.broadcast(extra, src=world - 1)
        if rank == 0:
            # bucket i + 1 is gathered before bucket i has been sent, so there are two buffers
            last = len(buckets) - 1
            pairs = [(f"gathered {i + 1}", f"ended {i}") for i in range(last)]
            assert done == ["gathered 0", *sum(pairs, ()), f"ended {last}"]
            line, surprise = check(old, new, results[TRAINERS:], way)
            lines.append(f"{line} {extra.item():11}")
            surprises += [surprise] if surprise else []

    if rank == 0:
        samplers = world - TRAINERS
        print(f"{TRAINERS} trainer ranks, {samplers} sampler ranks, {len(buckets)} buckets")
        print("way          tokens with version  answers with   largest error with  recomputed")
        print(
            "                   old       new  two versions        old        new  per answer"
        )
        print("\n".join(lines), flush=True)
        assert not surprises, "\n".join(surprises)
    dist.barrier()


if __name__ == "__main__":
    WORLD = int(os.environ.get("WORLD_SIZE", "2"))
    if WORLD < 2:
        sys.exit("sync_in_buckets.py needs at least 2 ranks: a trainer and a sampler")
    TRAINERS = (WORLD + 1) // 2
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
