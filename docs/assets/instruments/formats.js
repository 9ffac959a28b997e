// "Number formats": what snippets/05_mixed_precision/number_formats.py makes of a number, with bits to flip.
// tests/test_browser_instruments.py compares their results.
import { element, fill, inkOn, instrument, joined, picture, upTo, widthOf } from "./base.js"

const format = (e, m, largest) => ({ e, m, bias: 2 ** (e - 1) - 1, infinity: !largest, largest })
const FP32 = format(8, 23), E4M3 = format(4, 3, 448), E2M1 = format(2, 1, 6)
const FORMATS = {
  fp32: FP32, tf32: format(8, 10), bf16: format(8, 7), fp16: format(5, 10),
  e4m3: E4M3, e5m2: format(5, 2), mxfp4: E2M1, nvfp4: E2M1,
}
const FACTOR = format(8, 23, 2 ** 128 - 2 ** 104) // fp32 that saturates
const BLOCKS = { mxfp4: 32, nvfp4: 16 }
const negative = x => x < 0 || Object.is(x, -0)
const length = values => Math.sqrt(values.reduce((total, v) => total + v * v, 0))

// ---- one number. Dividing by a power of two, and adding, are exact here as they are in Python

const view = new DataView(new ArrayBuffer(8))
const exponentOf = x => { // floor(log2 |x|); of zero, and of what is near it, a very low one
  view.setFloat64(0, x)
  return (view.getUint16(0) >> 4 & 2047) - 1023
}
const octave = (x, f) => Math.max(exponentOf(x), 1 - f.bias)

const even = x => { // the nearest whole number, a tie to the even one
  const low = Math.floor(x), rest = x - low
  return low + (rest > 0.5 || (rest === 0.5 && low % 2 === 1))
}

export const rounded = (x, f) => {
  if (Number.isNaN(x) || (Math.abs(x) === Infinity && f.infinity)) return x
  const step = 2 ** (octave(x, f) - f.m)
  let y = Math.abs(x) === Infinity ? Infinity : even(Math.abs(x) / step) * step
  if (y > limits(f)[0]) y = f.largest ?? Infinity
  return negative(x) ? -y : y
}

const encode = (y, f) => {
  if (Number.isNaN(y)) return 2 ** (f.e + f.m) - (f.infinity ? 2 ** (f.m - 1) : 1)
  const sign = negative(y) ? 2 ** (f.e + f.m) : 0
  if (Math.abs(y) === Infinity) return sign + (2 ** f.e - 1) * 2 ** f.m
  const exponent = octave(y, f)
  return sign + (exponent + f.bias - 1) * 2 ** f.m + Math.abs(y) / 2 ** (exponent - f.m)
}

const decode = (pattern, f) => {
  const sign = pattern >= 2 ** (f.e + f.m) ? -1 : 1
  const exponent = Math.floor(pattern / 2 ** f.m) % 2 ** f.e, mantissa = pattern % 2 ** f.m
  if (f.infinity && exponent === 2 ** f.e - 1) return mantissa ? NaN : sign * Infinity
  if (f === E4M3 && exponent === 15 && mantissa === 7) return NaN
  return sign * ((exponent ? 2 ** f.m : 0) + mantissa) * 2 ** (Math.max(exponent, 1) - f.bias - f.m)
}

const neighbour = (y, f, by) => {
  if (!Number.isFinite(y)) return NaN
  const pattern = encode(Math.abs(y), f), place = (y < 0 ? -pattern : pattern) + by
  const found = Math.abs(place) < 2 ** (f.e + f.m) ? decode(Math.abs(place), f) : NaN
  return place < 0 ? -found : found
}

// The distance to the next number that is farther from zero.
const step = (y, f) => Number.isFinite(y) ? 2 ** (octave(y, f) - f.m) : NaN

// The largest number, the smallest normal number, and the step from 1 upwards.
const limits = f => [f.largest ?? (2 - 2 ** -f.m) * 2 ** f.bias, 2 ** (1 - f.bias), 2 ** -f.m]

