// What the instruments share: their controls, whose state is the address, and how numbers are written.

export const element = (tag, attributes = {}, ...inside) => {
  const made = document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value)
  made.append(...inside)
  return made
}

// ---- numbers, as the programs write them

export const upTo = n => [...Array(n).keys()]
export const sum = values => values.reduce((a, b) => a + b, 0)
export const digits = x => x >= 1000 ? String(Math.floor(x + 0.5)) : String(Number(x.toPrecision(3)))

export const inBytes = x => {
  const [unit, size] = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(u => x >= u[1]) ?? ["B", 1]
  return `${digits(x / size)} ${unit}`
}

export const inSeconds = x => {
  const [unit, scale] = [["s", 1], ["ms", 1e3]].find(u => x * u[1] >= 1) ?? ["µs", 1e6]
  return `${digits(x * scale)} ${unit}`
}

// A number and its unit stay on one line.
export const joined = text => text.replace(/(\d) (?=\S)/g, "$1\u00a0")

// ---- colours: one for each of n things, dark enough for white words on it in both schemes

export const hue = (i, n) => `oklch(${i % 2 ? 0.45 : 0.56} 0.13 ${(235 + (360 * i) / n) % 360})`

// ---- what an instrument shows: a picture, facts, a table

export const picture = (caption, columns, ...above) => {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg")
  svg.setAttribute("role", "img")
  svg.setAttribute("aria-label", caption)
  const terms = element("dl", { class: "instrument-facts" })
  const body = element("tbody")
  const head = columns.map(words => element("th", { scope: "col" }, words))
  const table = element("table", { class: "instrument-table" },
    element("caption", {}, caption), element("thead", {}, element("tr", {}, ...head)), body)
  const list = rows => terms.replaceChildren(...rows.map(([name, words]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, joined(words)))))
  // By name the cells of a row, or one across them all; the best has a word behind a cell.
  const compare = (others, chosen, best, column, word) => body.replaceChildren(
    ...Object.entries(others).map(([name, cells]) => element("tr",
      name === chosen ? { "aria-current": "true" } : {}, element("th", { scope: "row" }, name),
      ...cells.map((words, i) => element("td", cells.length > 1 ? {} : { colspan: columns.length - 1 },
        joined(words), i === column && name === best ? ` · ${word}` : "")))))
  return { svg, list, compare, output: element("div", { class: "instrument-picture" }, ...above, svg, terms, table) }
}

