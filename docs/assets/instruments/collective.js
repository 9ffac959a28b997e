// "Collective algorithms, step by step": the plans of snippets/01_parallelism_strategies/collective_steps.py, played.
// tests/test_browser_instruments.py compares their results.
import { digits, element, fill, hue, inBytes, inSeconds, instrument, picture, sum, upTo, widthOf } from "./base.js"
import { player } from "./moved.js"

const COLLECTIVES = ["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"]
const ALGORITHMS = ["ring", "tree", "doubling", "hierarchical"]
const range = (first, end, by = 1) => upTo(Math.ceil((end - first) / by)).map(i => first + i * by)

// ---- plans: for each step its messages [from, to, chunks, added to what is there]

const powers = n => upTo(5).map(k => 2 ** k).filter(d => d < n)
const back = (plan, add) => plan.toReversed().map(step => step.map(([r, to, chunks]) => [to, r, chunks, add]))
const together = plans => plans[0].map((_, k) => plans.flatMap(plan => plan[k]))

const passRound = (members, blocks, first, add) => {
  const n = members.length
  return upTo(n - 1).map(k => members.map((member, i) =>
    [member, members[(i + 1) % n], blocks[(i + first - k + 2 * n) % n], add]))
}

const spread = (members, chunks) => powers(members.length).map(d =>
  upTo(Math.min(d, members.length - d)).map(i => [members[i], members[i + d], chunks, false]))

const ring = (collective, n) => {
  const ranks = upTo(n), own = ranks.map(c => [c])
  if (collective === "all-reduce") return [...passRound(ranks, own, 0, true), ...passRound(ranks, own, 1, false)]
  if (collective === "reduce-scatter") return passRound(ranks, own, -1, true)
  if (collective === "all-gather") return passRound(ranks, own, 0, false)
  if (collective === "broadcast") {
    return upTo(2 * n - 2).map(k => upTo(n - 1).filter(r => k - r >= 0 && k - r < n)
      .map(r => [r, r + 1, [k - r], false]))
  }
  return range(1, n).map(k => ranks.map(r => [r, (r + k) % n, [r * n + (r + k) % n], false]))
}

const tree = (collective, n) => {
  const down = spread(upTo(n), upTo(n))
  const scatter = powers(n).map(d => upTo(Math.min(d, n - d)).map(r => [r, r + d, range(r + d, n, 2 * d), false]))
  return {
    "all-reduce": [...back(down, true), ...down],
    "reduce-scatter": [...back(down, true), ...scatter],
    "all-gather": [...back(scatter, false), ...down],
    "broadcast": down,
  }[collective]
}

const doubling = (collective, n) => {
  const ranks = upTo(n), same = (a, b, d) => Math.floor(a / d) === Math.floor(b / d)
  if (collective === "all-reduce") return powers(n).map(d => ranks.map(r => [r, r ^ d, ranks, true]))
  if (collective === "all-to-all") {
    const there = (r, s, t, d) => same(s, r, d) && t % d === r % d && (t ^ r) & d
    return powers(n).map(d => ranks.map(r => [r, r ^ d,
      ranks.flatMap(s => ranks.filter(t => there(r, s, t, d)).map(t => s * n + t)), false]))
  }
  const gather = powers(n).map(d => ranks.map(r => [r, r ^ d, ranks.filter(c => same(c, r, d)), false]))
  if (collective === "all-gather") return gather
  if (collective === "reduce-scatter") return back(gather, true)
  const scatter = powers(n).toReversed().map(d => range(0, n, 2 * d).map(r => [r, r + d, range(r + d, r + 2 * d), false]))
  return [...scatter, ...gather]
}

