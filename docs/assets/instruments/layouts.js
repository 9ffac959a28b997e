// The planner's formulas, as in snippets/planner; tests/test_browser_instruments.py compares their results.
import { computing, fill, hue, joined, sum, upTo } from "./base.js"

export const total = parts => sum(Object.values(parts))
export const over = (n, d) => Math.floor(n / d)
export const gcd = (a, b) => b ? gcd(b, a % b) : a
export const GIB = 2 ** 30

export const tables = await (await fetch(new URL("planner.json", import.meta.url))).json()
const shapeOf = values =>
  ({ kv_heads: values.heads, tied: false, gated: true, experts: 1, active: 1, head_dim: 0, ...values })
const gpuOf = ({ memory_gib, ...values }) => ({ memory: memory_gib * GIB, ...values })
export const layoutOf = values => ({ dp: 1, pp: 1, tp: 1, cp: 1, ep: 1, micro_batch: 1, micro_batches: 1, zero: 1,
  recompute: "", virtual: 1, gradient_bytes: 4, moment_bytes: 4, ...values })
export const recomputed = ["", "mlp", "layer"] // by what is left
export const { memory } = tables.constants
export const shapeIn = ({ model }) => shapeOf(tables.models[model])
export const gpuIn = ({ gpu }) => gpuOf(tables.hardware[gpu])
export const powers = (first, last) => upTo(last - first + 1).map(k => 2 ** (first + k))
export const gpusOf = l => l.dp * l.pp * l.tp * l.cp

// ---- transformer.py

const attentionWidth = s => s.heads * (s.head_dim || over(s.hidden, s.heads))
const kvWidth = s => over(attentionWidth(s), s.heads) * s.kv_heads
const layerMatrices = (s, experts) =>
  s.hidden * (2 * attentionWidth(s) + 2 * kvWidth(s)) + experts * (s.gated ? 3 : 2) * s.hidden * s.ffn

export const flopsPerToken = (s, sequence) => {
  const products = s.layers * layerMatrices(s, s.active) + s.vocabulary * s.hidden
  return 6 * (products + s.layers * 2 * attentionWidth(s) * sequence)
}

// ---- memory.py

export const stages = (s, pp) => {
  const ends = s.layers % pp ? 1 : 0, each = over(s.layers + 2 * ends, pp)
  return upTo(pp).map(i => {
    const layers = each - ends * ((i === 0) + (i === pp - 1))
    return { layers, embedding: i === 0, head: i === pp - 1 }
  })
}

const deepest = (s, pp) => Math.max(...stages(s, pp).map(stage => stage.layers))

export const flying = (l, index) => {
  const ahead = l.pp - index - 1, v = l.virtual
  return Math.min(v === 1 ? 1 + ahead : (2 * ahead + (v - 1) * l.pp + 1) / v, l.micro_batches)
}

const layerTensors = (s, tp, ep) => {
  const h = s.hidden, mlp = (s.gated ? 2 : 1) * h * s.ffn
  const layer = [h, over(h * (attentionWidth(s) + 2 * kvWidth(s)), tp), over(h * attentionWidth(s), tp), h]
  for (let i = Math.ceil(s.experts / ep); i; i--) layer.push(over(mlp, tp), over(h * s.ffn, tp))
  if (s.experts > 1) layer.push(h * s.experts)
  return layer
}

const endTensors = (s, stage, tp) => {
  const ends = over(s.vocabulary * s.hidden, tp)
  const head = s.tied && stage.embedding && stage.head ? [s.hidden] : [s.hidden, ends]
  return [stage.embedding ? [ends] : [], stage.head ? head : []]
}

const heldBy = (s, stage, tp, ep) =>
  sum(endTensors(s, stage, tp).flat()) + stage.layers * layerElements(s, tp, ep)

export const layerElements = (s, tp, ep) => sum(layerTensors(s, tp, ep))

const shardsOf = l => stage => l.zero >= stage ? l.dp * l.cp : 1

export const layerActivationBytes = (s, tokens, tp) => {
  const perToken = 2 * (4 * s.hidden + 2 * attentionWidth(s) + 2 * kvWidth(s)) + 4 * s.heads + 8
  return (perToken + mlpActivationBytes(s, 1, 1)) * tokens / tp
}