// ---- a block, whose elements share a scale

const top = values => Math.max(...values.map(Math.abs))
const scales = (values, name) => {
  const size = BLOCKS[name]
  const tops = upTo(Math.ceil(values.length / size)).map(i => top(values.slice(i * size, (i + 1) * size)))
  if (name === "mxfp4") return [tops.map(t => 2 ** Math.min(Math.max(t ? exponentOf(t) - 2 : -3, -127), 127)), 1]
  const factor = rounded(Math.max(...tops) / 6 / 448, FACTOR)
  return [tops.map(t => factor ? rounded(t / 6 / factor, E4M3) : 0), factor]
}

const blockStored = (values, name) => {
  const [each, factor] = scales(values, name)
  return values.map((v, i) => {
    const unit = each[Math.floor(i / BLOCKS[name])] * factor
    return unit ? rounded(v / unit, E2M1) * unit : 0
  })
}

const series = (y, f, times) => {
  const totals = [0]
  while (totals.length <= times) {
    const total = totals.at(-1), following = rounded(total + y, f)
    if (following === total) break
    totals.push(following)
  }
  return totals
}

const valueOf = (text, name, scale) => {
  if (!text.startsWith("0x")) return Number(text.replace("inf", "Infinity"))
  const f = FORMATS[name]
  return decode(Number(text) % 2 ** (1 + f.e + f.m), f) / 2 ** scale
}

const stored = (x, rest, name, scale) => {
  const f = FORMATS[name]
  if (!(name in BLOCKS)) {
    const y = rounded(x * 2 ** scale, f)
    return [y, 2 ** -scale, y / 2 ** scale]
  }
  if (!Number.isFinite(x)) return [NaN, NaN, NaN]
  const [each, factor] = scales([x, ...rest], name), unit = each[0] * factor
  const y = unit ? rounded(x / unit, f) : 0
  return [y, unit, y * unit]
}

// The terms that are added, in which format, and what their sum is divided by.
const terms = (x, rest, name, scale) => {
  const [element, , value] = stored(x, rest, name, scale)
  return name in BLOCKS ? [rounded(value, FP32), FP32, 1] : [element, FORMATS[name], 2 ** scale]
}

// ---- what is said

export const written = (x, figures = 9) => {
  if (Object.is(x, -0)) return "-0"
  if (!x || !Number.isFinite(x)) return String(x).replace("Infinity", "inf").replace("NaN", "nan")
  const v = Number(x.toPrecision(figures)), size = Math.abs(v)
  return (1e-4 <= size && size < 1e9 ? String(v) : v.toExponential()).replace("e+", "e")
}

const lost = (x, y) => {
  if (x === y || Number.isNaN(x)) return "0%"
  if (!Number.isFinite(y) || !Number.isFinite(x)) return "all"
  return `${written(100 * Math.abs((y - x) / x), 3)}%`
}

const parts = (pattern, f) => {
  const text = pattern.toString(2).padStart(1 + f.e + f.m, "0")
  const bits = `${text[0]} ${text.slice(1, 1 + f.e)} ${text.slice(1 + f.e)}`
  const y = decode(pattern, f)
  if (!y || !Number.isFinite(y)) return [bits, written(y)]
  const one = Math.abs(y) >= 2 ** (1 - f.bias) ? "1 + " : ""
  return [bits, `${y < 0 ? "-" : ""}(${one}${pattern % 2 ** f.m}/${2 ** f.m})·2^${octave(y, f)}`]
}

