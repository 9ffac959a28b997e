// "Flash attention, tile by tile": the tiles of snippets/10_flash_attention/attention_in_tiles.py, played.
// tests/test_browser_instruments.py compares their results.
import { digits, drawing, element, embedded, fill, inBytes, instrument, picture, sum, superscript, upTo, widthOf } from "./base.js"
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

// The matrices from which the k-th tile reads a part, and the matrices to which it writes a part.
const moves = (s, computed, k) => {
  const [i, j] = computed[k], [lastI, lastJ] = computed[k - 1] ?? [-1, -1]
  if (s.order === "queries-outside") return [[...i === lastI ? [] : ["Q"], "K", "V"], i === computed[k + 1]?.[0] ? [] : ["O"]]
  return [["Q", ...j === lastJ ? [] : ["K", "V"], ...j ? ["O"] : []], ["O"]]
}

const plainBytes = s => {
  const n = s.sequence, d = s.width
  const elements = { "scale": 2 * n * d, "QKᵀ": 2 * n * d + n * n,
    ...(s.mask === "causal" ? { "mask": 2 * n * n } : {}), "softmax": 2 * n * n, "PV": n * n + 2 * n * d }
  return Object.entries(elements).map(([name, count]) => [name, 2 * count])
}

const onChip = ({ rows: r, columns: c, width: d }) => ({
  "Q": 2 * d * r, "K": 2 * d * c, "V": 2 * d * c, "scores": 4 * r * c, "output": 4 * r * d, "maximum and sum": 8 * r,
})

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
  const [read, written] = crossed(s, done), [readBefore, writtenBefore] = crossed(s, done.slice(0, -1)), inAll = sum(crossed(s, computed))
  const byPlain = sum(plainBytes(s).map(([, bytes]) => bytes))
  const flops = sum(computed.map(each => 4 * s.width * ends(s, each).map(([a, b]) => b + 1 - a).reduce((a, b) => a * b)))
  const [, total, out] = states.at(-1)[1]
  return {
    "tile": `queries ${first}–${end}, keys ${begin}–${right}`,
    "kind": kind(s, tile),
    "done": `${done.length} of ${computed.length}`,
    "tiles": `${computed.length} of ${sides(s)[0].length * sides(s)[1].length}`,
    "query": String(query),
    "output": digits(out / total),
    "plain output": digits(plain(s, query)),
    "read": inBytes(read),
    "written": inBytes(written),
    "this tile": `${inBytes(read - readBefore)} read, ${inBytes(written - writtenBefore)} written`,
    "moves": moves(s, computed, s.step - 1),
    "bytes": inBytes(inAll),
    "plain bytes": inBytes(byPlain),
    "ratio": digits(byPlain / inAll),
    "intensity": digits(flops / inAll),
    "chip": inBytes(sum(Object.values(onChip(s)))),
    "parts": Object.fromEntries(Object.entries(onChip(s)).map(([name, bytes]) => [name, inBytes(bytes)])),
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
  { name: "order", label: "outer loop over", options: () => ORDERS, first: ORDERS[0], text: value => value === ORDERS[0] ? "queries" : "keys" },
  { name: "mask", label: "mask", options: () => ["none", "causal"], first: "none", main: true },
  { name: "scores", label: "attention scores", options: () => SCORES, first: "random", text: value => value.replace("-", " ") },
  slide("query", "place of the followed query in its tile", ({ rows }) => upTo(rows), 0, (value, { rows }) => `${value} of ${rows}`),
  { ...slide("step", "tiles done", s => range(1, count(s) + 1), 13, (value, s) => `${value} of ${count(s)}`), at: true },
]
const presets = [
  { name: "1,024 tokens", values: {} },
  { name: "causal mask", values: { mask: "causal" } },
  { name: "small tiles", values: { rows: 32, columns: 32 } },
  { name: "outer loop over keys", values: { order: "keys-outside" } },
]