export const mlpActivationBytes = (s, tokens, tp) => 2 * (s.gated ? 4 : 2) * s.ffn * s.active * tokens / tp

export const closedForm = (s, l, sequence, index) => {
  const stage = stages(s, l.pp)[index], tokens = l.micro_batch * sequence / l.cp
  const held = heldBy(s, stage, l.tp, l.ep), shared = shardsOf(l)
  const layer = layerActivationBytes(s, tokens, l.tp)
  const mlp = mlpActivationBytes(s, tokens, l.tp)
  const [kept, again] = { "": [layer, 0], mlp: [layer - mlp, mlp], layer: [2 * tokens * s.hidden / l.tp, layer] }[l.recompute]
  const logits = tokens * s.vocabulary / l.tp
  return {
    "parameters": 2 * held / shared(3),
    "gradients": l.gradient_bytes * held / shared(2),
    "optimizer": (4 + 2 * l.moment_bytes) * held / shared(1),
    "activations": flying(l, index) * stage.layers * kept + again,
    "logits": 8 * logits * stage.head,
  }
}

// ---- allocator.py: a block is { size, id, before, after, free, pool }; sizes count 512 bytes

const UNIT = 512, UNITS = 2048 // in a MiB

const allocator = () => {
  const pools = [[], []] // free blocks, by size and id
  let allocated = 0, peak = 0, top = 0, made = 0

  const block = (size, before, after, pool) => ({ size, id: ++made, before, after, free: true, pool })
  const at = (free, size, id) => {
    let low = 0, high = free.length
    while (low < high) {
      const middle = (low + high) >> 1, each = free[middle]
      if (each.size < size || each.size === size && each.id < id) low = middle + 1
      else high = middle
    }
    return low
  }
  const put = each => {
    const free = pools[each.pool]
    free.splice(at(free, each.size, each.id), 0, each)
  }

  const make = asked => {
    const size = Math.max(1, Math.ceil(Math.floor(asked) / UNIT)), pool = size <= UNITS ? 0 : 1
    const free = pools[pool], fits = at(free, size, -1)
    const segment = size >= 10 * UNITS ? Math.ceil(size / (2 * UNITS)) * 2 * UNITS : (pool ? 20 : 2) * UNITS
    const taken = fits < free.length ? free.splice(fits, 1)[0] : block(segment, null, null, pool)
    const rest = taken.size - size
    if (rest > (pool ? UNITS : 0)) {
      const other = block(rest, taken, taken.after, pool)
      if (taken.after) taken.after.before = other
      taken.size = size
      taken.after = other
      put(other)
    }
    taken.free = false
    allocated += taken.size
    top = Math.max(top, allocated)
    peak = Math.max(peak, top)
    return taken
  }

  const drop = (...blocks) => {
    for (const each of blocks) {
      if (!each) continue
      allocated -= each.size
      each.free = true
      const free = pools[each.pool]
      for (const [side, back] of [["before", "after"], ["after", "before"]]) {
        const other = each[side]
        if (!other?.free) continue
        free.splice(at(free, other.size, other.id), 1)
        each.size += other.size
        each[side] = other[side]
        if (other[side]) other[side][back] = each
      }
      put(each)
    }
  }
  const take = () => { // the largest number of bytes since the last call
    const most = Math.max(top, allocated) * UNIT
    top = 0
    return most
  }
  return { make, drop, take, peak: () => peak * UNIT }
}

// ---- memory.py: three steps of one rank under 1F1B; the bytes allocated at most

