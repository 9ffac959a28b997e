// "Serving": the server of snippets/09_inference/serving_load.py, live.
// tests/test_browser_instruments.py compares their results.
import { digits, drawing, element, fill, inSeconds, instrument, picture, upTo, widthOf } from "./base.js"
import { player } from "./moved.js"

const LOADS = upTo(14).map(i => i + 1)

// ---- the server, in whole nanoseconds

class Dice {
  constructor(seed) { this.state = Math.imul(2654435761, seed) >>> 0 }

  uniform() {
    this.state = Math.imul(1664525, this.state) + 1013904223 >>> 0
    return this.state >>> 12
  }

  exponential() { // with mean 2²⁰, by von Neumann
    for (let whole = 0; ; whole++) {
      const first = this.uniform()
      let last = first, falling = 1
      for (let drawn = this.uniform(); drawn < last; drawn = this.uniform()) {
        last = drawn
        falling += 1
      }
      if (falling % 2) return whole * 2 ** 20 + first
    }
  }
}

const arrivals = (s, rate) => {
  const dice = new Dice(s.dice)
  let clock = 0
  return upTo(s.requests).map(number => {
    clock += dice.exponential()
    const [prompt, answer] = [s.prompt, s.answer]
      .map(mean => Math.min(4 * mean, 1 + Math.floor(dice.exponential() * mean / 2 ** 20)))
    const arrival = Math.floor(clock * 1e6 / (rate * 2 ** 20)) * 1000
    return { number, arrival, prompt, answer, done: 0, length: 0, blocks: 0, first: 0, last: 0, worst: 0,
      events: [[arrival, "queue"]] }
  })
}

const left = r => r.prompt + r.done - r.length

// All requests, or the server as it is at the end of the step that `until` falls in.
export const serve = (s, rate, until = Infinity) => {
  const requests = arrivals(s, rate), waiting = [...requests]
  let running = [], clock = 0, steps = 0, free = Math.floor(s.cache / s.block), preempted = 0, again = 0, forBlocks = 0, forSlot = 0
  while (waiting.length || running.length) {
    if (!running.length) clock = Math.max(clock, waiting[0].arrival)
    if (clock > until) break
    while (waiting.length && running.length < s.slots && waiting[0].arrival <= clock) {
      const r = waiting[0]
      const answer = s.admit === "as-needed" ? r.done : 4 * s.answer - 1
      const blocks = Math.ceil((r.prompt + answer) / s.block)
      if (blocks > free) break
      running.push(waiting.shift())
      r.blocks = blocks
      free -= blocks
      r.events.push([clock, "prefill"])
    }
    const begin = clock, waits = waiting.length && waiting[0].arrival <= clock, noSlot = running.length === s.slots
    for (let ready = 0; ready < running.length; ready++) { // whose last block is full gets one more
      const r = running[ready]
      if (left(r) !== 1 || r.length !== r.blocks * s.block) continue
      if (!free) { // the latest gives way, and will be computed again
        const late = running.pop()
        free += late.blocks
        preempted += 1
        again += late.length
        late.length = late.blocks = 0
        late.events.push([clock, "queue"])
        waiting.unshift(late)
        ready -= 1
        continue
      }
      r.blocks += 1
      free -= 1
    }
    const room = s.budget || Infinity
    let tokens = 0, context = 0
    const run = r => {
      const piece = Math.min(left(r), room - tokens)
      r.length += piece
      tokens += piece
      if (piece) context += r.length
    }
    for (const r of running) if (left(r) === 1) run(r) // decodes first
    for (const r of running) if (left(r) > 1) run(r)
    clock += 1000 * (s.c0 + s.c1 * tokens) + s.c2 * context
    steps += 1
    if (waits && noSlot) forSlot += clock - begin
    else if (waits) forBlocks += clock - begin
    let ended = false
    for (const r of running) {
      if (left(r)) continue
      if (r.events.at(-1)[1] === "prefill") r.events.push([clock, "decode"])
      if (r.done) r.worst = Math.max(r.worst, clock - r.last)
      else r.first = clock
      r.last = clock
      r.done += 1
      if (r.done === r.answer) {
        free += r.blocks
        r.events.push([clock, "done"])
        ended = true
      }
    }
    if (ended) running = running.filter(r => r.done < r.answer)
  }
  return { requests, waiting, running, clock, steps, free, preempted, again, forBlocks, forSlot }
}

