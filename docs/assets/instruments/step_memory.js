// The memory of a stage during a step, as snippets/planner/step_memory.py computes it, and its picture.
import { fill, hue, inBytes, sum, upTo } from "./base.js"
import { closedForm, layerActivationBytes, memory, mlpActivationBytes, replay, stages, withUnseen } from "./layouts.js"

// A moment: its kind, the micro-batch, the layer, the layers with activations, the largest number of allocated bytes.
export const moments = (s, l, sequence, index) => {
  const { layers, head } = stages(s, l.pp)[index]
  let made = [], live = 0, at = 0, forwards = 0, backwards = 0, passing = "forward"
  const add = (kind, layer, take) => made.push([kind, passing === "forward" ? forwards : backwards, layer, live, take()])
  replay(s, l, sequence, index, (kind, take) => {
    if (kind === "step") {
      made = []
      forwards = backwards = at = 0
      take()
    } else if (kind.includes("forward")) {
      if (passing !== "forward" || at === layers && kind === "forward" || !forwards) [passing, at, forwards] = ["forward", 0, forwards + 1]
      if (kind === "forward") {
        at++
        live++
        add(kind, at, take)
      } else add(kind, 0, take)
    } else if (kind === "optimizer") add(kind, 0, take)
    else {
      if (passing !== "backward" || at === 0 && kind !== "embedding") [passing, at, backwards] = ["backward", layers, backwards + 1]
      add(kind, kind === "backward" ? at : 0, take)
      if (kind === "backward") {
        at--
        live--
      }
    }
  })
  return made
}

export const partsAt = ([kind, , , live, allocated], s, l, sequence, index) => {
  const parts = closedForm(s, l, sequence, index), tokens = l.micro_batch * sequence / l.cp
  const layer = layerActivationBytes(s, tokens, l.tp), mlp = mlpActivationBytes(s, tokens, l.tp)
  const [kept, again] = { "": [layer, 0], mlp: [layer - mlp, mlp], layer: [2 * tokens * s.hidden / l.tp, layer] }[l.recompute]
  parts.activations = live * kept + again * (kind === "backward")
  parts.logits *= { "head forward": 1, "head backward": 3 / 4 }[kind] ?? 0
  parts["temporary"] = Math.max(0, withUnseen(allocated) - sum(Object.values(parts)))
  return parts
}

export const words = ([kind, micro, layer]) => kind === "optimizer" ? "optimizer step"
  : `${kind.includes("forward") ? "forward" : "backward"} pass of micro-batch ${micro}, ${layer ? `layer ${layer}` : kind.split(" ")[0]}`

export const sums = parts => {
  const each = Object.entries(parts).filter(([, size]) => size).map(([name, size]) => `${name} ${inBytes(size)}`)
  return `${each.join(" + ")} = ${inBytes(sum(Object.values(parts)))}`
}

// All moments with their parts, in groups of one pass, and what rank_memory.py prints about them.
export const step = (s, l, sequence, index) => {
  const every = moments(s, l, sequence, index), groups = []
  let best = every[0]
  for (const each of every) {
    if (each[4] > best[4]) best = each
    const name = words(each).split(",")[0]
    if (groups.at(-1)?.name !== name) groups.push({ name, moments: [], most: each })
    const group = groups.at(-1)
    if (each[4] > group.most[4]) group.most = each
    group.moments.push({ kind: each[0], parts: partsAt(each, s, l, sequence, index) })
  }
  for (const group of groups) {
    const parts = partsAt(group.most, s, l, sequence, index)
    Object.assign(group, { moment: words(group.most), contains: sums(parts), full: group.most === best })
  }
  const { moment, contains } = groups.find(each => each.full)
  return { moment, contains, passes: groups.map(each => `${each.moment}: ${each.contains}`), groups }
}

const LENGTHS = { "forward": 1, "head forward": 1, "backward": 2, "head backward": 2, "embedding": 1 }