export const replay = (s, l, sequence, index, note = () => {}) => {
  const { make, drop, take, peak } = allocator(), t = l.tp, stage = stages(s, l.pp)[index]
  const ahead = Math.ceil(flying(l, index) - 1), tokens = l.micro_batch * sequence / l.cp
  const whole = 2 * tokens * s.hidden, x = whole / t, q = 2 * tokens * attentionWidth(s) / t
  const kv = 4 * tokens * kvWidth(s) / t, f = 2 * tokens * s.ffn * s.active / t
  const small = 4 * tokens / t, logits = 2 * tokens * s.vocabulary / t, ends = s.vocabulary * s.hidden / t
  const layer = layerTensors(s, t, l.ep), [front, tail] = endTensors(s, stage, t)
  const tensors = [...front, ...upTo(stage.layers).flatMap(() => layer), ...tail]
  const matrices = layer.filter(n => n !== s.hidden).reverse()
  const buffers = {}
  let leaving = null

  const instead = (size, ...old) => {
    const made = make(size)
    drop(...old)
    return made
  }
  const gathered = name => { if (t > 1) buffers[name] ??= make(whole) }
  const scattered = block => t > 1 ? instead(x, block) : block
  const bucket = (elements, made) => {
    if (l.zero !== 2) return made
    drop(leaving)
    leaving = make(4 * elements)
    drop(...made)
    return []
  }
  const weights = () => l.zero === 3 ? layer.map(n => make(2 * n)) : []

  const layerForward = input => {
    const guests = weights(), normed = make(x), deviation = make(small)
    gathered("gather")
    const qkv = make(q + kv), split = make(q + kv), keys = instead(kv, make(kv))
    const query = instead(q, split), out = make(q), sums = make(small * s.heads)
    const copy = l.micro_batch > 1 ? make(q) : null, product = make(whole)
    drop(copy)
    const cut = scattered(product)
    drop(qkv)
    const middle = instead(x, cut), normed2 = make(x), deviation2 = make(small)
    let [inner, made] = mlpForward()
    if (l.recompute === "mlp") {
      drop(...inner)
      inner = []
    }
    const after = instead(x, made)
    drop(...guests)
    return [[input, normed, deviation, keys, query, out, sums, middle, normed2, deviation2, ...inner], after]
  }

  const mlpForward = () => {
    const inner = [make((s.gated ? 2 : 1) * f), make(f), s.gated ? make(f) : null]
    return [inner, scattered(make(whole))]
  }

  const layerBackward = (kept, gradient) => {
    const [input, normed, deviation, keys, query, out, sums, middle, normed2, deviation2, ...ours] = kept
    const made = [], matrix = () => made.push(make(2 * matrices[made.length])), guests = weights()
    const through = (count, wide, normed, deviation, before) => { // products, to what came in, and the norm
      const all = make(whole), part = t > 1 ? make(x) : null
      while (made.length < count) matrix()
      drop(wide, normed)
      if (part) drop(all)
      gradient = instead(x, instead(x, part ?? all, deviation), gradient, before)
    }
    let inner = ours
    if (!ours.length) {
      const [again, product] = mlpForward()
      drop(product)
      inner = again
    }
    const [merged, act, gated] = inner
    gathered("scatter")
    const down = make(f)
    matrix()
    let wide
    if (gated) {
      drop(gated)
      const left = make(f), right = make(f)
      drop(down, act)
      wide = instead(2 * f, instead(f, left), right, merged)
    } else {
      drop(act)
      wide = instead(f, down, merged)
    }
    through(2, wide, normed2, deviation2, middle)
    const attention = make(q)
    matrix()
    const dQuery = make(q), dKeys = make(kv)
    drop(attention, out, sums)
    const rotated = instead(q, dQuery, query, keys)
    through(matrices.length, instead(q + kv, instead(q + kv, rotated, instead(kv, dKeys))), normed, deviation, input)
    drop(...guests)
    return [gradient, made]
  }

  const forward = () => {
    let at = make(stage.embedding ? whole : x)
    if (stage.embedding && t > 1) at = scattered(instead(whole, at))
    const layers = []
    for (let i = 0; i < stage.layers; i++) {
      let [kept, after] = layerForward(at)
      if (l.recompute === "layer") {
        drop(...kept.slice(1))
        kept = [at]
      }
      layers.push(kept)
      at = after
      note("forward", take)
    }
    if (!stage.head) return [layers, at, null]
    const normed = make(x)
    gathered("gather")
    const loss = [normed, instead(2 * logits, instead(2 * logits, make(logits)))]
    note("head forward", take)
    return [layers, at, loss]
  }

  const backward = ([layers, at, loss]) => {
    let made = [], gradient
    if (loss) {
      const [normed, softmax] = loss, dLogits = instead(logits, softmax), all = make(whole)
      made.push(make(2 * ends))
      drop(dLogits, normed)
      gradient = instead(x, all, at)
      made = bucket(ends, made)
      note("head backward", take)
    } else gradient = instead(x, at)
    for (let kept of layers.reverse()) {
      if (l.recompute === "layer") {
        const [again, after] = layerForward(kept[0])
        drop(after)
        kept = again
      }
      const [next, ours] = layerBackward(kept, gradient)
      gradient = next
      note("backward", take)
      if (l.zero === 3) drop(...ours)
      else made.push(...bucket(sum(layer), ours))
    }
    if (stage.embedding) {
      if (t > 1) gradient = instead(whole, gradient)
      made.push(...bucket(ends, [make(2 * ends)]))
    }
    drop(gradient, leaving, ...made)
    leaving = null
    if (stage.embedding) note("embedding", take)
  }

  const ddp = l.zero === 0 && l.dp > 1, ranks = l.dp * l.cp, shared = shardsOf(l), all = sum(tensors)
  for (const n of tensors) make(2 * n / shared(3))
  let buckets = ddp ? tensors.map(n => make(2 * n)) : []
  make(l.gradient_bytes * all / shared(2))
  make(4 * all / shared(1))
  for (let step = 0; step < (l.zero ? 3 : 2); step++) {
    note("step", take)
    const queue = upTo(ahead).map(forward)
    for (let i = Math.min(l.micro_batches - ahead, 3); i > 0; i--) {
      queue.push(forward())
      backward(queue.shift())
    }
    queue.forEach(backward)
    if (step === 0) {
      if (ddp) {
        drop(...buckets)
        buckets = tensors.toReversed().map(n => make(2 * n))
      }
      for (const n of tensors) {
        make(l.moment_bytes * n / shared(1))
        make(l.moment_bytes * n / shared(1))
      }
    }
    if (l.zero === 1 && ranks > 1) {
      const part = 2 * all / ranks
      const flat = [...upTo(ranks + 1).map(() => make(part)), make(part * ranks)]
      drop(...flat)
    }
  }
  note("optimizer", take)
  return peak()
}