export const facts = (text, name, scale, times, rest) => {
  const f = FORMATS[name], x = valueOf(text, name, scale)
  const [y, unit] = stored(x, rest, name, scale)
  const [bits, says] = name in BLOCKS && Number.isNaN(y) ? ["none", "nan"] : parts(encode(y, f), f)
  const beside = by => written(neighbour(y, f, by) * unit).replace("nan", "none")
  const others = {}
  let spacing
  for (const other of Object.keys(FORMATS)) {
    const [, , value] = stored(x, rest, other, scale)
    const [term, g, divisor] = terms(x, rest, other, scale)
    const totals = series(term, g, times)
    const stops = totals.length > 1 && totals.length <= times ? `after ${totals.length - 1} terms` : "no"
    others[other] = [written(value), lost(x, value), written(totals.at(-1) / divisor), stops]
    if (other === name) spacing = step(totals.at(-1), g) / divisor
  }
  const limitOf = limits(f).map(each => written(each))
  let block = "none", scaled = `2^${scale}`
  if (name in BLOCKS && Number.isFinite(x)) {
    const values = [x, ...rest], kept = blockStored(values, name)
    const gone = values.filter((v, i) => v && !kept[i]).length
    const off = length(values.map((v, i) => kept[i] - v)), norm = length(values)
    block = `${values.length} values, ${gone} become 0, error of all ${norm ? written(100 * off / norm, 3) : 0}%`
    const [each, factor] = scales(values, name)
    scaled = written(each[0]) + (name === "nvfp4" ? ` × ${written(factor)}` : "")
  }
  return {
    "number": written(x), "stored": others[name][0], "lost": others[name][1], bits, says,
    "below": beside(-1), "above": beside(1),
    "largest": limitOf[0], "smallest": limitOf[1], "above one": limitOf[2], "scale": scaled, block, "sum": others[name][2], "exact": written(x * times),
    "still": others[name][3], "spacing": written(spacing).replace("nan", "none"), others,
  }
}

// ---- the page

const LABELS = { fp32: "fp32", tf32: "tf32", bf16: "bf16", fp16: "fp16", e4m3: "fp8 E4M3", e5m2: "fp8 E5M2", mxfp4: "MXFP4", nvfp4: "NVFP4" }
const DECIMAL = "[+-]?(\\d+\\.?\\d*|\\.\\d+)(e[+-]?\\d{1,2})?"
const number = new RegExp(`^(${DECIMAL}|0x[0-9a-f]{1,8}|[+-]?inf|nan)$`)
const numbers = new RegExp(`^(${DECIMAL}( +(?=.)|$)){0,31}$`)
export const controls = [
  { name: "number", label: "number, or its bits, such as 0x3dcd", valid: text => number.test(text), first: "0.1", main: true },
  { name: "format", label: "format", options: () => Object.keys(FORMATS), first: "bf16", main: true, text: name => LABELS[name] },
  { name: "scale", label: "scale that multiplies the number", first: 0, slider: true, text: k => joined(`2^${k}`),
    options: state => state.format in BLOCKS ? [0] : upTo(49).map(k => k - 24) },
  { name: "times", label: "number of terms in the sum", options: () => upTo(13).map(k => 2 ** k), first: 1024, slider: true, main: true },
  { name: "block", label: "other numbers in its block, up to 31", valid: text => numbers.test(text), wide: "wide",
    first: "0.7 -1.2 0.05 2.1 -0.4 0.9 -0.15 1.4 0.3 -0.8 0.02 -1.7 0.6 0.25 -0.35" },
]
const presets = [
  { name: "0.1 in bf16", values: {} },
  { name: "4,096 ones added in bf16", values: { number: "1", times: 4096 } },
  { name: "a small gradient in fp16", values: { number: "2e-8", format: "fp16" } },
  { name: "a block in NVFP4", values: { format: "nvfp4" } },
]
const restOf = state => state.block.split(" ").filter(Boolean).map(Number)
const caseOf = state => [state.number, state.format, state.scale, state.times, restOf(state)]

const label = (x, y, kind, text) => `<text x="${x.toFixed(1)}" y="${y}" class="${kind}">${text}</text>`
const path = (d, kind) => `<path d="${d}" class="${kind}"/>`