const hierarchical = (collective, n, g) => {
  const nodes = range(0, n, g).map(first => range(first, first + g))
  const rails = upTo(g).map(place => range(place, n, g))
  if (collective === "broadcast") return [...spread(rails[0], upTo(n)), ...together(nodes.map(x => spread(x, upTo(n))))]
  if (collective === "all-to-all") {
    const inside = range(1, g).map(k => upTo(n).map(r => {
      const to = r - r % g + (r + k) % g
      return [r, to, rails[to % g].map(t => r * n + t), false]
    }))
    return [...inside, ...range(1, n / g).map(k => upTo(n).map(r => {
      const to = (r + k * g) % n
      return [r, to, nodes[Math.floor(r / g)].map(s => s * n + to), false]
    }))]
  }
  const halves = (first, add) => [
    together(nodes.map(node => passRound(node, rails, first, add))),
    together(rails.map(rail => passRound(rail, rail.map(c => [c]), first, add)))]
  const scatter = halves(-1, true).flat(), gather = halves(0, false).reverse().flat()
  return { "reduce-scatter": scatter, "all-gather": gather }[collective] ?? [...scatter, ...gather]
}

const why = (collective, algorithm, n, g) => {
  if (algorithm === "tree" && collective === "all-to-all") return "no tree: all pieces would pass through its root"
  if (algorithm === "doubling" && n & (n - 1)) return "needs 2, 4, 8 or 16 ranks"
  if (algorithm === "hierarchical" && !(1 < g && g < n)) return "needs several nodes of several ranks"
}

export const plan = (collective, algorithm, n, g) =>
  ({ ring, tree, doubling, hierarchical })[algorithm](collective, n, g)

// What each rank holds before each step and at the end: for a chunk, the bits of its summands.
const play = (collective, n, steps) => {
  const begin = {
    "all-gather": r => [[r, 1 << r]],
    "all-to-all": r => upTo(n).map(t => [r * n + t, 1 << r]),
    "broadcast": r => (r ? [] : upTo(n).map(c => [c, 1])),
  }[collective] ?? (r => upTo(n).map(c => [c, 1 << r]))
  const states = [upTo(n).map(r => new Map(begin(r)))]
  for (const step of steps) {
    const before = states.at(-1), after = before.map(held => new Map(held))
    for (const [from, to, chunks, add] of step) {
      for (const c of chunks) {
        if (collective === "all-to-all") after[from].delete(c)
        after[to].set(c, before[from].get(c) | (add ? before[to].get(c) : 0))
      }
    }
    states.push(after)
  }
  return states
}

// ---- what is said

const FORMULAS = {
  ring: {
    "all-reduce": "2(n−1) · τ(S/n)", "reduce-scatter": "(n−1) · τ(S/n)", "all-gather": "(n−1) · τ(S/n)",
    "all-to-all": "(n−1) · τ(S/n)", "broadcast": "2(n−1) · τ(S/n)",
  },
  tree: {
    "all-reduce": "2⌈log₂ n⌉ steps of τ(S)",
    "reduce-scatter": "⌈log₂ n⌉ steps of τ(S), and Σ τ(⌈(n−d)/2d⌉ S/n) for d = 1, 2, 4…",
    "all-gather": "Σ τ(⌈(n−d)/2d⌉ S/n) for d = 1, 2, 4…, and ⌈log₂ n⌉ steps of τ(S)",
    "broadcast": "⌈log₂ n⌉ steps of τ(S)",
  },
  doubling: {
    "all-reduce": "log₂ n steps of τ(S)", "reduce-scatter": "Σ τ(dS/n) for d = 1, 2, 4, … n/2",
    "all-gather": "Σ τ(dS/n) for d = 1, 2, 4, … n/2", "all-to-all": "log₂ n steps of τ(S/2)",
    "broadcast": "2 · Σ τ(dS/n) for d = 1, 2, 4, … n/2",
  },
  hierarchical: {
    "all-reduce": "2(g−1) · t(S/g) + 2(n/g−1) · t′(S/n)", "reduce-scatter": "(g−1) · t(S/g) + (n/g−1) · t′(S/n)",
    "all-gather": "(n/g−1) · t′(S/n) + (g−1) · t(S/g)", "all-to-all": "(g−1) · t(S/g) + (n/g−1) · t′(Sg/n)",
    "broadcast": "⌈log₂ n/g⌉ · t′(S) + log₂ g · t(S)",
  },
}