export const withUnseen = replayed => (1 + memory.unseen) * replayed + memory.workspaces * GIB

// ---- traffic.py

const inNode = (ranks, stride, node) => Math.max(1, Math.min(ranks, over(node, stride)))

export const traffic = (s, l, sequence, node) => {
  const { tp: t, cp: c, dp: d, pp: p, ep: e, micro_batches: m } = l
  const layers = deepest(s, p), again = recomputed.indexOf(l.recompute)
  const whole = 2 * l.micro_batch * sequence / c * s.hidden, sent = {}
  const put = (name, bytes, ranks, there, messages) => { sent[name] = { name, bytes, ranks, in_node: there, messages } }
  const calls = (4 + 4 + 2 + 2 * again) * layers * m
  if (t > 1) put("TP", calls * (t - 1) / t * whole, t, inNode(t, 1, node), calls)
  if (c > 1) {
    const keys = 2 * 2 * l.micro_batch * sequence / c * kvWidth(s) / t
    put("CP", (3 + (again === 2)) * (c - 1) * keys * layers * m, c, inNode(c, t, node), layers * m)
  }
  if (p > 1) {
    const cuts = m * l.virtual
    put("PP", 2 * whole / t * cuts, p, inNode(p, t * c * d, node))
  }
  const held = Math.max(...stages(s, p).map(stage => heldBy(s, stage, t, e))), n = d * c
  if (n > 1) {
    const share = (n - 1) / n * held, there = inNode(n, t, node)
    if (l.zero === 3) put("DP", 8 * share * m, n, there, 3 * layers * m)
    else if (l.zero === 2) put("DP", (4 * m + 2) * share, n, there, 2)
    else if (l.zero) put("DP", (8 + 2) * share, n, there, 3)
    else put("DP", 8 * share, n, there, 2)
  }
  if (e > 1) put("EP", (again ? 6 : 4) * layers * m * ((e - 1) / e * whole / t * s.active), e, inNode(e, t * c, node))
  return sent
}