// ---- what is said

const nearestRank = (values, share) => values.sort((a, b) => a - b)[Math.ceil(share * values.length / 100) - 1]

export const measure = (s, rate) => {
  const run = serve(s, rate)
  const ttft = run.requests.map(r => r.first - r.arrival), worst = run.requests.map(r => r.worst)
  const kept = ttft.filter((wait, i) => wait <= 1e6 * s.ttft && worst[i] <= 1e6 * s.gap).length
  const seconds = run.clock / 1e9
  return {
    tokens: run.requests.reduce((sum, r) => sum + r.answer, 0) / seconds,
    requests: run.requests.length / seconds, goodput: kept / seconds, kept,
    ttft: nearestRank(ttft, 50), ttft99: nearestRank(ttft, 99), gap: nearestRank(worst, 50), gap99: nearestRank(worst, 99),
    preempted: run.preempted, again: run.again, clock: run.clock, steps: run.steps, forBlocks: run.forBlocks, forSlot: run.forSlot,
  }
}

const percent = (part, whole) => `${(Math.floor((2000 * part + whole) / (2 * whole)) / 10).toFixed(1)}%`
const time = ns => inSeconds(ns / 1e9)

// Measuring all loads takes a moment, and moving through a run changes none of them.
let known = ["", {}]
const measured = (s, loads) => {
  const key = JSON.stringify([{ ...s, rate: 0, at: 0 }, loads])
  if (known[0] !== key) known = [key, Object.fromEntries(loads.map(load => [load, measure(s, load)]))]
  return known[1]
}

// The single change after which most requests are in time, and what is measured after it.
const changes = ({ budget, slots, cache }) => [["twice the cache", { cache: 2 * cache }],
  !budget || 2 * slots <= budget ? ["twice the slots", { slots: 2 * slots }] : 0,
  budget && ["twice the token budget", { budget: 2 * budget }],
  Math.floor(budget / 2) >= slots && ["half the token budget", { budget: Math.floor(budget / 2) }],
  !budget && slots <= 512 && ["a token budget of 512", { budget: 512 }]].filter(Boolean)
let best = ["", []]
const bestChange = (s, kept) => {
  const key = JSON.stringify({ ...s, at: 0 })
  if (best[0] !== key) {
    best = [key, changes(s).map(([name, change]) => [name, measure({ ...s, ...change }, s.rate)])
      .reduce((most, each) => each[1].kept > most[1].kept ? each : most, ["none", { kept }])]
  }
  return best[1]
}

export const facts = (s, loads) => {
  const every = measured(s, loads), mine = every[s.rate], [helps, after] = bestChange(s, mine.kept)
  const moment = Math.floor(mine.clock * s.at / 200)
  const now = serve(s, s.rate, moment)
  const prefills = now.running.filter(r => left(r) > 1).length
  const waits = now.waiting.filter(r => r.arrival <= now.clock).length
  const sum = name => now.running.reduce((total, r) => total + r[name], 0)
  const blocks = sum("blocks")
  return {
    "throughput": `${digits(mine.tokens)} tokens/s`,
    "ttft": `${time(mine.ttft)} and ${time(mine.ttft99)}`,
    "gap": `${time(mine.gap)} and ${time(mine.gap99)}`,
    "kept": percent(mine.kept, s.requests),
    "again": `${mine.preempted} (${mine.again} tokens computed again)`,
    "waits": `${percent(mine.forBlocks, mine.clock)} for blocks, ${percent(mine.forSlot, mine.clock)} for a slot`,
    "helps": helps + (helps === "none" ? "" : `: ${percent(after.kept, s.requests)} in time, p99 of TTFT ${time(after.ttft99)}`),
    "moment": `${time(moment)} of ${time(mine.clock)}`,
    "now": `${waits} waiting, ${prefills} in prefill, ${now.running.length - prefills} in decode`,
    "blocks": `${blocks} of ${Math.floor(s.cache / s.block)}`,
    "filled": blocks ? percent(sum("length"), blocks * s.block) : "none",
    "loads": Object.fromEntries(loads.map(load => [load, [digits(every[load].tokens),
      ...["ttft", "ttft99", "gap99"].map(name => time(every[load][name])), digits(every[load].goodput)]])),
    "best": String(loads.reduce((best, load) => every[load].goodput > every[best].goodput ? load : best)),
  }
}

