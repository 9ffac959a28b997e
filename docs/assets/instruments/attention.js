// "Flash attention, tile by tile": the tiles of snippets/10_flash_attention/attention_in_tiles.py, played.
// tests/test_browser_instruments.py holds the two together.
import { digits, drawing, element, fill, inBytes, instrument, picture, sum, superscript, upTo, widthOf } from "./base.js"
import { player } from "./moved.js"

const ORDERS = ["queries-outside", "keys-outside"]
const SCORES = ["random", "rising", "falling", "one-large"]
const range = (first, end) => upTo(Math.max(0, end - first)).map(i => first + i)

// ---- scores and values: whole numbers

const dice = n => {
  for (const factor of [2246822507, 3266489909]) n = Math.imul(n ^ n >>> 15, factor)
  return (n ^ n >>> 16) >>> 0
}

const score = (s, i, j) => {
  const drawn = dice(i * s.sequence + j + 1), rise = Math.floor(16 * j / s.sequence)
  const zeros = Math.min(12, drawn ? 31 - Math.clz32(drawn & -drawn) : 12)
  return zeros + {
    "random": 0, "rising": rise, "falling": -rise, "one-large": j === Math.floor(5 * s.sequence / 8) ? 16 : 0,
  }[s.scores]
}

const value = j => 1 + dice(j + 2 ** 31) % 9

// ---- tiles

const ends = (s, [i, j]) => [[i, s.rows], [j, s.columns]].map(([k, size]) => [k * size, Math.min(s.sequence, k * size + size) - 1])

const kind = (s, tile) => {
  const [[first, last], [begin, end]] = ends(s, tile)
  if (s.mask === "none" || end <= first) return "whole"
  return begin <= last ? "cut" : "skipped"
}

const sides = s => [s.rows, s.columns].map(size => upTo(Math.ceil(s.sequence / size)))

export const tiles = s => {
  const [rows, columns] = sides(s)
  const order = s.order === "queries-outside" ? rows.flatMap(i => columns.map(j => [i, j]))
    : columns.flatMap(j => rows.map(i => [i, j]))
  return order.filter(tile => kind(s, tile) !== "skipped")
}

// One tile for one query: its largest score, and [maximum, sum, output] after it.
const online = (s, [mOld, total, out], query, begin, last) => {
  const z = range(begin, (s.mask === "causal" ? Math.min(last, query) : last) + 1).map(j => score(s, query, j))
  const largest = Math.max(-Infinity, ...z)
  const m = Math.max(mOld, largest), shrink = 2 ** (mOld - m)
  const p = z.map(each => 2 ** (each - m))
  return [largest, [m, total * shrink + sum(p), out * shrink + sum(p.map((x, k) => x * value(begin + k)))]]
}

const plain = (s, query) => {
  const z = upTo(s.mask === "causal" ? query + 1 : s.sequence).map(j => score(s, query, j))
  const m = Math.max(...z), p = z.map(each => 2 ** (each - m))
  return sum(p.map((x, j) => x * value(j))) / sum(p)
}

// The states of the followed query, one after each of its tiles up to the current one.
const followed = (s, [i, j]) => {
  const [[first, last]] = ends(s, [i, j])
  const query = Math.min(first + s.query, last), states = [[, [-Infinity, 0, 0]]]
  const columns = tiles(s).filter(tile => tile[0] === i).map(tile => tile[1])
  for (const column of columns.filter(each => each <= j)) {
    states.push(online(s, states.at(-1)[1], query, ...ends(s, [i, column])[1]))
  }
  return { query, columns, states }
}

// ---- bytes