// ---- step_time.py

const linkRate = (sent, gpu, c) => sent.in_node === sent.ranks ? c.link * gpu.link
  : Math.min(c.link * gpu.link, c.network * gpu.network * sent.in_node)

const latency = (sent, c) => sent.in_node < sent.ranks && sent.name !== "EP" ? c.hop * sent.messages * (sent.ranks - 1) : 0

const layerSeconds = (onGpu, launch) => Math.max(onGpu / 3, launch / 2) + Math.max(onGpu * 2 / 3, launch / 2)

export const stepTime = (s, l, sequence, gpu, c = tables.constants.time) => {
  const tokens = l.micro_batch * sequence / l.cp, cut = stages(s, l.pp), m = l.micro_batches
  const sent = traffic(s, l, sequence, gpu.node), layers = deepest(s, l.pp)
  let products = 6 * tokens * layerMatrices(s, s.active), scores = 7 * tokens * sequence * attentionWidth(s)
  if (l.recompute === "layer") [products, scores] = [products * 4 / 3, scores * 9 / 7]
  else if (l.recompute) products += 2 * tokens * (layerMatrices(s, s.active) - layerMatrices(s, 0))
  const compute = products / l.tp / (c.products * gpu.flops), attention = scores / l.tp / (c.attention * gpu.flops)
  const once = 2 * tokens * 60 * s.hidden, mlp = 2 * tokens * 17 * s.ffn * s.active
  const moved = (once + mlp + { "": 0, mlp, layer: once + mlp }[l.recompute] / 3) / l.tp
  const rest = moved / (c.memory * gpu.bandwidth)
  let waiting = 0
  for (const name of ["TP", "CP", "EP"]) {
    const each = sent[name]
    if (each) waiting += (each.bytes / linkRate(each, gpu, c) + latency(each, c)) / layers / m
  }
  const onGpu = compute + attention + rest + waiting
  const launch = c.launch + c.launch_between * l.tp * (l.pp > 1 && l.tp > 1 && gpusOf(l) > gpu.node)
  const logits = tokens * s.vocabulary / l.tp
  const head = 6 * logits * s.hidden / (c.products * gpu.flops) + 54 * logits / (c.memory * gpu.bandwidth)
  const held = cut.map(stage => heldBy(s, stage, l.tp, l.ep))
  const microBatches = layer => cut.map((stage, i) => stage.layers * layer + stage.head * head +
    10 * held[i] / (c.memory * gpu.bandwidth))
  const alone = layerSeconds(onGpu, c.launch), layer = Math.max(alone, launch)
  const times = microBatches(layer), filling = microBatches(alone)
  const slowest = Math.max(...times), most = Math.max(...held), at = times.indexOf(slowest)
  const busy = m * slowest, bubble = (sum(filling) - filling[at]) / l.virtual
  const crossing = sent.PP ? (l.pp - 1) * sent.PP.bytes / m / linkRate(sent.PP, gpu, c) : 0
  let exposed = 0
  if (sent.DP) {
    const late = l.zero < 3 ? latency(sent.DP, c) : 0
    const sending = sent.DP.bytes / linkRate(sent.DP, gpu, c), scatters = sending * 2 * m / (2 * m + 1)
    const backward = slowest * 2 / 3, hidden = [backward, 0, Math.min(m * backward, scatters), busy][l.zero]
    exposed = Math.max(late, sending + late - hidden)
  }
  const optimizer = (34 * most / shardsOf(l)(1) + 16 * most) / (c.memory * gpu.bandwidth)
  const turns = m * cut[at].layers, added = m * 10 * held[at] / (c.memory * gpu.bandwidth)
  return {
    seconds: busy + bubble + crossing + exposed + optimizer + c.fixed,
    parts: {
      "products": turns * compute, "attention": turns * attention, "memory-bound": turns * rest + added,
      "TP, CP, EP": turns * waiting, "launching": turns * (layer - onGpu), "head": m * cut[at].head * head,
      "bubble": bubble + crossing, "DP": exposed, "optimizer": optimizer + c.fixed,
    },
  }
}