const stepTimes = (steps, n, g, size, inner, outer) => steps.map(step => {
  let slowest = [0, 0, false]
  for (const [from, to, chunks] of step) {
    const far = Math.floor(from / g) !== Math.floor(to / g)
    const [alpha, beta] = far ? outer : inner
    const seconds = alpha + beta * (chunks.length * size / n)
    const later = seconds - slowest[0] || chunks.length - slowest[1] || far - slowest[2]
    if (later > 0) slowest = [seconds, chunks.length, far]
  }
  return slowest
})

const bytesSent = (steps, n, size) => {
  const chunks = upTo(n).map(() => 0)
  for (const [from, , some] of steps.flat()) chunks[from] += some.length
  return chunks.map(count => count * size / n)
}

const least = (collective, n) => ({ "all-reduce": 2 * (n - 1) / n, "broadcast": 1 })[collective] ?? (n - 1) / n
const inAll = values => new Set(values).size === 1 ? `${inBytes(values[0])} each` : values.map(inBytes).join(", ")

export const facts = (collective, algorithm, n, g, size, inner, outer, step) => {
  const steps = plan(collective, algorithm, n, g)
  const times = stepTimes(steps, n, g, size, inner, outer)
  const terms = []
  for (const [, chunks, far] of times) {
    const last = terms.at(-1)
    if (last && last[1] === chunks && last[2] === far) last[0] += 1
    else terms.push([1, chunks, far])
  }
  const seconds = other => sum(stepTimes(plan(collective, other, n, g), n, g, size, inner, outer).map(([each]) => each))
  const total = seconds(algorithm)
  const share = least(collective, n)
  const possible = ALGORITHMS.filter(other => !why(collective, other, n, g))
  return {
    "formula": FORMULAS[algorithm][collective],
    "sum": terms.map(([count, chunks, far]) => `${count} t${far ? "′" : ""}(${inBytes(chunks * size / n)})`).join(" + "),
    "time": inSeconds(total),
    "passed": inSeconds(sum(times.slice(0, step).map(([seconds]) => seconds))),
    "so far": inAll(bytesSent(steps.slice(0, step), n, size)),
    "sent": inAll(bytesSent(steps, n, size)),
    "least": inBytes(share * size),
    "algbw": `${digits(size / total / 1e9)} GB/s`,
    "busbw": `${digits(share * size / total / 1e9)} GB/s`,
    "others": Object.fromEntries(ALGORITHMS.map(other => {
      const reason = why(collective, other, n, g)
      if (reason) return [other, [reason]]
      const there = plan(collective, other, n, g)
      return [other, [`${there.length} steps`, inBytes(Math.max(...bytesSent(there, n, size))), inSeconds(seconds(other))]]
    })),
    "fastest": possible.reduce((best, other) => seconds(other) < seconds(best) ? other : best),
  }
}

// ---- the page

const nodes = ({ ranks }) => [...new Set([...[1, 2, 4, 8].filter(g => g < ranks && ranks % g === 0), ranks])]
const LABELS = { ring: "ring", tree: "tree", doubling: "recursive doubling", hierarchical: "hierarchical (two levels)" }
const microseconds = value => `${value} µs`
const rate = value => `${value} GB/s`
const latencies = () => [0, 1, 2, 5, 10, 20, 50, 100, 200, 500]
const rates = () => [1, 2, 5, 10, 25, 50, 100, 200, 300, 450, 900]
const inside = (first, options) => ({ node }) => node > 1 ? options() : [first] // a link that nobody takes has no choice
const between = (first, options) => ({ ranks, node }) => node < ranks ? options() : [first]

