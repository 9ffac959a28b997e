// The layouts that the planner and its map compare, as snippets/planner/plan.py counts them.
import { upTo } from "./base.js"
import {
  closedForm, gcd, gpusOf, layoutOf, recomputed, replay, stepTime, total, whyNot, withUnseen,
} from "./layouts.js"

// ---- numbers as Python writes them: halves go to the even digit

export const fixed = (x, n = 0) => {
  const [whole, rest] = x.toFixed(40).split("."), half = /^50*$/.test(rest.slice(n))
  return half && Number((whole + rest.slice(0, n)).at(-1)) % 2 === 0 ? `${whole}${n ? "." : ""}${rest.slice(0, n)}` : x.toFixed(n)
}

// ---- the layouts

const divisors = (n, most) => upTo(Math.min(n, most) + 1).filter(d => n % d === 0)

const variants = base => upTo(gpusOf(base) > base.pp * base.tp ? base.pp > 1 ? 2 : 4 : 1).flatMap(zero =>
  [1, 2, 4].flatMap(virtual => recomputed.map(recompute => ({ ...base, zero, virtual, recompute }))))

const layouts = (s, gpus, sequence, batch, gpu) => {
  const made = []
  for (const tp of divisors(gpus, Math.min(gpu.node, s.kv_heads))) {
    for (const pp of divisors(gpus / tp, s.layers)) {
      for (const cp of [1, 2, 4, 8, 16, 32, 64, 128]) {
        const dp = gpus / (tp * pp * cp), each = batch / dp, ep = gcd(dp, s.experts)
        if (dp % 1 || each % 1 || sequence % (tp * cp) || (cp > 1 && sequence < cp * 4096)) continue
        for (let micro_batch = 1; micro_batch <= 32 && each % micro_batch === 0; micro_batch *= 2) {
          const base = layoutOf({ dp, pp, tp, cp, ep, micro_batch, micro_batches: each / micro_batch })
          if (!whyNot(s, base)) made.push(...variants(base).filter(l => l.virtual === 1 || !whyNot(s, l)))
        }
      }
    }
  }
  return made
}

export const fullestOf = (s, l, sequence) => {
  const some = s.layers % l.pp ? [0, 1, l.pp - 1] : [0, l.pp - 1]
  const [stage, allocated] = [...new Set(some)].map(i => [i, replay(s, l, sequence, i)])
    .sort((a, b) => b[1] - a[1])[0]
  const needed = withUnseen(allocated), parts = closedForm(s, l, sequence, stage)
  parts["temporary"] = Math.max(0, needed - total(parts))
  return { needed, parts, stage }
}

const again = ({ layout }) => recomputed.indexOf(layout.recompute)

// All layouts, fastest first.
export const timedLayouts = (s, gpus, sequence, batch, gpu) => layouts(s, gpus, sequence, batch, gpu)
  .map(layout => ({ layout, step: stepTime(s, layout, sequence, gpu) }))
  .sort((a, b) => a.step.seconds - b.step.seconds || a.layout.zero - b.layout.zero || again(a) - again(b))

export const called = l => `DP ${l.dp} PP ${l.pp}${l.virtual > 1 ? `×${l.virtual}` : ""} TP ${l.tp}${l.cp > 1 ? ` CP ${l.cp}` : ""}` +
  `${l.ep > 1 ? ` EP ${l.ep}` : ""} b ${l.micro_batch}${["", " ZeRO-1", " ZeRO-2", " FSDP"][l.zero]}${{ "": "", mlp: " recompute MLP", layer: " recompute" }[l.recompute]}`
