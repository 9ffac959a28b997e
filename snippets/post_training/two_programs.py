"""A trainer and a sampler are two programs, and each of them cuts one policy differently.

The first ranks train the policy with FSDP2. The last ranks sample answers. They cut the policy
with tensor parallelism, keep a KV cache, and batch continuously: when an answer ends, it leaves
its slot, and the next prompt takes this slot. In every step, the trainer sends its weights to
the sampler, and the sampler sends its answers to the trainer. The rewards must be equal to the
rewards of one process without cuts, cache and slots. All numbers are float64 for this reason:
rounding errors are then too small to change a token.
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
LENGTH, NEW, PROMPTS, GROUP, STEPS, SLOTS = 4, 8, 16, 8, 20, 48
HEADS = 4


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


def rewards_of(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """1.0 where an answer closes every bracket of its prompt in order and then ends, [n]."""
    right = F.pad(prompts.flip(1) + (CLOSING - OPENING), (0, 1), value=END)
    return (answers[:, : right.shape[1]] == right).all(1).float()


def log_probs_of(policy: Policy, prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token of the answers in one forward pass, [n, new]."""
    logits = policy(torch.cat([prompts, answers], 1)[:, :-1])[:, prompts.shape[1] - 1 :]
    return logits.log_softmax(-1).gather(2, answers[..., None])[..., 0]


def answer_mask(answers: torch.Tensor) -> torch.Tensor:
    """1.0 for each token up to and including the first END, 0.0 for padding, [n, new]."""
    is_end = (answers == END).int()
    return (is_end.cumsum(1) - is_end == 0).float()


def group_advantages(rewards: torch.Tensor, group: int) -> torch.Tensor:
    """GRPO: each reward minus its group's mean, divided by the group's standard deviation."""
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + 1e-4)).flatten()


def clipped_loss(new, old, advantages, mask, clip: float = 0.2) -> torch.Tensor:
    """The clipped objective of PPO with its sign reversed, a mean over all answer tokens.

    `new` and `old` are log-probabilities [n, t], `advantages` is [n], `mask` is [n, t].
    """
    ratio = (new - old).exp()
    a = advantages[:, None]
    objective = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    return -(objective * mask).sum() / mask.sum()


def pretrain(policy: Policy, length: int, rng: torch.Generator, steps: int = 100) -> None:
    """Teach the format and nothing else: random closing brackets, then END."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(steps):
        prompts = draw_prompts(64, length, rng)
        closing = torch.randint(CLOSING, len(TOKENS), (64, length), generator=rng)
        answers = F.pad(closing, (0, 1), value=END)
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


def cut(name: str, weight: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The part of a parameter that one of `ranks` sampler ranks needs."""
    layer = name.split(".")[-2]
    if layer == "qkv":  # the rows are q, k and v, and each of them is ordered by heads
        return weight.view(3, ranks, -1, weight.shape[1])[:, rank].flatten(0, 1)
    if layer == "up":
        return weight.chunk(ranks)[rank]
    if layer in ("out", "down"):
        return weight.chunk(ranks, dim=1)[rank]
    return weight  # embeddings, norms and the head are whole on every sampler rank