export const controls = [
  { name: "collective", label: "collective", options: () => COLLECTIVES, first: "all-reduce", main: true },
  { name: "ranks", label: "number of ranks, n", options: () => range(2, 17), first: 8, slider: true },
  { name: "node", label: "ranks in a node, g", options: nodes, first: state => state.ranks, slider: true,
    text: (value, { ranks }) => value === ranks ? `all ${value}` : `${value} of ${ranks}` },
  { name: "algorithm", label: "algorithm", first: "ring", main: true, text: name => LABELS[name],
    options: ({ collective, ranks, node }) => ALGORITHMS.filter(each => !why(collective, each, ranks, node)) },
  { name: "size", label: "size of the tensor, S", options: () => upTo(23).map(k => 2 ** (k + 10)), first: 2 ** 26,
    text: inBytes, slider: true, main: true },
  { name: "alpha", label: "latency inside a node, α", options: inside(5, latencies), first: 5, text: microseconds, slider: true },
  { name: "rate", label: "bandwidth inside a node, 1/β", options: inside(450, rates), first: 450, text: rate, slider: true },
  { name: "far-alpha", label: "latency between nodes, α′", options: between(20, latencies), first: 20, text: microseconds, slider: true },
  { name: "far-rate", label: "bandwidth between nodes, 1/β′", options: between(50, rates), first: 50, text: rate, slider: true },
  { name: "step", label: "steps done", first: 0, slider: true, at: true,
    options: ({ collective, algorithm, ranks, node }) => upTo(plan(collective, algorithm, ranks, node).length + 1),
    text: (value, { collective, algorithm, ranks, node }) =>
      `${value} of ${plan(collective, algorithm, ranks, node).length}` },
]

const presets = [
  { name: "8 ranks in one node", values: {} },
  { name: "2 nodes of 8, small tensor", values: { ranks: 16, node: 8, size: 2 ** 16, algorithm: "doubling" } },
  { name: "2 nodes of 8, large tensor", values: { ranks: 16, node: 8, size: 2 ** 28, algorithm: "hierarchical" } },
]

const link = (state, far) => [state[far + "alpha"] / 1e6, 1e-9 / state[far + "rate"]]
const caseOf = state => [state.collective, state.algorithm, state.ranks, state.node, state.size,
  link(state, ""), link(state, "far-"), state.step]

// The place of each rank in the picture of the topology, from 0 to 1 in both directions.
const layout = (algorithm, n, g) => {
  const around = (members, [left, wide]) => members.map((_, i) => {
    const angle = 2 * Math.PI * (i / members.length - 0.25)
    return [left + wide * (1 + Math.cos(angle)) / 2, (1 + Math.sin(angle)) / 2]
  })
  if (algorithm === "hierarchical") { // one ring for each node
    const nodes = n / g, lines = nodes > 4 ? 2 : 1, across = Math.ceil(nodes / lines), gap = across > 2 ? 0.2 : 0.1
    return upTo(nodes).flatMap(k => around(upTo(g), [(k % across + gap) / across, (1 - 2 * gap) / across])
      .map(([x, y]) => [x, lines > 1 ? (Math.floor(k / across) * 0.62 + y * 0.38) : y]))
  }
  if (algorithm !== "tree") return around(upTo(n), [0, 1])
  const places = [], children = r => powers(n).filter(d => d > r && r + d < n).map(d => r + d)
  let leaves = 0
  const visit = (r, depth) => { // a parent is above the middle of its children
    const below = children(r).map(child => visit(child, depth + 1))
    const x = below.length ? (below[0] + below.at(-1)) / 2 : leaves++
    places[r] = [x, depth]
    return x
  }
  visit(0, 0)
  const deepest = Math.max(...places.map(([, y]) => y))
  return places.map(([x, y]) => [leaves > 1 ? x / (leaves - 1) : 0.5, y / deepest])
}

const done = collective => ({
  "all-reduce": "Every rank has the sum of every chunk.", "reduce-scatter": "Rank r has the sum of chunk r.",
  "all-gather": "Every rank has the chunk of every rank.", "all-to-all": "Rank r has piece r of every rank.",
  "broadcast": "Every rank has the data of rank 0.",
})[collective]

