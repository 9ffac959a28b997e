// The map of all layouts of the planner, as snippets/planner/layout_map.py computes it, and layouts in words.
import { fill, joined } from "./base.js"
import { closedForm, GIB, memory, total } from "./layouts.js"
import { called, fixed, fullestOf, timedLayouts } from "./timed_layouts.js"

// For each TP and PP, the fastest layout that fits. If no layout fits, the layout that needs the least memory.
export const layoutMap = (s, gpus, sequence, batch, gpu) => {
  const room = memory.room * gpu.memory, best = new Map(), lean = new Map()
  for (const { layout, step } of timedLayouts(s, gpus, sequence, batch, gpu)) {
    const cell = 1e6 * layout.tp + layout.pp
    if (best.has(cell)) continue
    const least = total(closedForm(s, layout, sequence, 0)), each = { layout, step, least }
    if (!(lean.get(cell)?.least <= least)) lean.set(cell, each)
    if (least > room) continue
    each.needed = fullestOf(s, layout, sequence).needed
    if (each.needed <= room) best.set(cell, each)
  }
  return [...lean.keys()].sort((a, b) => a - b).map(cell => {
    const { layout, step, needed } = best.get(cell) ?? lean.get(cell)
    return { tp: layout.tp, pp: layout.pp, fits: best.has(cell), name: called(layout), layout, seconds: step.seconds,
      time: `${fixed(step.seconds, 2)} s`, needs: `${fixed((needed ?? fullestOf(s, layout, sequence).needed) / GIB, 1)} GiB` }
  })
}

// A layout in words.
export const inWords = l => [
  `${l.dp}-way data parallel`, l.tp > 1 && `${l.tp}-way tensor parallel`,
  l.pp > 1 && `${l.pp} pipeline stages${l.virtual > 1 ? ` with ${l.virtual} chunks each` : ""}`,
  l.cp > 1 && `${l.cp}-way context parallel`, l.ep > 1 && `${l.ep}-way expert parallel`,
  `micro-batch ${l.micro_batch}`, ["", "ZeRO-1", "ZeRO-2", "FSDP"][l.zero],
  { mlp: "MLPs recomputed", layer: "all layers recomputed" }[l.recompute],
].filter(Boolean).join(", ")

// Why there is no layout with this TP and PP.
const whyEmpty = (tp, pp, { gpus, sequence, batch }) => {
  if (tp * pp > gpus) return `needs ${tp * pp} GPUs, but there are ${gpus}`
  if (pp - 1 > batch / sequence) return `has only ${batch / sequence} micro-batches for ${pp} stages`
  return `the GPUs, the layers or the ${batch / sequence} sequences of a step cannot be divided in this way`
}