// The stored number between its neighbours, and where the number itself lies.
const line = (width, x, y, f, unit) => {
  const [low, at, high] = [neighbour(y, f, -1), y, neighbour(y, f, 1)].map(v => v * unit)
  if (![at, x].every(Number.isFinite)) return label(0, 36, "start", `stored: ${written(at)}`)
  const gap = Math.max(...[at - low, high - at].filter(Number.isFinite))
  const middle = width / 2, place = v => middle + (v - at) / gap * (width / 2 - 50)
  const out = [path(`M0 50H${width}`, "line")]
  const edge = (v, side) => Number.isFinite(v) ? place((v + at) / 2) : side
  const [from, to] = [edge(low, 0), edge(high, width)]
  out.push(`<rect x="${from.toFixed(1)}" y="42" width="${(to - from).toFixed(1)}" height="16" class="live" data-tip="all numbers in this band are stored as ${written(at)}"/>`)
  for (const v of [low, at, high]) {
    if (!Number.isFinite(v)) continue
    out.push(`<rect x="${(place(v) - 12).toFixed(1)}" y="36" width="24" height="28" class="grip" data-tip="${v === at ? "stored" : "neighbour"}: ${written(v)}"/>`,
      path(`M${place(v).toFixed(1)} 40V60`, "frame"), label(place(v), 76, v === at ? "" : "soft", written(v)))
  }
  const inside = Math.max(6, Math.min(width - 6, place(x)))
  const anchor = inside < 60 ? "start" : inside > width - 60 ? "end" : ""
  out.push(`<path d="M${(inside - 5).toFixed(1)} 28h10l-5 10z" class="op-B"/>`,
    label(inside, 22, anchor, `${written(x)}${place(x) === inside ? "" : place(x) > inside ? " →" : " ←"}`))
  return out.join("")
}

// ---- values on an axis

const LEFT = 54
const tick = v => Math.abs(v) >= 1e5 ? Number(v.toPrecision(3)).toExponential().replace("+", "") : written(v, 3)
const ticks = (least, most) => { // at most five round values
  const raw = (most - least) / 3 || 1, unit = 10 ** Math.floor(Math.log10(raw))
  const by = unit * [1, 2, 5, 10].findLast(k => k * unit <= raw * 1.01)
  return upTo(9).map(k => (Math.ceil(least / by - 0.01) + k) * by).filter(v => v <= most + by / 100)
}

// The running sum, the exact one, and the place where the running sum stops.
const sums = (width, above, x, [term, f, divisor], times, name) => {
  const totals = series(term, f, times).map(t => t / divisor), exact = x * times, stops = totals.length - 1
  const tall = 110, across = width - LEFT - 10, foot = above + tall
  const ends = [exact, ...totals].filter(Number.isFinite)
  const most = Math.max(0, ...ends), least = Math.min(0, ...ends), span = most - least || 1
  const along = i => LEFT + i / times * across, up = v => above + (most - v) / span * tall
  const at = (i, v) => `${along(i).toFixed(1)} ${up(v).toFixed(1)}`
  const by = Math.max(1, Math.floor(totals.length / 300))
  const points = totals.map((v, i) => [i, v]).filter(([i, v]) => Number.isFinite(v) && (i % by === 0 || i === totals.length - 1))
  const [, still] = points.at(-1), stalled = stops > 0 && stops < times
  const out = []
  const key = (x, y, kind, words) => out.push(path(`M${x} ${y - 4}h18`, `${kind} thick`), label(x + 24, y, "start", words))
  key(LEFT, above - 26, "arc", `exact sum: ${written(exact)}`)
  key(LEFT, above - 10, "arc far", `one after the other in ${name in BLOCKS ? "fp32" : LABELS[name]}: ${written(totals.at(-1))}`)
  for (const v of ticks(least, most)) {
    out.push(path(`M${LEFT} ${up(v).toFixed(1)}H${width - 10}`, "line"), label(LEFT - 6, up(v) + 4, "end soft", tick(v)))
  }
  for (const i of new Set([0, times / 4, times / 2, 3 * times / 4, times])) {
    if (!Number.isInteger(i)) continue
    out.push(path(`M${along(i).toFixed(1)} ${foot}v4`, "line"))
    if (width > 500 || i !== 3 * times / 4) out.push(label(along(i), foot + 16, i === times ? "end soft" : "soft", i === times ? `${i} terms` : i))
  }
  if (stalled) out.push(`<rect x="${along(stops).toFixed(1)}" y="${above}" width="${(width - 10 - along(stops)).toFixed(1)}" height="${tall}" class="stop"/>`)
  out.push(Number.isFinite(exact) ? path(`M${at(0, 0)}L${at(times, exact)}`, "arc thick") : "",
    path(`M${points.map(([i, v]) => at(i, v)).join("L")}L${at(times, still)}`, "arc far thick"))
  if (stalled) {
    const end = totals.at(-1), words = Number.isFinite(end) ? `stops after ${stops} term${stops === 1 ? "" : "s"}` : `infinite after ${stops} terms`
    const right = along(stops) + 6.2 * words.length < width, level = up(still)
    out.push(`<circle cx="${along(stops).toFixed(1)}" cy="${level.toFixed(1)}" r="5" class="handle"/>`,
      label(right ? along(stops) + 7 : width - 12, level > foot - 24 ? level - 9 : level + 18, `${right ? "start" : "end"} chosen halo`, words))
  }
  for (const i of new Set(upTo(9).map(k => Math.round(k * times / 8)))) {
    const v = totals[Math.min(i, stops)]
    if (Number.isFinite(v)) out.push(`<circle cx="${along(i).toFixed(1)}" cy="${up(v).toFixed(1)}" r="12" class="grip" data-tip="after ${i} terms: ${written(v)}, exact sum ${written(x * i)}"/>`)
  }
  return out.join("")
}