// ---- the page

const FIXED = { requests: 200 }
const powers = (from, to) => upTo(to - from + 1).map(i => 2 ** (from + i))
const slide = (name, label, options, first, text) => ({ name, label, options, first, text, slider: true })
const tokens = value => `${value} tokens`, micro = value => inSeconds(value / 1e6), milli = value => `${value} ms`
export const controls = [
  { ...slide("rate", "requests that arrive per second", () => LOADS, 6), main: true, wide: "wide" },
  slide("prompt", "mean length of a prompt", () => [50, 100, 200, 500, 1000, 2000, 4000], 1000, tokens),
  slide("answer", "mean length of an answer", () => [20, 50, 100, 200, 500], 200, tokens),
  slide("slots", "largest batch (slots)", () => powers(0, 7), 32),
  slide("budget", "token budget of a step", ({ slots }) => [64, 128, 256, 512, 1024, 2048, 0].filter(each => !each || each >= slots), 512,
    value => value ? tokens(value) : "whole prompts"),
  slide("cache", "size of the KV cache", ({ prompt, answer }) => powers(12, 19).filter(each => each >= 4 * (prompt + answer)), 32768, tokens),
  slide("block", "size of a cache block", () => powers(0, 10), 16, tokens),
  { name: "admit", label: "when blocks are reserved", options: () => ["as-needed", "worst-case"], first: "as-needed",
    text: value => ({ "as-needed": "as needed", "worst-case": "at once, for the longest answer" })[value] },
  slide("ttft", "limit for the first token", () => [100, 200, 500, 1000, 2000, 5000], 500, milli),
  slide("gap", "limit for a gap between tokens", () => [15, 20, 30, 50, 100, 200, 500], 50, milli),
  slide("c0", "fixed time of a step, c₀", () => [500, 1000, 2000, 4500, 9000, 18000], 9000, micro),
  slide("c1", "time for each token in a step, c₁", () => [0, 5, 10, 15, 30, 60, 120], 30, micro),
  slide("c2", "time for each cached token, c₂", () => [0, 10, 20, 39, 78, 156, 312], 78, value => `${value} ns`),
  slide("dice", "random seed", () => upTo(20).map(i => i + 1), 3),
  { ...slide("at", "moment that is shown", () => upTo(201), 100, value => `${value / 2}% of the run`), at: true },
]
const presets = [
  { name: "light load: 3 per second", values: { rate: 3 } },
  { name: "highest goodput: 6 per second", values: {} },
  { name: "overload: 10 per second", values: { rate: 10 } },
]

// The run from a little before the moment on: a row is a request, oldest first. Those that run or wait come before those that are done.
const ROWS = 20
const drawRun = (put, width, s, run, moment) => {
  const row = 7, top = 14, span = run.clock / run.steps * 250, from = moment - span
  const x = at => Math.max(0, (at - from) / span * width)
  const all = run.requests.filter(r => r.arrival <= moment && r.events.at(-1)[0] >= from)
  const stateOf = r => r.events.findLast(([at]) => at <= moment)[1]
  const [waiting, done] = ["queue", "done"].map(state => all.filter(r => stateOf(r) === state))
  const running = all.filter(r => ["prefill", "decode"].includes(stateOf(r)))
  const first = waiting.slice(0, Math.max(6, ROWS - running.length)), now = running.slice(first.length - ROWS)
  const shown = new Set([...now, ...first, ...done.slice(Math.min(done.length, done.length + now.length + first.length - ROWS))])
  all.filter(r => shown.has(r)).forEach((r, i) => {
    r.events.forEach(([begin, kind], k) => {
      const end = Math.min(moment, r.events[k + 1]?.[0] ?? moment)
      if (kind === "done" || end < from || begin > moment) return
      put("rect", { x: x(begin), y: top + i * row, width: Math.max(0.4, x(end) - x(begin)), height: kind === "queue" ? 2 : row - 1.5,
        class: { queue: "live", prefill: "op-B", decode: "op-F" }[kind],
        "data-tip": `request ${r.number}, with a prompt of ${r.prompt} tokens and an answer of ${r.answer}: ${{ queue: "waiting", prefill: "prefill", decode: "decode" }[kind]} for ${time(end - begin)}` })
    })
  })
  put("path", { d: `M0 ${top + ROWS * row}H${width}`, class: "line" })
  const more = all.length - shown.size
  put("text", { x: 0, y: 9, class: "start soft" }, `requests in the last ${time(span)}${more > 0 ? `; ${more} more are not shown` : ""}`)
  put("text", { x: width, y: 9, class: "end soft" }, time(moment))
  let at = 0
  for (const [kind, words] of [["live", "waiting"], ["op-B", "prefill"], ["op-F", "decode"]]) {
    put("rect", { x: at, y: top + ROWS * row + 8, width: 12, height: kind === "live" ? 3 : 9, class: kind })
    put("text", { x: at + 16, y: top + ROWS * row + 17, class: "start soft" }, words)
    at += 28 + 6.4 * words.length
  }
  return top + ROWS * row + 40
}