// The tiles of Q, K, V and O in the memory, and the tiles on the chip. Between two steps (part > 0), tiles move.
const draw = (svg, width, s, part = 0, brief = false, second) => {
  const out = []
  const put = (tag, attributes, text = "") => out.push(`<${tag} ${Object.entries(attributes)
    .map(([name, value]) => `${name}="${typeof value === "number" ? +value.toFixed(2) : value}"`).join(" ")}>${text}</${tag}>`)
  const label = (x, y, words, kind = "start soft") => put("text", { x, y, class: kind }, words)
  const computed = tiles(s), finished = computed.slice(0, s.step), now = finished.at(-1)
  const next = part ? computed[s.step] : undefined, done = new Set(finished.map(String))
  const { query, columns, states } = followed(s, now), said = facts(s)

  const wide = width >= 700, strip = width < 480 ? 12 : 16, gap = width < 480 ? 14 : wide && width < 740 ? 20 : 44
  const side = Math.min(200, width - gap - 4 * strip - 132), most = Math.min(100, width - gap - 4 * strip - 56 - side)
  const memory = side + 2 * strip + 28, chip = most + 2 * strip + 28, foot = 66 + 2 * (strip - 16) + side
  const at = token => token / s.sequence * side, grown = n => most * (0.32 + 0.17 * Math.log2(n / 32))
  const left = 14 + strip, kTop = 24, vTop = kTop + strip + 4, top = vTop + strip + 6

  // where a tile of a matrix is in the memory, and on the chip
  const stretch = (k, size) => [at(k * size), at(Math.min(s.sequence, k * size + size)) - at(k * size)]
  const inMemory = (name, [i, j]) => {
    const [y, height] = stretch(i, s.rows), [x, across] = stretch(j, s.columns)
    return { Q: { x: 8, y: top + y, width: strip, height }, O: { x: left + side + 6, y: top + y, width: strip, height },
      K: { x: left + x, y: kTop, width: across, height: strip }, V: { x: left + x, y: vTop, width: across, height: strip } }[name]
  }
  const x0 = memory + gap, [tall, across] = [grown(s.rows), grown(s.columns)]
  const onTheChip = name => ({ Q: { x: x0 + 8, y: top, width: strip, height: tall }, O: { x: x0 + left + across + 6, y: top, width: strip, height: tall },
    K: { x: x0 + left, y: kTop, width: across, height: strip }, V: { x: x0 + left, y: vTop, width: across, height: strip },
    S: { x: x0 + left, y: top, width: across, height: tall } })[name]
  const between = (from, to, share) => Object.fromEntries(Object.keys(from).map(name => [name, from[name] + share * (to[name] - from[name])]))

  for (const [x, wideness, words] of [[0.5, memory, width < 480 ? "memory (HBM)" : "GPU memory (HBM)"], [x0, chip - 1, "chip (SRAM)"]]) {
    put("rect", { x, y: 0.5, width: wideness - 1, height: foot + 24, rx: 6, class: "held" })
    label(x + 8, 15, words, "start")
  }
  const tile = next ?? now, [read, [written]] = moves(s, computed, computed.indexOf(tile))
  const parts = ["Q", "K", "V", "O"]
  for (const name of parts) {
    const lengthwise = "KV".includes(name)
    for (const k of sides(s)[lengthwise ? 1 : 0]) {
      const some = finished.filter(each => each[0] === k).length, all = name === "O" && computed.filter(each => each[0] === k).length
      const ready = name === "O" && some && (some === all || s.order === ORDERS[1])
      const place = inMemory(name, [k, k]), [first, last] = ends(s, [k, k])[lengthwise ? 1 : 0]
      const box = { x: place.x + 0.5, y: place.y + 0.5, width: place.width - 1, height: place.height - 1 }
      put("rect", { ...box, class: "node", "data-tip": `${name}, tokens ${first}–${last}${ready ? some < all ? ": written, but not complete" : ": complete and written" : ""}` })
      if (ready) put("rect", { ...box, class: "op-B", opacity: some < all ? 0.5 : 1, style: "pointer-events: none" })
    }
    if (!next) put("rect", { ...inMemory(name, tile), class: "frame", style: "pointer-events: none" })
  }
  label(8 + strip / 2, foot + 15, "Q", "soft")
  label(left + side + 6 + strip / 2, foot + 15, "O", "soft")
  label(left - 4, kTop + strip - 3, "K", "end soft")
  label(left - 4, vTop + strip - 3, "V", "end soft")
  label(left + side / 2, foot + 15, width < 480 ? "scores: not stored" : "scores: never stored", "soft")

  // the tiles of scores, and which of them are done
  for (const i of sides(s)[0]) {
    for (const j of sides(s)[1]) {
      const what = kind(s, [i, j]), [[first, last], [begin, end]] = ends(s, [i, j]), ready = done.has(String([i, j]))
      put("rect", { x: left + at(begin) + 0.5, y: top + at(first) + 0.5, width: at(end + 1 - begin) - 1, height: at(last + 1 - first) - 1,
        class: what === "skipped" ? "empty" : ready ? "live" : "node",
        "data-tip": `queries ${first}–${last}, keys ${begin}–${end}: ${what === "skipped" ? "skipped, because the mask hides it" : ready ? "done" : "not done yet"}` })
    }
  }
  if (s.mask === "causal") put("path", { d: `M${left} ${top}h${side}v${side}z`, style: "fill: var(--paper); opacity: 0.65; pointer-events: none" })
  put("rect", { x: left + stretch(tile[1], s.columns)[0], y: top + stretch(tile[0], s.rows)[0], width: stretch(tile[1], s.columns)[1],
    height: stretch(tile[0], s.rows)[1], class: "frame", style: "pointer-events: none" })
  put("path", { d: `M8 ${top + at(query + 0.5)}H${left + side}`, class: "frame dashed given", style: "pointer-events: none" })

  // the chip, and the tiles that are moving
  const come = Math.min(1, part / 0.55), go = Math.max(0, (part - 0.75) / 0.25), starts = tile[1] === columns[0] && s.order === ORDERS[0]
  for (const name of ["S", ...parts]) put("rect", { ...onTheChip(name), class: "empty" })
  if (!next || come === 1) {
    put("rect", { ...onTheChip("S"), class: "live", "data-tip": `scores of this tile, in fp32: ${said.parts.scores}` })
    label(x0 + left + across / 2, top + tall / 2 + 4, across > 44 ? "scores" : "S", "")
  }
  for (const name of ["Q", "K", "V"]) {
    const from = inMemory(name, tile), to = onTheChip(name)
    put("rect", { ...next && read.includes(name) ? between(from, to, come) : to, class: "op-F", "data-tip": `a tile of ${name}, in bf16: ${said.parts[name]}` })
    if (!next) label(name === "Q" ? to.x + strip / 2 : to.x - 4, name === "Q" ? top + tall + 13 : to.y + strip - 3, name, name === "Q" ? "soft" : "end soft")
  }
  const place = onTheChip("O"), home = inMemory("O", tile)
  if (next && read.includes("O") && come < 1) put("rect", { ...between(home, place, come), class: "op-F" })
  else if (!next || !starts && tile[1] > 0 || part > 0.6) {
    put("rect", { ...place, class: "op-W", "data-tip": `output so far, in fp32: ${said.parts.output}` })
    if (!next) label(place.x + strip / 2, top + tall + 13, "O", "soft")
    if (next && written && go) put("rect", { ...between(place, home, go), class: "op-B" })
  }
  const [, [m, total, o]] = states.at(-1), line = foot - 42
  for (const [i, words] of [`query ${query}:`, `maximum ${whole(m)}`, `sum ${digits(total)}`, `output ${digits(o)}`].entries()) label(x0 + 8, line + 15 * i, words)

  // the output of the followed query after each tile, and the part of it that comes from earlier tiles
  const graph = (x, y, across) => {
    const high = 58, ground = y + 14 + high, largest = Math.max(...states.map(([, [, , each]]) => each)) || 1
    label(x, y, `output of query ${query}${columns.length <= 16 ? ", and its maximum" : ""}`, "start")
    put("path", { d: `M${x} ${ground}h${across}`, class: "line" })
    const step = across / columns.length
    columns.forEach((column, k) => {
      if (!states[k + 1]) return
      const [begin, end] = ends(s, [0, column])[1]
      const [before, , was] = states[k][1], [m, , o] = states[k + 1][1], kept = was * 2 ** (before - m)
      const box = { x: x + k * step + 1, width: Math.max(1, step - 2) }
      const bar = (from, to, opacity) => put("rect", { ...box, y: ground - to / largest * high, height: (to - from) / largest * high, class: "op-W", opacity })
      bar(0, kept, 1)
      bar(kept, o, 0.45)
      put("rect", { ...box, y: ground - high, height: high, class: "grip", "data-tip": `keys ${begin}–${end}: ${digits(kept)} comes from earlier tiles, ${digits(o - kept)} is added, and the maximum is ${whole(m)}` })
      if (columns.length <= 16) label(box.x + box.width / 2, ground + 13, whole(m), "soft")
    })
    let key = x
    for (const [opacity, words] of [[1, "earlier tiles, scaled"], [0.45, "this tile"]]) {
      put("rect", { x: key, y: ground + 21, width: 9, height: 9, class: "op-W", opacity })
      label(key + 13, ground + 29, words)
      key += 26 + 5.6 * words.length
    }
    return ground + 34
  }

  // the bytes of plain attention and of the tiles, on the same scale
  const bytes = (x, y, across) => {
    const parts = plainBytes(s), [read, written] = crossed(s, finished)
    const [byPlain, inAll] = [sum(parts.map(([, bytes]) => bytes)), sum(crossed(s, computed))]
    const scale = across / Math.max(byPlain, inAll)
    label(x, y, "bytes moved between memory and chip", "start")
    label(x, y + 18, `plain attention: ${inBytes(byPlain)}`, "start chosen")
    let next = x
    for (const [name, bytes] of parts) {
      const wide = bytes * scale
      put("rect", { x: next, y: y + 23, width: Math.max(0.5, wide - 1), height: 20, class: "bar", "data-tip": `plain attention, ${name}: ${inBytes(bytes)}` })
      if (wide > 10 + 6.5 * name.length) put("text", { x: next + wide / 2, y: y + 37, class: "on" }, name)
      next += wide
    }
    label(x, y + 61, `flash attention: ${inBytes(inAll)}`, "start chosen")
    put("rect", { x, y: y + 66, width: read * scale, height: 20, class: "op-F", "data-tip": `read so far: ${inBytes(read)}` })
    put("rect", { x: x + read * scale, y: y + 66, width: written * scale, height: 20, class: "op-B", "data-tip": `written so far: ${inBytes(written)}` })
    put("rect", { x, y: y + 66, width: inAll * scale, height: 20, class: "held", style: "pointer-events: none" })
    label(x, y + 100, `so far: ${inBytes(read)} read, ${inBytes(written)} written`)
    return y + 106
  }

  const below = foot + 44, half = (width - 28) / 2
  let height = 0
  if (brief) height = foot + 26 // the two places only
  else if (wide) {
    const x = x0 + chip + 20
    height = graph(x, bytes(x, 13, width - x) + 28, width - x)
  } else if (width >= 480) height = Math.max(bytes(0, below, half), graph(half + 28, below, half))
  else {
    height = bytes(0, below, width)
    if (second && !part) { // on a phone, this graph is above its table
      const all = out.splice(0)
      fill(second, width, graph(0, 12, width) + 6, out.splice(0).join(""))
      out.push(...all)
    }
  }
  if (second) second.parentElement.hidden = width >= 480
  height = Math.max(height, foot + 26) + 6
  let key = 0
  for (const [what, words] of [["op-F", "read"], ["op-B", "written"], ["op-W", "output so far"], ["live", "scores"]]) {
    put("rect", { x: key, y: height, width: 9, height: 9, class: what })
    label(key + 13, height + 8, words)
    key += 34 + 5.8 * words.length
  }
  fill(svg, width, height + 12, out.join(""))
}