// ---- plan.py

export const whyNot = (s, l) => {
  if (s.heads % l.tp || kvWidth(s) % l.tp) return `TP ${l.tp} does not divide ${s.heads} heads`
  if (l.tp > s.kv_heads) return `TP ${l.tp} is more than ${s.kv_heads} heads of keys`
  if (l.pp > s.layers) return `PP ${l.pp} is more than ${s.layers} layers`
  if (s.layers % l.pp && (s.layers + 2) % l.pp) return `PP ${l.pp} divides neither ${s.layers} layers nor ${s.layers + 2}`
  if (l.micro_batches < l.pp - 1) return `PP ${l.pp} has only ${l.micro_batches} micro-batches`
  if (l.virtual > 1) {
    const each = deepest(s, l.pp)
    if (l.pp === 1 || each % l.virtual) return `${l.virtual} chunks do not share ${each} layers of a stage`
    if (l.micro_batches % l.pp) return `interleaved, PP ${l.pp} must divide ${l.micro_batches} micro-batches`
  }
  return ""
}

// ---- bars of parts: [label, value, parts], and lines: [at, words, class]; words(x) is the text of a part's tooltip

export const bars = (svg, width, rows, most, words, lines = []) => {
  const names = Object.keys(rows[0][2]), row = rows.length > 16 ? 17 : 24, left = 108, top = lines.length && 20, scale = (width - left - 8) / (1.06 * most)
  const bottom = top + row * rows.length, out = []
  rows.forEach(([label, value, parts], i) => {
    const y = top + i * row
    out.push(`<text x="0" y="${y + row / 2 + 2}" class="start soft">${label}</text>`,
      `<text x="${left - 6}" y="${y + row / 2 + 2}" class="end">${joined(value)}</text>`)
    let x = left
    names.forEach((name, k) => {
      const wide = parts[name] * scale
      out.push(`<rect x="${x.toFixed(2)}" y="${y}" width="${wide.toFixed(2)}" height="${row - 4}" fill="${hue(k, names.length)}"${parts[name] ? ` data-tip="${label}, ${name}: ${words(parts[name])}"` : ""}/>`)
      x += wide
    })
  })
  for (const [at, words, kind] of lines) {
    const x = (left + at * scale).toFixed(1)
    out.push(`<path d="M${x} 16V${bottom}" class="frame ${kind}"/>`, `<text x="${x}" y="11" class="soft ${kind}">${joined(words)}</text>`)
  }
  let x = 0, y = bottom + 18
  names.forEach((name, k) => {
    const wide = 22 + 6.6 * name.length
    if (x + wide > width) [x, y] = [0, y + 18]
    out.push(`<rect x="${x}" y="${y - 10}" width="12" height="11" fill="${hue(k, names.length)}"/>`,
      `<text x="${x + 16}" y="${y}" class="start soft">${name}</text>`)
    x += wide + 6
  })
  fill(svg, width, y + 6, out.join(""))
}

// ---- a worker for each module, which computes one answer at a time; only the newest question of each place waits

const workers = new Map()

const start = name => {
  const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module", name })
  const waiting = new Map() // for each place, its question and the function that receives the answer
  let asked
  const next = () => {
    const [first] = waiting
    if (!first) return
    waiting.delete(first[0])
    asked = first
    worker.postMessage(first[1].question)
  }
  worker.onmessage = ({ data }) => {
    const [place, { answer }] = asked
    asked = null
    if (!waiting.has(place)) {
      computing(place, "")
      answer(data)
    }
    if (!asked) next()
  }
  return (place, question, answer) => {
    waiting.set(place, { question, answer })
    if (!asked) next()
  }
}

// Calls a function of the module at `url` in a worker. The question is the name of the function and its arguments.
// Until the answer is there, the picture or the table (`what`) shows that it is being computed.
export const ask = (url, place, question, answer, what = "picture") => {
  const name = url.split("?")[0]
  computing(place, what)
  if (!workers.has(name)) workers.set(name, start(name))
  workers.get(name)(place, question, answer)
}
