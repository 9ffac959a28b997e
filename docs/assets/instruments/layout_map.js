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

export const drawMap = (svg, width, cells) => {
  const rows = [...new Set(cells.map(each => each.tp))], columns = [...new Set(cells.map(each => each.pp))].sort((a, b) => a - b)
  const left = 44, top = 22, high = 34, wide = Math.min(140, (width - left - 1) / Math.max(1, columns.length)), bottom = top + high * rows.length, out = []
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
  columns.forEach((pp, i) => out.push(`<text x="${left + (i + 0.5) * wide}" y="14" class="soft">${i && wide < 48 ? "" : "PP "}${pp}</text>`))
  rows.forEach((tp, i) => out.push(`<text x="0" y="${top + (i + 0.5) * high + 4}" class="start soft">TP ${tp}</text>`))
  for (const each of cells) {
    const x = left + columns.indexOf(each.pp) * wide, y = top + rows.indexOf(each.tp) * high, w = wide - 3, h = high - 3
    const box = `x="${x}" y="${y}" width="${w}" height="${h}" fill="${colour(each.seconds)}"`
    const said = `${inWords(each.layout)}: ${each.time} per step, ${each.needs} on the fullest GPU, ${each.fits ? "fits" : "does not fit"}`
    out.push(`<rect ${box} data-tip="${said}"/>`)
    if (!each.fits) out.push(hatch(x, y, w, h), `<rect x="${x + w / 2 - 19}" y="${y + 8}" width="38" height="${h - 16}" fill="${colour(each.seconds)}" pointer-events="none"/>`)
    out.push(`<text x="${x + w / 2}" y="${y + h / 2 + 4}" class="on">${each.seconds < 100 ? fixed(each.seconds, each.seconds < 10 ? 2 : 1) : fixed(each.seconds)}</text>`)
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
  fill(svg, width, y + 8, out.join(""))
  svg.setAttribute("aria-label", joined(`The fastest layout for each TP and PP. ${first ? `Fastest that fits: ${inWords(first.layout)}, ${first.time} per step.` : "No layout fits."}`))
}