class Sampler:
    """A tensor-parallel policy with a KV cache of SLOTS requests that come and go."""

    def __init__(self, group: dist.ProcessGroup, like: Policy) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), group.size()
        self.weights: dict[str, torch.Tensor] = {}
        longest, h = like.position.weight.shape
        shape = (SLOTS, HEADS // self.ranks, longest, h // HEADS)
        new = like.position.weight.new_zeros
        self.caches = [(new(shape), new(shape)) for _ in like.blocks]
        self.steps = 0

    def add_ranks(self, partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial, group=self.group)
        return partial

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Read one token in each slot, [slots]. Returns log-probabilities, [slots, V]."""
        self.steps += 1
        w, rows = self.weights, torch.arange(SLOTS, device=tokens.device)
        past = torch.arange(len(w["position.weight"]), device=tokens.device)
        mask = (past <= positions[:, None])[:, None, None]  # [slots, 1, 1, longest]
        x = w["token.weight"][tokens] + w["position.weight"][positions]  # [slots, h]
        h = x.shape[1]
        for index, (keys, values) in enumerate(self.caches):
            norm1, norm2, qkv, out, up, down = (
                w[f"blocks.{index}.{name}.weight"]
                for name in ("norm1", "norm2", "qkv", "out", "up", "down")
            )
            mine = F.linear(F.rms_norm(x, (h,), norm1), qkv)
            q, k, v = mine.view(SLOTS, 3, HEADS // self.ranks, h // HEADS).unbind(1)
            keys[rows, :, positions], values[rows, :, positions] = k, v
            mixed = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask)
            x = x + self.add_ranks(F.linear(mixed.reshape(SLOTS, -1), out))
            hidden = F.gelu(F.linear(F.rms_norm(x, (h,), norm2), up))
            x = x + self.add_ranks(F.linear(hidden, down))
        logits = F.linear(F.rms_norm(x, (h,), w["norm.weight"]), w["head.weight"])
        return logits.log_softmax(-1)

    def generate(self, prompts: torch.Tensor, uniform: torch.Tensor):
        """Answer all prompts, [n, length], with the random numbers `uniform`, [n, new].

        Returns the answers [n, new] and the log-probability of each token [n, new].
        """
        answers = torch.full(uniform.shape, PAD, device=prompts.device)
        log_probs = torch.zeros_like(uniform)
        waiting = list(range(len(prompts)))[::-1]
        running = prompts.new_full((SLOTS,), -1)  # the request in each slot; -1: it is free
        tokens, positions = prompts.new_zeros(SLOTS), prompts.new_zeros(SLOTS)
        while waiting or (running >= 0).any():
            for slot in (running < 0).nonzero()[: len(waiting)].flatten().tolist():
                running[slot] = waiting.pop()  # a new request joins
                tokens[slot], positions[slot] = prompts[running[slot], 0], 0
            scores = self.step(tokens, positions)
            positions = (positions + 1) * (running >= 0)
            reads = (positions > 0) & (positions < LENGTH)  # still inside the prompt
            tokens[reads] = prompts[running[reads], positions[reads]]

            writes = (positions >= LENGTH).nonzero().flatten()
            request, place = running[writes], positions[writes] - LENGTH
            below = scores[writes].exp().cumsum(1) < uniform[request, place, None]
            drawn = below.sum(1).clamp(max=len(TOKENS) - 1)
            tokens[writes], answers[request, place] = drawn, drawn
            log_probs[request, place] = scores[writes, drawn]
            running[writes[(drawn == END) | (place == NEW - 1)]] = -1  # these slots are free
        return answers, log_probs


@torch.no_grad()
def sample_alone(policy: Policy, prompts: torch.Tensor, uniform: torch.Tensor):
    """Answer all prompts in one process: the whole text again for each token, and no cache."""
    tokens, log_probs = prompts, []
    for place in range(NEW):
        scores = policy(tokens)[:, -1].log_softmax(-1)
        sums = scores.exp().cumsum(1)
        chosen = torch.searchsorted(sums, uniform[:, place : place + 1].contiguous()).clamp(
            max=len(TOKENS) - 1
        )
        ended = (tokens[:, LENGTH:] == END).any(1, keepdim=True)
        log_probs.append(scores.gather(1, chosen).masked_fill(ended, 0.0))
        tokens = torch.cat([tokens, chosen.masked_fill(ended, PAD)], 1)
    return tokens[:, LENGTH:], torch.cat(log_probs, 1)


def train_on_batch(policy, optimizer, prompts, answers, old, rank: int, ranks: int) -> float:
    """Two optimizer steps on this rank's part of the batch. Returns the mean reward."""
    rewards = rewards_of(prompts, answers)
    advantages = group_advantages(rewards, GROUP).to(old.dtype)
    mask = answer_mask(answers).to(old.dtype)
    mine = torch.arange(len(prompts)).view(PROMPTS, GROUP).chunk(ranks)[rank].flatten()
    share = ranks * mask[mine].sum() / mask.sum()  # FSDP averages over the ranks
    for _ in range(2):
        new = log_probs_of(policy, prompts[mine], answers[mine])
        loss = clipped_loss(new, old[mine], advantages[mine], mask[mine]) * share
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    return rewards.mean().item()


def send_weights(policy: Policy, trains: bool, sampler: Sampler | None) -> None:
    """The simplest way: gather each parameter on the trainers, and broadcast it from rank 0."""
    for name, parameter in policy.named_parameters():
        whole = parameter.detach().full_tensor() if trains else torch.empty_like(parameter)
        dist.broadcast(whole, src=0)
        if sampler:
            sampler.weights[name] = cut(name, whole, sampler.rank, sampler.ranks)


def batch_of(step: int, device: torch.device):
    """The prompts of a step, and one random number for each token. Equal on all ranks."""
    rng = torch.Generator().manual_seed(step)
    prompts = draw_prompts(PROMPTS, LENGTH, rng).repeat_interleave(GROUP, 0)
    return prompts.to(device), torch.rand(len(prompts), NEW, generator=rng).to(device)


def main() -> None:
    world = int(os.environ.get("WORLD_SIZE", "2"))
    if not 2 <= world <= 16:
        sys.exit("two_programs.py needs 2 to 16 ranks: at least one trainer and one sampler")
    samplers = 1 if world < 4 else 2 if world < 8 else 4  # the number must divide the heads
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    device = init_distributed()
    rank, trainers = dist.get_rank(), world - samplers
    trains = rank < trainers
    train_group = dist.new_group(list(range(trainers)))  # every rank creates both groups
    sample_group = dist.new_group(list(range(trainers, world)))

    torch.manual_seed(0)
    policy = Policy(heads=HEADS)
    if rank == 0:
        pretrain(policy, LENGTH, torch.Generator().manual_seed(0), steps=25)
    policy = policy.to(device)
    for parameter in policy.parameters():
        dist.broadcast(parameter.detach(), src=0)
    alone = copy.deepcopy(policy)
    sampler = None if trains else Sampler(sample_group, policy)
    if trains:
        mesh = DeviceMesh.from_group(train_group, device.type)
        fully_shard(policy, mesh=mesh)  # one unit, because the policy is small
        optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)

    rewards, lengths = [], []
    for step in range(STEPS):
        prompts, uniform = batch_of(step, device)
        send_weights(policy, trains, sampler)
        if sampler:
            answers, log_probs = sampler.generate(prompts, uniform)
        else:
            answers = torch.empty(uniform.shape, dtype=prompts.dtype, device=device)
            log_probs = torch.empty_like(uniform)
        dist.broadcast(answers, src=trainers)  # from the first sampler rank to all ranks
        dist.broadcast(log_probs, src=trainers)
        lengths += [LENGTH + row.sum().item() - 1 for row in answer_mask(answers)]
        if trains:
            batch = prompts, answers, log_probs
            rewards.append(train_on_batch(policy, optimizer, *batch, rank, trainers))

    # a trainer rank stores a part of each parameter, a sampler rank a part of each large matrix
    for name, whole in alone.named_parameters():
        if trains:
            rows = policy.get_parameter(name).to_local().shape[0]
            assert rows <= -(-whole.shape[0] // trainers), name
        else:
            parts = samplers if "blocks" in name and whole.dim() == 2 else 1
            assert sampler.weights[name].numel() == whole.numel() // parts, name
            assert sampler.caches[0][0].shape[1] == HEADS // samplers
    counts = torch.tensor([sampler.steps if sampler else 0], device=device)
    dist.broadcast(counts, src=world - 1)
    ours = {n: p.detach().full_tensor() for n, p in policy.named_parameters()} if trains else {}
    if rank == 0:
        expected, optimizer = [], torch.optim.AdamW(alone.parameters(), lr=3e-3)
        for step in range(STEPS):
            prompts, uniform = batch_of(step, device)
            answers, log_probs = sample_alone(alone, prompts, uniform)
            expected.append(train_on_batch(alone, optimizer, prompts, answers, log_probs, 0, 1))
        n = PROMPTS * GROUP
        static = 0
        for start in range(0, len(lengths), n):
            part = [lengths[i : i + SLOTS] for i in range(start, start + n, SLOTS)]
            static += sum(int(max(batch)) for batch in part)
        print(f"{trainers} trainer ranks with FSDP2, {samplers} sampler ranks with TP")
        for step in range(0, STEPS, 5):
            mean, other = (sum(r[step : step + 5]) / 5 for r in (rewards, expected))
            print(f"steps {step:2} to {step + 4:2}: reward {mean:.4f}, one process {other:.4f}")
        print(f"steps of the sampler: {counts.item()}, in static batches {static}")
        assert rewards == expected, "both runs must draw the same tokens"
        for name, weight in alone.named_parameters():
            torch.testing.assert_close(ours[name], weight.detach(), rtol=1e-6, atol=1e-8)
        assert sum(rewards[:5]) < 0.5 and sum(rewards[-5:]) > 4, "the policy must learn"
        assert sum(lengths) <= SLOTS * counts.item() < SLOTS * static
    dist.barrier()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # DTensor's caches hold the mesh, which holds the group, to the very end
