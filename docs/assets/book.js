// What the style sheet cannot do. The theme adds its copy buttons and measures while it runs,
// so its additions are watched.

const fix = () => {
  // The theme puts each copy button into a <nav> without a name, but a code block is no landmark.
  for (const nav of document.querySelectorAll(".md-code__nav:not([role])")) {
    nav.setAttribute("role", "none")
  }
  // What a reader copies from a console block is what they would type: the theme's copy button
  // takes the text of data-copy where there is one.
  for (const block of document.querySelectorAll(".language-console.highlight:not([data-copy])")) {
    const typed = block.querySelector("code").cloneNode(true)
    for (const said of typed.querySelectorAll(".gp, .go, .gt, .gr")) said.remove()
    block.dataset.copy = typed.textContent.split("\n").filter(line => line.trim()).join("\n")
  }
  // What scrolls sideways must be reachable by keyboard. All is measured before any is changed.
  const wide = "pre > code, div.formula, .md-typeset__scrollwrap, p:has(> img:only-child)"
  const boxes = [...document.querySelectorAll(wide)]
  const scrolls = boxes.map(box => box.scrollWidth > box.clientWidth)
  boxes.forEach((box, place) => {
    if (scrolls[place]) box.tabIndex = 0
    else box.removeAttribute("tabindex")
    if (!box.matches(".md-typeset__scrollwrap")) return
    // who comes to it by keyboard hears what it is
    const titles = [...box.querySelectorAll("th")].map(cell => cell.textContent.trim()).filter(Boolean)
    if (scrolls[place]) box.setAttribute("role", "group")
    else box.removeAttribute("role")
    if (scrolls[place]) box.setAttribute("aria-label", `Table that scrolls sideways: ${titles.join(", ")}`)
    else box.removeAttribute("aria-label")
  })
}

// Measuring makes the browser lay out the page: do it when there is nothing else to do.
const idle = window.requestIdleCallback ?? (task => setTimeout(task, 200))
let waiting = false
const soon = () => {
  if (waiting) return
  waiting = true
  idle(() => { waiting = false; fix() }, { timeout: 500 })
}
new MutationObserver(soon).observe(document.body, { childList: true, subtree: true })
addEventListener("resize", soon)
soon()

// The theme opens all that is folded before it prints: first note what a reader has left folded.
addEventListener("beforeprint", () => {
  for (const each of document.querySelectorAll("details")) each.classList.toggle("folded", !each.open)
}, { capture: true })

// A reader may take the page along: the Markdown that lies beside it.
const copies = document.querySelector(".copy-page")
copies?.firstElementChild.addEventListener("click", async () => {
  const markdown = fetch(document.querySelector("link[type='text/markdown']").href).then(answer => {
    if (!answer.ok) throw new Error(answer.statusText)
    return answer.text()
  }).then(text => new Blob([text], { type: "text/plain" }))
  let said = "Copied as Markdown."
  try { // the clipboard waits for the file, or it would forget that a reader asked
    await navigator.clipboard.write([new ClipboardItem({ "text/plain": markdown })])
  } catch {
    said = "Not copied. The link beside this button leads to the Markdown."
  }
  copies.lastElementChild.textContent = said
  setTimeout(() => { copies.lastElementChild.textContent = "" }, 5000)
})

// Each section can be reported as the page can, with the programs in it and what they ran on.
const report = document.querySelector(".page-end .report")
const within = (heading, what) => {
  const found = new Set()
  for (let part = heading.nextElementSibling; part && !/^H[1-3]$/.test(part.tagName); part = part.nextElementSibling) {
    for (const each of part.querySelectorAll(what)) found.add(each.textContent)
    if (part.matches(what)) found.add(part.textContent)
  }
  return [...found].join("\n").slice(0, 1500) // an address has its limit
}
if (report) idle(() => {
  // a page made of a program is about that program, whatever the section
  const made = document.querySelector(".md-content__button[href*='/edit/main/']")?.href.split("/edit/main/")[1]
  const own = made?.startsWith("docs/") ? "" : made ?? ""
  const ran = own && document.querySelector(".provenance")?.textContent || ""
  if (own) report.search += `&${new URLSearchParams({ transcript: own, versions: ran })}`
  // an output without a note was recorded on the machine that the page names at its top
  const machine = document.querySelector(".page-machine")?.textContent || ""
  for (const heading of document.querySelectorAll(".md-content :is(h2, h3)[id]")) {
    const link = document.createElement("a")
    const asked = new URL(report.href)
    asked.searchParams.set("section", `#${heading.id}`)
    asked.searchParams.set("transcript", within(heading, ".program-path").replaceAll("\n", ", ") || own)
    asked.searchParams.set("versions", within(heading, ".provenance") || ran || within(heading, ".transcript") && machine)
    link.href = asked
    link.className = "headerlink report"
    link.setAttribute("aria-label", "Report an error in this section")
    heading.append(link)
  }
})

// The theme searches when a key is let go; what the mouse pastes is a question too.
const search = document.querySelector("[data-md-component=search-query]")
search?.addEventListener("input", () => search.dispatchEvent(new Event("keyup")))