// The cache as a strip of tokens, cut into lines; a sequence has whole blocks of it.
const drawCache = (put, width, top, s, now) => {
  const lines = Math.min(8, s.cache / s.block), line = s.cache / lines, tall = 9
  put("text", { x: 0, y: top - 5, class: "start soft" },
    `KV cache: ${now.running.reduce((total, r) => total + r.blocks, 0)} of ${Math.floor(s.cache / s.block)} blocks are taken`)
  const stretch = (begin, end, attributes) => {
    for (let i = Math.floor(begin / line); i * line < end; i++) {
      const [a, b] = [Math.max(begin, i * line), Math.min(end, (i + 1) * line)].map(each => (each - i * line) / line * width)
      put("rect", { x: a, y: top + i * (tall + 2), width: b - a, height: tall, ...attributes })
    }
  }
  stretch(0, s.cache, { class: "empty" })
  let at = 0
  now.running.forEach((r, i) => {
    stretch(at, at + r.length, { class: left(r) > 1 ? "op-B" : "op-F", opacity: i % 2 ? 0.65 : 1,
      "data-tip": `request ${r.number}: ${r.length} of ${r.blocks * s.block} tokens in its blocks are filled` })
    stretch(at, at + r.blocks * s.block, { class: "held" })
    at += r.blocks * s.block
  })
  const wide = s.block / line * width
  if (wide >= 4) {
    put("path", { class: "held", d: upTo(Math.floor(at / s.block)).map(i =>
      `M${(i * s.block % line / line * width).toFixed(1)} ${top + Math.floor(i * s.block / line) * (tall + 2)}v${tall}`).join("") })
  }
  return top + lines * (tall + 2) + 26
}