export const drawStep = (svg, width, { groups, moment }, index, room, size, chosen) => {
  const names = Object.keys(groups[0].moments[0].parts), left = 52, top = 20, high = 190, bottom = top + high
  const length = ({ kind }) => LENGTHS[kind] ?? all / 24
  const all = sum(groups.slice(0, -1).flatMap(each => each.moments.map(length)))
  const scale = (width - left - 2) / (all * 25 / 24)
  const most = 1.06 * Math.max(size, ...groups.flatMap(each => each.moments.map(({ parts }) => sum(Object.values(parts)))))
  const y = bytes => (bottom - high * bytes / most).toFixed(1), out = []
  // one area for each part, from the top of the parts below it
  let below = groups.flatMap(each => each.moments.map(() => 0))
  const ends = []
  let x = left
  for (const each of groups) for (const one of each.moments) ends.push([x, x += length(one) * scale])
  names.forEach((name, k) => {
    const above = groups.flatMap(each => each.moments).map(({ parts }, i) => below[i] + parts[name])
    const line = (values, i) => `${ends[i][0].toFixed(1)} ${y(values[i])}L${ends[i][1].toFixed(1)} ${y(values[i])}`
    const there = upTo(ends.length), old = below
    const back = there.toReversed().map(i => `${ends[i][1].toFixed(1)} ${y(old[i])}L${ends[i][0].toFixed(1)} ${y(old[i])}`)
    out.push(`<path d="M${[...there.map(i => line(above, i)), ...back].join("L")}Z" fill="${hue(k, names.length)}"/>`)
    below = above
  })
  let last = -20 // where the label above is
  for (const [at, label, kind] of [[size, inBytes(size), ""], [room, "limit", "dashed"], [0, "0", ""]]) {
    const down = Number(y(at)) + (at && 4)
    if (at) out.push(`<path d="M${left} ${y(at)}H${width}" class="frame ${kind}"/>`)
    if (down - last > 12) out.push(`<text x="${left - 5}" y="${last = down}" class="end soft">${label}</text>`)
  }
  let at = 0
  groups.forEach(({ name, moments, moment: full, contains }, i) => {
    const [from, to] = [ends[at][0], ends[at + moments.length - 1][1]], wide = to - from
    at += moments.length
    const letter = name[0], number = name.match(/\d+$/)?.[0] ?? ""
    out.push(`<rect x="${from.toFixed(1)}" y="${bottom + 4}" width="${Math.max(1, wide - 1).toFixed(1)}" height="18" class="op-${{ f: "F", b: "B", o: "W" }[letter]}"/>`)
    if (wide > 13) out.push(`<text x="${((from + to) / 2).toFixed(1)}" y="${bottom + 17}" class="on">${number}</text>`)
    out.push(`<rect x="${from.toFixed(1)}" y="${top}" width="${wide.toFixed(1)}" height="${high + 22}" class="grip" data-pass="${i}" data-tip="${full}: ${contains}"/>`)
    if (i === chosen) out.push(`<rect x="${from.toFixed(1)}" y="${top}" width="${wide.toFixed(1)}" height="${high + 22}" class="frame" pointer-events="none"/>`)
    if (full !== moment) return
    const sizes = moments.map(({ parts }) => sum(Object.values(parts))), fullest = sizes.indexOf(Math.max(...sizes))
    const x = sum(ends[at - moments.length + fullest]) / 2
    out.push(`<path d="M${x.toFixed(1)} 14V${y(sizes[fullest])}" class="held"/>`,
      `<text x="${Math.min(width - 46, Math.max(left + 46, x)).toFixed(1)}" y="11" class="chosen">peak ${contains.split(" = ")[1]}</text>`)
  })
  let here = 0, line = bottom + 40
  const key = [["forward", "class=\"op-F\""], ["backward", "class=\"op-B\""], ["optimizer step", "class=\"op-W\""]]
  for (const [i, [name, paint]] of [...key, ...names.map((name, k) => [name, `fill="${hue(k, names.length)}"`])].entries()) {
    const wide = 28 + 6.6 * name.length
    if (here + wide > width || i === key.length) [here, line] = [0, line + 18]
    out.push(`<rect x="${here}" y="${line - 10}" width="12" height="11" ${paint}/>`, `<text x="${here + 16}" y="${line}" class="start soft">${name}</text>`)
    here += wide
  }
  fill(svg, width, line + 6, out.join(""))
  svg.setAttribute("aria-label", `The memory of stage ${index} during one step, divided into its parts. The fullest moment is the ${moment}.`)
}