export const fill = (svg, width, height, inside) => {
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`)
  svg.setAttribute("width", width)
  svg.setAttribute("height", height)
  svg.innerHTML = inside
}

// ---- an instrument

// The width to draw for: an element has none before the first layout, and none out of the page.
export const widthOf = place => Math.max(260, place.clientWidth)

export const still = () => matchMedia("(prefers-reduced-motion: reduce)").matches

// A control has a name (in the address), a label, options(state) → values, text(value, state), what
// it is at first, whether it is a slider, and where it stands. One that has valid(text) in place of options is a
// field to type in. `show(state, tell)` draws, and returns the command that prints the same numbers.
export const instrument = (place, { controls, show, output }) => {
  const state = {}
  const asked = new URLSearchParams(location.search)
  const inputs = new Map()
  const status = element("p", { class: "instrument-status", role: "status" })
  const command = element("code")

  const firstOf = (first, state) => typeof first === "function" ? first(state) : first
  const settle = () => { // an option that is gone gives way to the nearest, or to the first
    for (const { name, options, first, valid } of controls) {
      if (valid) state[name] ??= first
      if (valid) continue
      const values = options(state)
      if (values.includes(state[name])) continue
      const near = state[name] ?? firstOf(first, state)
      state[name] = values.includes(near) ? near : typeof near === "number"
        ? values.reduce((best, each) => Math.abs(each - near) < Math.abs(best - near) ? each : best)
        : values[0]
    }
  }
  const read = (name, text) => {
    const { options, valid } = controls.find(each => each.name === name)
    return (valid ? [text].filter(valid) : options(state)).find(value => String(value) === text)
  }

  const paint = () => {
    for (const { name, options, text = String, slider, valid } of controls) {
      if (valid) {
        const field = inputs.get(name).input
        if (field !== document.activeElement) field.value = state[name]
        field.setAttribute("aria-invalid", false)
        continue
      }
      const { input, output } = inputs.get(name)
      const values = options(state)
      if (slider) {
        input.max = values.length - 1
        input.value = values.indexOf(state[name])
        output.textContent = text(state[name], state)
        input.setAttribute("aria-valuetext", output.textContent)
      } else {
        const words = values.map(value => text(value, state))
        if (input.dataset.words !== words.join()) {
          input.dataset.words = words.join()
          input.replaceChildren(...values.map((value, i) => element("option", { value }, words[i])))
        }
        input.value = state[name]
      }
      input.disabled = input.parentElement.hidden = values.length < 2
    }
  }

  let asks = 0
  const address = () => { // browsers refuse an address that changes all the time
    clearTimeout(asks)
    asks = setTimeout(() => {
      const url = new URL(location)
      const begin = {}
      for (const { name, first } of controls) {
        begin[name] = firstOf(first, begin)
        if (state[name] === begin[name]) url.searchParams.delete(name)
        else url.searchParams.set(name, state[name])
      }
      history.replaceState(history.state, "", url)
    }, 150)
  }

  const tell = text => { if (status.textContent !== text) status.textContent = text }
  const change = (changes = {}) => {
    Object.assign(state, changes)
    settle()
    paint()
    command.textContent = show(state, tell)
    address()
  }

  const form = element("form", { class: "instrument-controls", "aria-label": "Settings" })
  for (const { name, label, options, slider, beside, valid, wide = "" } of controls) {
    const id = `${place.id}-${name}`
    const input = element(slider || valid ? "input" : "select",
      slider ? { id, type: "range", min: 0, step: 1, autocomplete: "off" }
        : valid ? { id, type: "text", autocomplete: "off", autocapitalize: "off", spellcheck: "false" } : { id })
    const output = element("span", { class: "instrument-value", "aria-hidden": "true" })
    inputs.set(name, { input, output })
    const box = beside ?? form
    box.append(element("div", wide && { class: wide }, element("label", { for: id }, label), output, input))
    input.addEventListener("input", () => {
      const value = slider ? options(state)[input.value] : read(name, input.value.trim())
      if (value !== undefined) return change({ [name]: value })
      input.setAttribute("aria-invalid", true)
      tell(`${label}: what is typed is not understood.`)
    })
  }
  form.addEventListener("submit", event => event.preventDefault())

  const button = (words, press) => {
    const made = element("button", { type: "button", class: "md-button" }, words)
    made.addEventListener("click", press)
    return made
  }
  const copy = (text, what) => navigator.clipboard?.writeText(text).then(
    () => tell(`${what} is copied.`), () => tell("The browser does not let a page copy."))
  const foot = element("p", { class: "instrument-foot" },
    button("Copy link", () => {
      const url = new URL(location)
      for (const { name } of controls) url.searchParams.set(name, state[name])
      copy(url.href, "The address of this view")
    }),
    button("Copy as Python", () => copy(command.textContent, "The command")),
    button("Start again", () => {
      for (const { name } of controls) delete state[name]
      change()
    }))
  output.querySelector("svg").after(status)
  place.append(form, output,
    element("p", { class: "instrument-command" }, "The same numbers: ", command), foot)
  for (const { name } of controls) {
    const value = asked.has(name) ? read(name, asked.get(name)) : undefined
    if (value !== undefined) state[name] = value
    settle()
  }
  change()
  let width = place.clientWidth
  new ResizeObserver(() => {
    if ([0, width].includes(place.clientWidth)) return
    width = place.clientWidth
    show(state, () => {})
  }).observe(place)
  place.dataset.ready = ""
  return { state, change, button }
}