// The waiting times of all requests on a logarithmic axis, and the percentage of the requests that are in time.
const drawWaits = (put, x0, top, width, s, run, mine, moment) => {
  const beside = x0 > 0, [low, high] = [1e7, 2e10]
  const x = (value, from, across) => from + Math.max(0, Math.min(1, Math.log(value / low) / Math.log(high / low))) * across
  put("text", { x: x0, y: top + 11, class: "start chosen" }, `${percent(mine.kept, s.requests)} of requests in time`)
  put("text", { x: x0, y: top + 28, class: "start soft" }, `goodput: ${digits(mine.goodput)} requests/s`)
  const across = beside ? width : (width - 14) / 2
  const strips = [["time to first token", mine.ttft, mine.ttft99, s.ttft, r => r.first - r.arrival],
    [beside ? "longest gap between tokens" : "longest token gap", mine.gap, mine.gap99, s.gap, r => r.worst]]
  strips.forEach(([title, half, most, limit, wait], k) => {
    const from = beside ? x0 : k * (across + 14), y = top + (beside ? 46 + 92 * k : 46), tall = 32, edge = x(1e6 * limit, from, across)
    put("text", { x: from, y: y + 6, class: "start" }, title)
    put("text", { x: from, y: y + 21, class: "start soft" }, `median ${time(half)}, p99 ${time(most)}`)
    put("rect", { x: from, y: y + 27, width: across, height: tall, class: "node", "data-tip":
      `${title}: half of the requests need at most ${time(half)}, and 99% need at most ${time(most)}. The limit is ${limit} ms.` })
    put("rect", { x: edge, y: y + 27, width: from + across - edge, height: tall, class: "live", style: "pointer-events: none" })
    for (const r of run.requests) {
      put("circle", { cx: x(wait(r), from + 2, across - 4), cy: y + 31 + r.number * 7 % 13 * 2, r: 1.6, class: r.first <= moment ? "dot" : "dot faint", style: "pointer-events: none" })
    }
    for (const [value, kind] of [[half, "arc thick thin"], [most, "arc thick"]]) {
      put("path", { d: `M${x(value, from, across)} ${y + 25}v${tall + 4}`, class: kind, style: "pointer-events: none" })
    }
    put("text", { x: Math.min(from + across - 32, Math.max(from + 32, edge)), y: y + 27 + tall + 13, class: "soft" }, `limit ${limit} ms`)
    put("path", { d: `M${edge} ${y + 27}v${tall + 4}`, class: "frame dashed given", style: "pointer-events: none" })
  })
  return top + (beside ? 46 + 92 + 92 : 46 + 92)
}

const drawCurves = (put, width, top, s, every) => {
  const beside = width >= 560, across = beside ? (width - 30) / 2 : width, tall = 110
  const panel = (x0, y0, title, low, high, log, ticks, curves) => {
    const axis = 42
    const x = load => x0 + axis + (load - 1) / 13 * (across - axis - 6)
    const y = value => {
      const part = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low)
      return y0 + tall - Math.max(0, Math.min(1, part)) * tall
    }
    put("text", { x: x0, y: y0 - 22, class: "start" }, title)
    for (const [value, words] of ticks) {
      put("path", { d: `M${x0 + axis} ${y(value)}H${x0 + across - 6}`, class: "line" })
      put("text", { x: x0 + axis - 4, y: y(value) + 4, class: "end soft" }, words)
    }
    put("path", { d: `M${x(s.rate)} ${y0}V${y0 + tall}`, class: "frame" })
    let key = x0 + axis
    for (const [words, kind, points] of curves) {
      put("path", { d: `M${LOADS.map(load => `${x(load).toFixed(1)} ${y(points(every[load])).toFixed(1)}`).join("L")}`, class: `arc thick ${kind}` })
      put("path", { d: `M${key} ${y0 - 9}h14`, class: `arc thick ${kind}` })
      put("text", { x: key + 18, y: y0 - 5, class: "start soft" }, words)
      key += 26 + 6 * words.length
    }
    for (const load of LOADS) {
      put("rect", { x: x(load) - (across - axis - 6) / 26, y: y0, width: (across - axis - 6) / 13, height: tall, class: "grip", "data-load": load, style: "cursor: pointer",
        "data-tip": `${load} requests per second. ${curves.map(([words, , points]) => `${words}: ${log ? time(points(every[load])) : digits(points(every[load]))}`).join(", ")}` })
    }
    for (const load of [1, 4, 7, 10, 14]) put("text", { x: x(load), y: y0 + tall + 14, class: "soft" }, load)
    put("text", { x: x0 + across - 6, y: y0 + tall + 28, class: "end soft" }, "requests that arrive per second")
  }
  panel(0, top + 22, "Waiting times", 1e7, 2e10, true, [[1e7, "10 ms"], [1e8, "0.1 s"], [1e9, "1 s"], [1e10, "10 s"]],
    [["TTFT, median", "thin", m => m.ttft], ["TTFT, p99", "", m => m.ttft99], ["gap, p99", "far", m => m.gap99]])
  const [x0, y0] = beside ? [across + 30, top + 22] : [0, top + tall + 94]
  panel(x0, y0, "Answered requests per second", 0, 14, false, [[0, "0"], [7, "7"], [14, "14"]],
    [["all", "thin", m => m.requests], ["in time (goodput)", "", m => m.goodput]])
  return y0 + tall + 34
}

