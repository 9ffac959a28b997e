// What the style sheet cannot do. The theme adds its copy buttons and measures while it runs,
// so its additions are watched.

// The theme puts each copy button into a <nav> without a name; a code block is no landmark.
// And what scrolls sideways must be reachable by keyboard.
const mend = () => {
  for (const nav of document.querySelectorAll(".md-code__nav:not([role])")) {
    nav.setAttribute("role", "group")
    nav.setAttribute("aria-label", "Code")
  }
  for (const box of document.querySelectorAll("div.formula, .md-typeset__scrollwrap")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
    else box.removeAttribute("tabindex")
  }
}

let waiting = 0
const soon = () => {
  if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; mend() })
}
new MutationObserver(soon).observe(document.body, { childList: true, subtree: true })
addEventListener("resize", soon)
mend()