// The picture of `state`, `part` of the way into its next step.
const draw = (svg, width, state, part) => {
  const { collective, algorithm, ranks: n, node: g, step } = state
  const steps = plan(collective, algorithm, n, g), states = play(collective, n, steps)
  const now = states[step], next = steps[step] ?? []
  const aside = width >= 560, mapWidth = aside ? Math.min(240, width * 0.32) : width - 8
  const left = 34, pitch = Math.min(100, Math.floor((width - left - (aside ? mapWidth + 24 : 0)) / n))
  const row = Math.max(15, Math.min(26, pitch - 2, 300 / n)), gap = pitch > 30 ? 8 : 2
  const cell = pitch - gap, tall = row - 2
  const mapTop = aside ? 30 : 8, mapHeight = aside ? Math.min(240, n * row + 110) : 104
  const top = 74 + (aside ? 0 : mapHeight + 12), bottom = top + n * row + 6, height = bottom + 78
  const x = rank => left + rank * pitch
  const out = []
  const put = (tag, attributes, text = "") => out.push(`<${tag} ${Object.entries(attributes)
    .map(([name, value]) => `${name}="${typeof value === "number" ? +value.toFixed(2) : value}"`).join(" ")}>${text}</${tag}>`)
  const far = (from, to) => Math.floor(from / g) !== Math.floor(to / g)
  const shuffled = collective === "all-to-all"
  const rowOf = held => new Map(shuffled ? [...held.keys()].sort((a, b) => a - b).map((c, i) => [c, i]) : upTo(n).map(c => [c, c]))
  const rows = now.map(rowOf), later = shuffled ? states[Math.min(step + 1, steps.length)].map(rowOf) : rows
  const square = (at, y, mask, words, tip) => {
    const from = upTo(n).filter(i => mask >> i & 1)
    from.forEach((source, i) => put("rect", { x: at + cell * i / from.length, y, width: cell / from.length,
      height: tall, fill: hue(source, n), ...tip && { "data-tip": tip } }))
    if (words !== undefined && cell >= 16) put("text", { x: at + cell / 2, y: y + tall / 2 + 4, class: "on" }, words)
  }

  // the topology: all links that the algorithm uses, and the messages of the next step
  const radius = Math.min(11, 60 / Math.sqrt(n)), mapLeft = aside ? left + n * pitch + 22 : 4
  const spot = layout(algorithm, n, g).map(([u, v]) =>
    [mapLeft + radius + u * (mapWidth - 2 * radius - 2), mapTop + radius + v * (mapHeight - 2 * radius)])
  for (const first of algorithm === "hierarchical" ? range(0, n, g) : []) {
    const places = spot.slice(first, first + g), [xs, ys] = [0, 1].map(i => places.map(place => place[i]))
    const [x, y] = [Math.min(...xs) - radius - 1, Math.min(...ys) - radius - 1]
    put("rect", { x, y, width: Math.max(...xs) + radius + 1 - x, height: Math.max(...ys) + radius + 1 - y, rx: radius, class: "node" })
  }
  const used = new Set(steps.flat().map(([a, b]) => `${Math.min(a, b)} ${Math.max(a, b)}`))
  for (const [a, b] of [...used].map(pair => pair.split(" "))) {
    put("path", { d: `M${spot[a].map(Math.round)}L${spot[b].map(Math.round)}`, class: "line" })
  }
  for (const [from, to, chunks] of next) {
    const [[ax, ay], [bx, by]] = [spot[from], spot[to]], long = Math.hypot(bx - ax, by - ay)
    const along = length => [ax + (bx - ax) * length / long, ay + (by - ay) * length / long].map(v => v.toFixed(1))
    put("path", { d: `M${along(radius)}L${along(long - radius - 3)}`, class: far(from, to) ? "arc far" : "arc",
      "marker-end": `url(#${far(from, to) ? "far" : "near"}${svg.dataset.of})` })
    const [x, y] = along(radius + (long - 2 * radius) * part)
    if (part) put("circle", { cx: x, cy: y, r: 2.5 + Math.sqrt(chunks.length), fill: hue(from, n) })
  }
  spot.forEach(([cx, cy], rank) => {
    const sends = next.filter(([from]) => from === rank).map(([, to, chunks]) =>
      ` sends ${inBytes(chunks.length * state.size / n)} to rank ${to}${far(rank, to) ? " in a different node" : ""}`)
    put("circle", { cx, cy, r: radius, fill: hue(rank, n), ...!part && { "data-tip": `rank ${rank}${sends.join(", and") || " sends nothing in the next step"}` } })
    put("text", { x: cx, y: cy + 4, class: "on" }, rank)
  })

  for (const first of g < n ? range(0, n, g) : []) {
    put("rect", { x: x(first) - gap / 2 - 0.5, y: top - 22, width: g * pitch - 1, height: bottom - top + 22, rx: 4, class: "node" })
  }
  upTo(n).forEach(rank => put("text", { x: x(rank) + cell / 2, y: top - 7 }, pitch > 46 ? `rank ${rank}` : rank))
  if (!next.length) put("text", { x: (left + x(n) - gap) / 2, y: top - 34, class: "chosen" }, done(collective))
  if (!shuffled) put("text", { x: 0, y: top - 7, class: "start soft" }, "chunk")
  if (!shuffled) upTo(n).forEach(c => put("text", { x: left - 6, y: top + c * row + tall / 2 + 4, class: "end soft" }, c))
  for (const [from, to] of next) { // who sends to whom
    const [a, b] = [x(from) + cell / 2, x(to) + cell / 2]
    const high = top - 24 - Math.min(44, 10 + 8 * Math.sqrt(Math.abs(from - to) - 1) * 1.6)
    const near = a + Math.sign(b - a) * 3, off = b - Math.sign(b - a) * 3
    put("path", { d: `M${near} ${top - 20}C${near} ${high} ${off} ${high} ${off} ${top - 21}`,
      class: far(from, to) ? "arc far" : "arc", "marker-end": `url(#${far(from, to) ? "far" : "near"}${svg.dataset.of})` })
  }
  const flying = new Set(part ? next.flatMap(([from, , chunks]) => chunks.map(c => `${from} ${c}`)) : [])
  now.forEach((held, rank) => {
    for (const c of shuffled ? [] : upTo(n)) {
      if (!held.has(c)) put("rect", { x: x(rank) + 0.5, y: top + c * row + 0.5, width: cell - 1, height: tall - 1, class: "empty" })
    }
    for (const [c, mask] of held) {
      if (shuffled && flying.has(`${rank} ${c}`)) continue
      const y = rows[rank].get(c), moved = later[rank].get(c) ?? y
      square(x(rank), top + (y + (moved - y) * part) * row, mask, shuffled ? c % n : undefined,
        part ? "" : shuffled ? `rank ${rank} has a piece from rank ${Math.floor(c / n)} for rank ${c % n}`
          : `rank ${rank}, chunk ${c}: data of ${upTo(n).filter(i => mask >> i & 1).map(i => `rank ${i}`).join(", ")}`)
    }
  })
  for (const [from, to, chunks] of next) {
    for (const c of chunks) {
      const [y, end] = [top + rows[from].get(c) * row, top + later[to].get(c) * row]
      const at = x(from) + (x(to) - x(from)) * part
      if (part) square(at, y + (end - y) * part, now[from].get(c), shuffled ? c % n : undefined)
      put("rect", { x: at + 0.5, y: y + (end - y) * part + 0.5, width: cell - 1, height: tall - 1, class: "frame" })
    }
  }
  const sent = bytesSent(steps.slice(0, step), n, 1), going = bytesSent(next.length ? [next] : [], n, part)
  const most = Math.max(...bytesSent(steps, n, 1))
  sent.forEach((done, rank) => {
    const tallest = 44, so = (done + going[rank]) / most * tallest
    put("rect", { x: x(rank), y: bottom + 6 + tallest - so, width: cell, height: so, class: "bar", ...!part && { "data-tip": `rank ${rank} has sent ${inBytes(done * state.size)}` } })
    if (pitch >= 46) put("text", { x: x(rank) + cell / 2, y: bottom + 66, class: "soft" }, inBytes(done * state.size).replace(" ", "\u00a0"))
  })
  put("path", { d: `M${left} ${bottom + 50.5}H${x(n) - gap}`, class: "line" })
  if (pitch < 46) {
    const [less, more] = [Math.min, Math.max].map(one => inBytes(one(...sent) * state.size))
    put("text", { x: left, y: bottom + 68, class: "start soft" }, `sent so far: ${less === more ? `${less} by each rank` : `${less} to ${more} by a rank`}`)
  }
  const marker = (id, colour) => `<marker id="${id}${svg.dataset.of}" viewBox="0 0 6 6" refX="4" refY="3" markerWidth="6" markerHeight="6"
    orient="auto"><path d="M0 0L6 3L0 6z" fill="var(${colour})"/></marker>`
  const wide = aside ? mapLeft + mapWidth + 2 : Math.max(width, x(n) - gap / 2 + 1)
  fill(svg, wide, height, `<defs>${marker("near", "--blue")}${marker("far", "--orange")}</defs>${out.join("")}`)
}