export const crossed = (s, done) => {
  let read = 0, written = 0, last = [-1, -1]
  const ending = new Map(tiles(s))
  for (const [i, j] of done) {
    const [[first, end], [begin, right]] = ends(s, [i, j])
    const q = 2 * s.width * (end + 1 - first), k = 2 * s.width * (right + 1 - begin), numbers = 4 * (end + 1 - first)
    if (s.order === "queries-outside") {
      read += (i !== last[0] ? q : 0) + 2 * k
      written += ending.get(i) === j ? q + numbers : 0
    } else {
      const before = q + 2 * numbers
      read += (j !== last[1] ? 2 * k : 0) + q + (j > 0 ? before : 0)
      written += before
    }
    last = [i, j]
  }
  return [read, written]
}

const plainBytes = s => {
  const n = s.sequence, d = s.width
  const elements = { "scale": 2 * n * d, "QKᵀ": 2 * n * d + n * n,
    ...(s.mask === "causal" ? { "mask": 2 * n * n } : {}), "softmax": 2 * n * n, "PV": n * n + 2 * n * d }
  return Object.entries(elements).map(([name, count]) => [name, 2 * count])
}

const onChip = ({ rows: r, columns: c, width: d }) => 2 * d * (r + 2 * c) + 4 * (r * d + r * c + 2 * r)

// ---- what is said

const whole = x => x === -Infinity ? "−∞" : String(x).replace("-", "−")

const power = (before, after) => before === after ? "1" : before === -Infinity ? "0"
  : `2${superscript(before - after)}`

export const facts = s => {
  const computed = tiles(s), done = computed.slice(0, s.step), tile = done.at(-1)
  const [[first, end], [begin, right]] = ends(s, tile)
  const { query, columns, states } = followed(s, tile)
  const history = Object.fromEntries(columns.map((column, k) => {
    const [largest, [m, total, out] = []] = states[k + 1] ?? []
    const cells = k + 1 < states.length ? [whole(largest), whole(m), power(states[k][1][0], m), digits(total), digits(out)] : ["not yet"]
    return [ends(s, [0, column])[1].join("–"), cells]
  }))
  const [read, written] = crossed(s, done), inAll = sum(crossed(s, computed))
  const byPlain = sum(plainBytes(s).map(([, bytes]) => bytes))
  const flops = sum(computed.map(each => 4 * s.width * ends(s, each).map(([a, b]) => b + 1 - a).reduce((a, b) => a * b)))
  const [, total, out] = states.at(-1)[1]
  return {
    "tile": `queries ${first}–${end}, keys ${begin}–${right}`,
    "kind": kind(s, tile),
    "tiles": `${computed.length} of ${sides(s)[0].length * sides(s)[1].length}`,
    "query": String(query),
    "output": digits(out / total),
    "plain output": digits(plain(s, query)),
    "read": inBytes(read),
    "written": inBytes(written),
    "bytes": inBytes(inAll),
    "plain bytes": inBytes(byPlain),
    "ratio": digits(byPlain / inAll),
    "intensity": digits(flops / inAll),
    "chip": inBytes(onChip(s)),
    history,
    "now": `${begin}–${right}`,
  }
}

// ---- the page

const slide = (name, label, options, first, text) => ({ name, label, options, first, text, slider: true })
const main = control => ({ ...control, main: true })
const SIZES = [32, 64, 128, 256, 512]
const fitting = ({ sequence }) => SIZES.filter(each => sequence / each <= 32)
const count = s => tiles(s).length
export const controls = [
  slide("sequence", "tokens in the sequence, s", () => [512, 1024, 2048, 4096], 1024),
  slide("width", "width of a head, d", () => [64, 128, 256], 128),
  main(slide("rows", "queries in a tile", fitting, 128)),
  main(slide("columns", "keys in a tile", fitting, 128)),
  { name: "order", label: "order of the loops", options: () => ORDERS, first: ORDERS[0], text: value => value.replace("-", " ") },
  { name: "mask", label: "mask", options: () => ["none", "causal"], first: "none", main: true },
  { name: "scores", label: "attention scores", options: () => SCORES, first: "random", text: value => value.replace("-", " ") },
  slide("query", "query that is followed, in its tile", ({ rows }) => upTo(rows), 0, (value, { rows }) => `${value} of ${rows}`),
  { ...slide("step", "tiles done", s => range(1, count(s) + 1), 13, (value, s) => `${value} of ${count(s)}`), at: true },
]
const presets = [
  { name: "1,024 tokens", values: {} },
  { name: "causal mask", values: { mask: "causal" } },
  { name: "small tiles", values: { rows: 32, columns: 32 } },
  { name: "loop over keys outside", values: { order: "keys-outside" } },
]