const draw = (svg, second, width, s, part, brief) => {
  const run = serve(s, s.rate), moment = run.clock * (s.at + part) / 200
  const out = []
  const put = (tag, attributes, text = "") => out.push(`<${tag} ${Object.entries(attributes)
    .map(([name, value]) => `${name}="${typeof value === "number" ? +value.toFixed(2) : value}"`).join(" ")}>${text}</${tag}>`)
  const every = measured(s, LOADS), beside = width >= 560, across = beside ? width - 214 : width
  const cache = drawRun(put, across, s, run, moment)
  const end = drawCache(put, across, cache, s, serve(s, s.rate, moment)) - 14
  const foot = brief && !beside ? 0 : drawWaits(put, beside ? across + 24 : 0, beside ? 0 : end, beside ? 190 : width, s, run, every[s.rate], moment)
  fill(svg, width, Math.max(foot, end), out.splice(0).join(""))
  if (part || brief) return // the curves do not move
  fill(second, width, drawCurves(put, width, 10, s, every), out.join(""))
}

export const start = async place => {
  // A run is slow until the browser has compiled its code. So compute one run at a time at first: the page stays responsive.
  const first = { ...FIXED, ...Object.fromEntries(controls.map(({ name, first }) => [name, first])) }
  for (const load of LOADS) {
    measure(first, load)
    await new Promise(done => setTimeout(done))
  }

  const brief = place.dataset.gallery !== undefined, bar = element("div", { class: "instrument-foot" }), { svg: second, box } = drawing("Waiting times and goodput at all loads")
  const { svg, list, compare, output } = picture("The same server at all loads (requests per second)",
    ["load", "tokens/s", "TTFT, median", "TTFT, p99", "gap, p99", "goodput"], { below: [box] })
  const show = (state, tell) => {
    const s = { ...FIXED, ...state }, said = facts(s, LOADS)
    draw(svg, second, widthOf(place), s, 0, brief)
    const [blocks, slot] = said.waits.split(", ").map(parseFloat), [half, most] = said.ttft.split(" and ")
    const limit = parseFloat(said.kept) >= 99 ? "Nothing limits the server."
      : `${Math.max(blocks, slot) < 5 ? "The time of a step limits the server." : blocks > slot ? `The full cache limits the server: requests wait for free blocks in ${blocks}% of the run.` : `The slots limit the server: requests wait for a free slot in ${slot}% of the run.`}${
        said.helps === "none" ? "" : ` The single change with the most requests in time is ${said.helps}.`}`
    tell(`With ${s.rate} requests per second, ${said.kept} of the requests are in time. First token: median ${half}, p99 ${most}. ${limit} At ${said.moment.split(" of ")[0]}: ${said.now}.`)
    svg.setAttribute("aria-label", `A row for each request shows when it waits, when its prompt is processed, and when its answer is generated. Requests now: ${said.now}. Below, the KV cache: ${said.blocks} blocks are taken. Then the waiting times of all requests: ${said.kept} of the requests are in time.`)
    second.setAttribute("aria-label", `Curves over the load. With ${s.rate} requests per second, the time to first token is ${said.ttft} (median and 99th percentile). Goodput is highest with ${said.best} requests per second.`)
    list([["in time", said.kept], ["throughput", said.throughput], ["TTFT, median and p99", said.ttft],
      ["longest gap, median and p99", said.gap], ["preemptions", said.again],
      ["requests wait, part of the run", said.waits], ["change with the most requests in time", said.helps],
      ["requests now", said.now], ["blocks taken", said.blocks], ["filled part of these blocks", said.filled]])
    compare(said.loads, String(s.rate), said.best, 4, "best")
    return ["python serving_load.py", ...Object.entries(s).map(([name, value]) => `--${name} ${value}`)].join(" ")
  }
  const made = instrument(place, { controls, presets, show, output, bar })
  place.querySelector(".instrument-controls")?.after(bar) // the load comes first
  second.addEventListener("click", ({ target }) => target.dataset.load && made.change({ rate: Number(target.dataset.load) }))
  player(place, bar, "at", made, () => 200, part => draw(svg, second, widthOf(place), { ...FIXED, ...made.state }, part, brief))
}

for (const place of document.querySelectorAll("#serving.instrument")) start(place)