// The values of the block: outlined as given, filled as stored, over the numbers that can be stored.
const bars = (width, above, values, name) => {
  const kept = blockStored(values, name), size = BLOCKS[name], half = 46, axis = above + half
  const most = top([...values, ...kept]) || 1, pitch = Math.min(40, (width - LEFT - 4) / values.length)
  const [each, factor] = scales(values, name), left = i => LEFT + i * pitch
  const bar = (i, v, kind, tip = "") => {
    const tall = Math.abs(v) / most * half
    return `<rect x="${(left(i) + 1).toFixed(1)}" y="${(v < 0 ? axis : axis - tall).toFixed(1)}" width="${(pitch - 3).toFixed(1)}" height="${tall.toFixed(1)}" class="${kind}"${tip}/>`
  }
  const out = [label(0, above - 10, "start", `block: given (outlined) and stored (filled) numbers`)]
  for (const [k, scale] of each.entries()) {
    const unit = scale * factor, from = left(k * size).toFixed(1), to = (left(Math.min(values.length, (k + 1) * size)) - 2).toFixed(1)
    for (const element of [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]) {
      const y = axis - element * unit / most * half
      if (!unit && element || y < above - 1 || y > above + 2 * half + 1) continue
      out.push(path(`M${from} ${y.toFixed(1)}H${to}`, element ? "line" : "thin"))
      if (k === 0 && element % 3 === 0) out.push(label(LEFT - 6, y + 4, "end soft", tick(element * unit)))
    }
  }
  return out.join("") + values.map((v, i) =>
    bar(i, kept[i], i ? "live" : "op-B") + bar(i, v, "frame given", ` data-tip="given ${written(v)}, stored ${written(kept[i])}"`)).join("")
}