const draw = (svg, second, width, s) => {
  const out = []
  const put = (tag, attributes, text = "") => out.push(`<${tag} ${Object.entries(attributes)
    .map(([name, value]) => `${name}="${typeof value === "number" ? +value.toFixed(2) : value}"`).join(" ")}>${text}</${tag}>`)
  const beside = width >= 620, left = 18, top = 20
  const side = beside ? Math.min(250, width / 2 - left) : width - left - 2
  const at = token => token / s.sequence * side
  const computed = tiles(s), now = computed[s.step - 1], done = new Set(computed.slice(0, s.step).map(String))
  const { query, columns, states } = followed(s, now)
  const box = tile => {
    const [[first, last], [begin, end]] = ends(s, tile)
    return { x: left + at(begin) + 0.5, y: top + at(first) + 0.5, width: at(end + 1 - begin) - 1, height: at(last + 1 - first) - 1 }
  }
  put("text", { x: left, y: top - 6, class: "start soft" }, "keys →")
  put("text", { x: 0, y: 0, class: "end soft", transform: `translate(${left - 6} ${top}) rotate(-90)` }, "← queries")
  for (const i of sides(s)[0]) {
    for (const j of sides(s)[1]) {
      const what = kind(s, [i, j])
      const [[first, last], [begin, end]] = ends(s, [i, j]), ready = done.has(String([i, j]))
      put("rect", { ...box([i, j]), "data-tip": `queries ${first}–${last}, keys ${begin}–${end}: ${what === "skipped" ? "skipped, because the mask hides it" : ready ? "done" : "not yet"}`, class: what === "skipped" ? "empty" : !ready ? "node" : what === "cut" ? "op-B" : "op-F" })
    }
  }
  const y = top + at(query + 0.5)
  put("path", { d: `M${left} ${y}h${side}`, class: "frame dashed" })
  put("rect", { ...box(now), class: "frame" })

  // under each tile of keys: what the followed query has added up, and how much of it was there before
  const tall = 84, foot = top + side + 40 + tall
  const most = Math.max(...states.map(([, [, , o]]) => o)) || 1
  put("text", { x: left, y: top + side + 18, class: "start soft" }, `query ${query}: its output, undivided`)
  put("path", { d: `M${left} ${foot}h${side}`, class: "line" })
  columns.forEach((column, k) => {
    if (!states[k + 1]) return
    const [begin, end] = ends(s, [0, column])[1]
    const [before, , was] = states[k][1], [m, , o] = states[k + 1][1], kept = was * 2 ** (before - m)
    const x = left + at(begin) + 1, wide = Math.max(1, at(end + 1 - begin) - 2)
    const bar = (from, to, kindOf) => put("rect", { x, y: foot - to / most * (tall - 14), width: wide, height: (to - from) / most * (tall - 14), class: kindOf })
    bar(0, kept, "op-B")
    bar(kept, o, "op-F")
    put("rect", { x, y: foot - tall + 14, width: wide, height: tall - 14, class: "grip", "data-tip": `keys ${begin}–${end}: ${digits(kept)} was there before, ${digits(o - kept)} is added, the maximum is ${whole(m)}` })
    if (columns.length <= 16) put("text", { x: x + wide / 2, y: foot + 13, class: "soft" }, whole(m))
  })
  let key = left
  for (const [what, words] of [["op-B", "there before, shrunk"], ["op-F", "added"], ["", columns.length <= 16 ? "number: maximum" : ""]]) {
    if (what) put("rect", { x: key, y: foot + 23, width: 9, height: 9, class: what })
    put("text", { x: key + (what ? 13 : 0), y: foot + 31, class: "start soft" }, words)
    key += 32 + 5.6 * words.length
  }

  // bytes, both on one scale: next to the tiles, or in a second picture
  const height = foot + 38, [x0, y0] = beside ? [left + side + 34, top] : [0, top]
  const upper = beside ? "" : out.splice(0).join("")
  const across = width - x0 - 2, parts = plainBytes(s), [read, written] = crossed(s, computed.slice(0, s.step))
  const [byPlain, inAll] = [sum(parts.map(([, bytes]) => bytes)), sum(crossed(s, computed))]
  const scale = across / Math.max(byPlain, inAll)
  put("text", { x: x0, y: y0 - 6, class: "start" }, "Bytes that cross")
  put("text", { x: x0, y: y0 + 18, class: "start soft" }, `plain, by operator: ${inBytes(byPlain)}`)
  let x = x0
  for (const [name, bytes] of parts) {
    const wide = bytes * scale
    put("rect", { x, y: y0 + 24, width: Math.max(0.5, wide - 1), height: 24, class: "bar", "data-tip": `plain attention, ${name}: ${inBytes(bytes)}` })
    if (wide > 10 + 6.5 * name.length) put("text", { x: x + wide / 2, y: y0 + 40, class: "on" }, name)
    x += wide
  }
  put("text", { x: x0, y: y0 + 76, class: "start soft" }, `tiles: ${inBytes(read)} read, ${inBytes(written)} written, of ${inBytes(inAll)}`)
  put("rect", { x: x0, y: y0 + 82, width: read * scale, height: 24, class: "op-F", "data-tip": `read so far: ${inBytes(read)}` })
  put("rect", { x: x0 + read * scale, y: y0 + 82, width: written * scale, height: 24, class: "op-B", "data-tip": `written so far: ${inBytes(written)}` })
  put("rect", { x: x0, y: y0 + 82, width: inAll * scale, height: 24, class: "held" })
  if (beside) fill(svg, width, Math.max(height, y0 + 112), out.join(""))
  else {
    fill(svg, width, height, upper)
    fill(second, width, y0 + 112, out.join(""))
  }
  second.parentElement.hidden = beside
}