export const drawMap = (svg, width, cells, state) => {
  const rows = [...new Set(cells.map(each => each.tp))], columns = [...new Set(cells.map(each => each.pp))].sort((a, b) => a - b)
  const left = 44, top = 38, high = 34, wide = Math.min(140, (width - left - 1) / Math.max(1, columns.length)), bottom = top + high * rows.length, out = []
  const times = cells.map(each => each.seconds), least = Math.min(...times), spread = Math.log(Math.max(...times) / least) || 1
  const colour = seconds => `oklch(${0.9 - 0.5 * Math.log(seconds / least) / spread} 0.1 235)`
  const fit = cells.filter(each => each.fits), first = fit.reduce((best, each) => each.seconds < best?.seconds || !best ? each : best, null)
  const hatch = (x, y, w, h) => {
    let path = ""
    for (let at = 6; at < w + h; at += 7) {
      path += `M${x + Math.max(0, at - h)} ${y + Math.min(h, at)}L${x + Math.min(w, at)} ${y + Math.max(0, at - w)}`
    }
    return `<path d="${path}" class="hatch"/>`
  }
  out.push(`<text x="0" y="11" class="start soft">rows: tensor-parallel ranks, TP; columns: pipeline stages, PP</text>`)
  columns.forEach((pp, i) => out.push(`<text x="${left + (i + 0.5) * wide}" y="30" class="soft">${i && wide < 48 ? "" : "PP "}${pp}</text>`))
  rows.forEach((tp, i) => out.push(`<text x="0" y="${top + (i + 0.5) * high + 4}" class="start soft">TP ${tp}</text>`))
  const there = new Set(cells.map(({ tp, pp }) => `${tp} ${pp}`))
  rows.forEach((tp, k) => columns.forEach((pp, i) => {
    if (there.has(`${tp} ${pp}`)) return
    out.push(`<rect x="${left + i * wide + 0.5}" y="${top + k * high + 0.5}" width="${wide - 4}" height="${high - 4}" class="empty" pointer-events="all" data-tip="TP ${tp}, PP ${pp}: ${whyEmpty(tp, pp, state)}"/>`)
  }))
  for (const each of cells) {
    const x = left + columns.indexOf(each.pp) * wide, y = top + rows.indexOf(each.tp) * high, w = wide - 3, h = high - 3
    const box = `x="${x}" y="${y}" width="${w}" height="${h}" fill="${colour(each.seconds)}"`
    const said = `${inWords(each.layout)}: ${each.time} per step, ${each.needs} on the fullest GPU, ${each.fits ? "fits" : "does not fit"}`
    out.push(`<rect ${box} data-tip="${said}"/>`)
    const words = each.seconds < 100 ? fixed(each.seconds, each.seconds < 10 ? 2 : 1) : fixed(each.seconds), plate = Math.min(w, 8 + 6.6 * words.length)
    if (!each.fits) out.push(hatch(x, y, w, h), `<rect x="${x + (w - plate) / 2}" y="${y + 6}" width="${plate}" height="${h - 12}" fill="${colour(each.seconds)}" pointer-events="none"/>`)
    out.push(`<text x="${x + w / 2}" y="${y + h / 2 + 4}" class="on">${words}</text>`)
    if (each === first) out.push(`<rect x="${x - 1.5}" y="${y - 1.5}" width="${w + 3}" height="${h + 3}" class="frame" pointer-events="none"/>`)
  }
  const y = bottom + 16, key = [["fits", colour(least)], ["does not fit", colour(least)]]
  let x = left
  out.push(`<text x="0" y="${y}" class="start soft">seconds</text>`)
  x += 10
  for (let i = 0; i < 5; i++) out.push(`<rect x="${x + 16 * i}" y="${y - 10}" width="16" height="12" fill="${colour(least * Math.exp(spread * i / 4))}"/>`)
  out.push(`<text x="${x + 86}" y="${y}" class="start soft">slower</text>`)
  x += 134
  out.push(`<rect x="${x}" y="${y - 10}" width="22" height="12" fill="${key[1][1]}"/>`, hatch(x, y - 10, 22, 12), `<text x="${x + 28}" y="${y}" class="start soft">does not fit</text>`)
  x += 106
  if (x + 80 < width && first) out.push(`<rect x="${x + 1}" y="${y - 9}" width="20" height="10" class="frame"/>`, `<text x="${x + 28}" y="${y}" class="start soft">fastest</text>`)
  const empty = cells.length < rows.length * columns.length
  if (empty) out.push(`<rect x="${left + 10.5}" y="${y + 9.5}" width="21" height="11" class="empty"/>`, `<text x="${left + 38}" y="${y + 19}" class="start soft">no such layout (touch a cell to see why)</text>`)
  fill(svg, width, y + (empty ? 26 : 8), out.join(""))
  svg.setAttribute("aria-label", joined(`The fastest layout for each number of tensor-parallel ranks, TP, and pipeline stages, PP. ${first ? `Fastest that fits: ${inWords(first.layout)}, ${first.time} per step.` : "No layout fits."}`))
}