export const start = place => {
  const bar = element("div", { class: "instrument-foot" })
  const { svg, list, compare, output } = picture("All algorithms, with these sizes and links",
    ["algorithm", "number of steps", "bytes that the busiest rank sends", "time"])
  svg.dataset.of = place.id

  const show = (state, tell) => {
    const { collective, algorithm, ranks, step } = state
    const said = facts(...caseOf(state))
    const steps = plan(collective, algorithm, ranks, state.node)
    draw(svg, widthOf(place), state, 0)
    const next = steps[step]
    const sizes = next && [...new Set(next.map(([, , chunks]) => inBytes(chunks.length * state.size / ranks)))].join(" and ")
    const far = next?.filter(([from, to]) => Math.floor(from / state.node) !== Math.floor(to / state.node)).length
    tell(next
      ? `After ${step} of ${steps.length} steps, ${step ? said.passed : "0 s"} of ${said.time} have passed. The next step sends ${next.length} ${next.length > 1 ? "messages" : "message"} of ${sizes}, ${far && far < next.length ? `${far} of them between nodes` : far ? "between nodes" : "inside a node"}.`
      : `All ${steps.length} steps together take ${said.time}. ${done(collective)}`)
    svg.setAttribute("aria-label", `${ranks} columns, one for each rank, with what it holds after ${step} of ${steps.length} steps of ${collective}, with the algorithm ${LABELS[algorithm]}. ${
      next ? `Next, ${next.slice(0, 4).map(([from, to]) => `rank ${from} sends to ${to}`).join(", ")}${next.length > 4 ? ", and so on" : ""}.` : ""}`)
    const rows = [
      ["time, T", `${said.formula} = ${said.sum} = ${said.time}`],
      ["bytes that each rank has sent so far", said["so far"]], ["bytes that each rank sends in total", said.sent],
      ["minimum that the busiest rank must send", said.least],
      ["algorithm bandwidth, algbw", said.algbw], ["bus bandwidth, busbw", said.busbw]]
    list(rows)
    const short = Object.entries(said.others).map(([name, cells]) => [LABELS[name], cells.map(words => words.replace(" steps", ""))])
    compare(Object.fromEntries(short), LABELS[algorithm], LABELS[said.fastest], 2, "fastest")
    return ["python collective_steps.py", `--collective ${collective}`, `--algorithm ${algorithm}`, `--ranks ${ranks}`,
      `--node ${state.node}`, `--size ${inBytes(state.size).replace(" ", "")}`, `--alpha ${state.alpha}`, `--rate ${state.rate}`,
      `--far-alpha ${state["far-alpha"]}`, `--far-rate ${state["far-rate"]}`, `--step ${step}`].join(" ")
  }
  const made = instrument(place, { controls, presets, show, output, bar })
  const { state } = made
  player(place, bar, "step", made, () => plan(state.collective, state.algorithm, state.ranks, state.node).length,
    part => draw(svg, widthOf(place), state, part), { begins: true })
}

for (const place of document.querySelectorAll("#collective.instrument")) start(place)