export const start = place => {
  const row = element("div", { class: "instrument-bits", role: "group", "aria-label": "Bits that you can flip" })
  const key = element("p", { class: "instrument-bits" }, "Press a bit to flip it: ",
    ...["sign", "exponent", "mantissa"].map(kind => element("span", {}, element("b", { class: kind }), ` ${kind} `)))
  const { svg, list, compare, output } = picture("The number in all formats", ["format", "stored number", "relative error", "sum", "terms until it stops"], { above: [row, key] })
  const bits = upTo(32).map(i => {
    const made = element("button", { type: "button" })
    made.addEventListener("click", () => flip(i))
    row.append(made)
    return made
  })

  const show = (state, tell) => {
    const said = facts(...caseOf(state)), { format: name, scale, times } = state
    const f = FORMATS[name], x = valueOf(state.number, name, scale), rest = restOf(state)
    const [y, unit] = stored(x, rest, name, scale), pattern = said.bits.replaceAll(" ", "")
    bits.forEach((made, i) => {
      made.hidden = made.disabled = !(i < 1 + f.e + f.m && said.bits !== "none")
      if (made.hidden) return
      const kind = i === 0 ? "sign" : i <= f.e ? "exponent" : "mantissa"
      made.className = kind
      made.textContent = pattern[i]
      made.setAttribute("aria-label", `${pattern[i]}, ${kind}${i ? joined(` 2^${f.e - i}`) : ""}`)
      made.style.color = inkOn(made)
    })
    key.hidden = said.bits === "none"
    const width = widthOf(place), block = name in BLOCKS && Number.isFinite(x)
    const [term, g, divisor] = terms(x, rest, name, scale)
    fill(svg, width, block ? 392 : 262, line(width, x, y, f, unit) + sums(width, 128, x, [term, g, divisor], times, name)
      + (block ? bars(width, 296, [x, ...rest], name) : ""))
    const after = said.still.replace("after ", "").replace(/^1 terms/, "1 term"), half = Math.abs(term) <= step(series(term, g, times).at(-1), g) / 2
    const stalls = said.still === "no" ? "" : said.spacing === "none" ? ` After ${after}, the sum is infinite.` : half
      ? ` The sum stops after ${after}. There the next number is ${said.spacing} away, and a term is at most half of this step.`
      : ` The sum stops after ${after}, at the largest number of this format.`
    tell(`${said.number} is stored as ${said.stored} in ${LABELS[name]}, with a relative error of ${said.lost}. The sum of ${times} such number${times === 1 ? "" : "s"} is ${said.sum}, and the exact sum is ${said.exact}.${stalls}${block ? ` The block has ${said.block}.` : ""}`)
    svg.setAttribute("aria-label", `${said.stored} on a line between its neighbours ${said.below} and ${said.above}, and the sum of ${times} terms, which ends at ${said.sum}. The exact sum ends at ${said.exact}.`)
    const each = name in BLOCKS ? " of an element" : ""
    list([[`largest number${each}`, said.largest], [`smallest normal number${each}`, said.smallest], [`step from 1 to the next larger number${each}`, said["above one"]],
      ["stored number", said.stored], ["relative error", said.lost], ["bits", said.bits], ["value of the bits", said.says],
      ["scale", said.scale === "2^0" ? "2^0 = 1" : said.scale], ["neighbours", `below ${said.below}, above ${said.above}`], ...block ? [["block", said.block]] : [],
      [`sum of ${times} terms`, said.sum], ["exact sum", said.exact], ["sum stops", said.still], ["step at the end of the sum", said.spacing]])
    compare(Object.fromEntries(Object.entries(said.others).map(([other, [value, error, total, stops]]) =>
      [LABELS[other], [value, error, total, stops.replace(/after | terms/g, "").replace("no", "–")]])), LABELS[name])
    return ["python number_formats.py", `--number=${state.number}`, `--format ${name}`, `--scale ${scale}`,
      `--times ${times}`, `--block="${state.block}"`].join(" ")
  }
  const { state, change } = instrument(place, { controls, presets, show, output, demo: { name: "format" } })
  for (const field of place.querySelectorAll("[type=text]")) {
    field.addEventListener("focus", () => setTimeout(() => field.select())) // typing replaces the number
  }
  const flip = i => {
    const f = FORMATS[state.format]
    const y = stored(valueOf(state.number, state.format, state.scale), restOf(state), state.format, state.scale)
    const weight = 2 ** (f.e + f.m - i), pattern = encode(y[0], f)
    const flipped = Math.floor(pattern / weight) % 2 ? pattern - weight : pattern + weight
    const value = decode(flipped, f) * y[1]
    change({ number: Number.isNaN(value) ? `0x${flipped.toString(16)}` : written(value, 17) })
  }
}

for (const place of document.querySelectorAll("#formats.instrument")) start(place)