export const start = place => {
  const bar = element("div", { class: "instrument-foot" }), { svg: second, box } = drawing("Bytes of plain attention and of tiles")
  const { svg, list, compare, output } = picture("The query followed, tile by tile",
    ["keys", "largest", "max", "shrink", "sum", "output"], { below: [box] })
  const show = (state, tell) => {
    const said = facts(state)
    draw(svg, second, widthOf(place), state)
    const [, m, shrink, total, out] = said.history[said.now]
    tell(`Tile ${state.step} of ${count(state)}: ${said.tile}. For query ${said.query}: maximum ${m}, what was there times ${shrink}, sum ${total}, output ${out}.`)
    svg.setAttribute("aria-label", `A square of tiles, of which ${said.tiles} are computed and ${state.step} done; ${said.tile} is the last, ${said.kind}. Bars of the followed query's output after each of its tiles. Bytes of plain attention, ${said["plain bytes"]}, over those of tiles, ${said.bytes}.`)
    list([["tile", said.tile], ["tiles computed", said.tiles], ["output, divided", said.output], ["plain, of all keys", said["plain output"]],
      ["read so far", said.read], ["written so far", said.written], ["bytes in all", said.bytes], ["plain moves", said["plain bytes"]],
      ["times as much", said.ratio], ["FLOPs per byte", said.intensity], ["on the chip", said.chip]])
    compare(said.history, said.now)
    return ["python attention_in_tiles.py", ...controls.map(({ name }) => `--${name} ${state[name]}`)].join(" ")
  }
  const made = instrument(place, { controls, presets, show, output, bar })
  player(place, bar, "step", made, () => count(made.state), () => {})
}

for (const place of document.querySelectorAll("#attention.instrument")) start(place)
