// The filter of the reading list (11_references.md). Each entry's link carries its topics, kind and
// priority; the rest of the page is a plain table for each topic, complete without this file.
{
  const referenceFilter = () => {
    const place = document.querySelector(".reference-filter")
    if (!place || place.childElementCount) return
    const entries = [...document.querySelectorAll("a.reference")].map(link => ({
      row: link.closest("tr"),
      marks: link.dataset,
      text: link.closest("tr").textContent.toLowerCase(),
    }))
    // A topic's heading, its line and its table go together when nothing in it is left.
    const groups = []
    for (const table of new Set(entries.map(entry => entry.row.closest("table")))) {
      const parts = [table.closest(".md-typeset__scrollwrap")]
      while (parts[0].previousElementSibling && parts[0].tagName !== "H3") {
        parts.unshift(parts[0].previousElementSibling)
      }
      groups.push({ table, parts, title: parts[0].firstChild.textContent.trim() })
    }

    const make = (tag, attributes = {}, ...inside) => {
      const element = document.createElement(tag)
      for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value)
      element.append(...inside)
      return element
    }
    const choice = (name, label, all, options) => {
      const select = make("select", { id: `references-${name}`, name })
      select.append(make("option", { value: "" }, all))
      for (const [value, text] of options) select.append(make("option", { value }, text))
      return make("label", { for: select.id }, label, select)
    }
    const unique = name => [...new Set(entries.map(entry => entry.marks[name]))]
    const inOrder = ["must", "should", "deep"]
    // The main topic of an entry is its first; groups stand in the order of the page.
    const topics = groups.map(({ table, title }) =>
      [table.querySelector("a.reference").dataset.topics.split(" ")[0], title])
    const word = make("input", { id: "references-word", name: "word", type: "search" })
    const count = make("output", { "aria-live": "polite", for: "references-topic" })
    const form = make("form", { "aria-label": "Narrow the list" },
      choice("topic", "Topic", "all topics", topics),
      choice("priority", "Priority", "any", inOrder.map(p => [p, p === "deep" ? "deep dive" : p])),
      choice("kind", "Kind", "all kinds", unique("kind").sort().map(kind => [kind, kind])),
      make("label", { for: word.id }, "Word", word),
      make("button", { type: "reset", class: "md-button" }, "Show all"),
      count)

    const show = () => {
      const { topic, priority, kind } = Object.fromEntries(new FormData(form))
      const wanted = word.value.trim().toLowerCase()
      let left = 0
      for (const { row, marks, text } of entries) {
        const fits = (!topic || marks.topics.split(" ").includes(topic))
          && (!priority || marks.priority === priority)
          && (!kind || marks.kind === kind)
          && text.includes(wanted)
        row.hidden = !fits
        left += fits
      }
      for (const { table, parts } of groups) {
        const empty = !table.querySelector("tbody tr:not([hidden])")
        for (const part of parts) part.hidden = empty
      }
      count.textContent = left === entries.length ? `all ${left} entries` : `${left} of ${entries.length} entries`
    }
    form.addEventListener("input", show)
    form.addEventListener("submit", event => event.preventDefault())
    form.addEventListener("reset", () => setTimeout(show))
    place.append(form)
    show()

    // A link to an entry that the filter hides shows all of them again.
    const reveal = () => {
      const target = document.getElementById(decodeURIComponent(location.hash.slice(1)))
      if (!target?.closest("[hidden]")) return
      form.reset()
      setTimeout(() => target.scrollIntoView())
    }
    addEventListener("hashchange", reveal)
  }

  if (window.document$) document$.subscribe(referenceFilter)
  else referenceFilter()
}