const toldMoves = ({ moves: [read, written], ...said }) =>
  `It read ${inWords(read)}${written.length ? " and wrote O" : ""} (${said["this tile"]}).`
const inWords = names => [names.slice(0, -1).join(", "), names.at(-1)].filter(Boolean).join(" and ")

export const start = place => {
  const bar = element("div", { class: "instrument-foot" }), brief = place.dataset.gallery !== undefined
  const { box, svg: second } = drawing("The output of the followed query after each tile"), extra = embedded(place) ? undefined : second
  const { svg, list, compare, output } = picture("The followed query after each tile",
    ["keys", "largest score", "maximum", "factor", "sum", "output"], { below: [box] })
  const show = (state, tell) => {
    const said = facts(state)
    draw(svg, widthOf(place), state, 0, brief, extra)
    const [, m, shrink, total, out] = said.history[said.now]
    tell(`${said.done} tiles are done. The last one has ${said.tile}. ${toldMoves(said)} ${shrink === "0" ? `This is the first tile of query ${said.query}.` : `For query ${said.query}, the earlier output is multiplied by ${shrink}.`} The maximum is now ${m}, the sum is ${total}, and the output is ${out}.`)
    svg.setAttribute("aria-label", `Two places, the memory and the chip. The memory contains the matrices Q, K, V and O, cut into tiles. The chip contains one tile of each matrix, and one tile of scores. ${said.done} tiles are done. The last one has ${said.tile}. Tiles have moved ${said.read} to the chip and ${said.written} back. Plain attention moves ${said["plain bytes"]}.`)
    list([["tiles done", said.done], ["last tile", said.tile], ["bytes that the last tile moved", said["this tile"]],
      ["read so far", said.read], ["written so far", said.written], ["flash attention, all tiles", said.bytes],
      ["plain attention", `${said["plain bytes"]}, ${said.ratio} times as much`],
      ["tiles that must be computed", said.tiles], ["output, divided by the sum", said.output], ["output of plain attention, over all keys", said["plain output"]],
      ["FLOPs per byte", said.intensity], ["bytes on the chip", said.chip]])
    compare(said.history, said.now)
    return ["python attention_in_tiles.py", ...controls.map(({ name }) => `--${name} ${state[name]}`)].join(" ")
  }
  const made = instrument(place, { controls, presets, show, output, bar })
  player(place, bar, "step", made, () => count(made.state), part => draw(svg, widthOf(place), made.state, part, brief), { least: 500 })
}

for (const place of document.querySelectorAll("#attention.instrument")) start(place)
