// Check a built site with a browser, html-validate and Lighthouse. README.md describes the options.
import { spawn } from "node:child_process"
import { existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, statSync } from "node:fs"
import { createServer } from "node:http"
import { createRequire } from "node:module"
import { tmpdir } from "node:os"
import { extname, join, resolve } from "node:path"
import { parseArgs } from "node:util"
import { gzipSync } from "node:zlib"

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    modules: { type: "string", default: process.env.NODE_PATH ?? "node_modules" },
    chromium: { type: "string", default: "/usr/bin/chromium" },
    only: { type: "string", default: "" },
    shots: { type: "string" },
    html: { type: "boolean", default: false },
    lighthouse: { type: "boolean", default: false },
    browser: { type: "boolean", default: true },
  },
  allowNegative: true,
})
const site = resolve(positionals[0] ?? "site")
const modules = resolve(options.modules)
const require = createRequire(join(modules, "judge.js"))

const CHROMIUM_OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
  "--disable-background-networking", "--disable-component-update", "--disable-sync"]
const TYPES = { ".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript",
  ".json": "application/json", ".svg": "image/svg+xml", ".png": "image/png",
  ".xml": "application/xml", ".txt": "text/plain; charset=utf-8" }

// ---- serve the site under the path at which it is published, compressed with gzip

const sitemap = readFileSync(join(site, "sitemap.xml"), "utf8")
const urls = [...sitemap.matchAll(/<loc>(.*?)<\/loc>/g)].map(match => new URL(match[1]))
const root = urls.map(url => url.pathname).reduce((a, b) => (a.length <= b.length ? a : b))

const server = createServer((request, response) => {
  const path = decodeURIComponent(new URL(request.url, "http://x").pathname)
  let file = join(site, path.startsWith(root) ? path.slice(root.length) : "-")
  if (existsSync(file) && statSync(file).isDirectory()) file = join(file, "index.html")
  const found = existsSync(file)
  if (!found) file = join(site, "404.html")
  response.writeHead(found ? 200 : 404, {
    "content-type": TYPES[extname(file)] ?? "application/octet-stream",
    "content-encoding": "gzip", "cache-control": "max-age=600",
  })
  response.end(gzipSync(readFileSync(file)))
})
await new Promise(done => server.listen(0, "127.0.0.1", done))
const origin = `http://127.0.0.1:${server.address().port}`
const paths = [...urls.map(url => url.pathname), `${root}404.html`]
  .filter(path => new RegExp(options.only).test(path))

let errors = 0
const report = (where, message) => { errors += 1; console.log(`${where}\n    ${message}`) }

// ---- open each page in a browser: axe, the console, requests to other hosts, the width

if (options.browser) {
  const { chromium } = require("playwright-core")
  const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8")
  const browser = await chromium.launch({ executablePath: options.chromium, args: CHROMIUM_OPTIONS })
  for (const colorScheme of ["light", "dark"]) {
    for (const width of [1440, 390]) {
      const context = await browser.newContext({
        colorScheme, viewport: { width, height: width > 500 ? 900 : 844 }, reducedMotion: "reduce",
      })
      for (const path of paths) {
        const where = `${path} (${colorScheme}, ${width} px)`
        const page = await context.newPage()
        page.on("console", message => {
          if (message.type() === "error") report(where, `console: ${message.text()}`)
        })
        page.on("pageerror", error => report(where, `script: ${error.message}`))
        page.on("request", request => {
          if (!/^(data|blob):/.test(request.url()) && !request.url().startsWith(origin)) {
            report(where, `the page requests a file of a different host: ${request.url()}`)
          }
        })
        await page.goto(origin + path, { waitUntil: "load" })
        await page.evaluate(() => {
          for (const details of document.querySelectorAll("details")) details.open = true
        })
        await page.waitForTimeout(150)
        const excess = await page.evaluate(
          () => document.documentElement.scrollWidth - document.documentElement.clientWidth)
        if (excess > 0) report(where, `the page is ${excess} px wider than the window`)
        await page.evaluate(axe)
        const { violations } = await page.evaluate(() => window.axe.run())
        for (const { id, help, nodes } of violations) {
          const examples = nodes.slice(0, 4).map(node => `\n        ${node.target.join(" ")} · ${
            (node.any[0]?.message ?? node.html).slice(0, 220)}`)
          report(where, `axe ${id}: ${help} (${nodes.length})${examples.join("")}`)
        }
        if (options.shots) {
          mkdirSync(options.shots, { recursive: true })
          const name = (path.slice(root.length) || "index").replace(/\W+/g, "-")
          await page.screenshot({
            path: join(options.shots, `${name}-${colorScheme}-${width}.png`), fullPage: true,
          })
        }
        await page.close()
      }
      await context.close()
    }
  }
  await browser.close()
  console.log(`${paths.length} pages opened in a browser`)
}

// ---- check the HTML of each page with html-validate

if (options.html) {
  const { HtmlValidate, FileSystemConfigLoader } = require("html-validate")
  const rules = JSON.parse(readFileSync(new URL("htmlvalidate.json", import.meta.url), "utf8"))
  const loader = new FileSystemConfigLoader({ root: true, ...rules.config })
  const validator = new HtmlValidate(loader)
  for (const path of paths) {
    const file = path.endsWith(".html") ? path : `${path}index.html`
    const { results } = await validator.validateString(
      readFileSync(join(site, file.slice(root.length)), "utf8"))
    for (const { messages } of results) {
      for (const { line, column, ruleId, message } of messages) {
        report(`${file}:${line}:${column}`, `${ruleId}: ${message}`)
      }
    }
  }
  console.log(`${paths.length} pages validated`)
}

// ---- run Lighthouse on each page, as a desktop and as a phone

const DEVICES = {
  desktop: { flags: ["--preset=desktop"], minPerformance: 0.95 },
  phone: { flags: [], minPerformance: 0.9 },
}

async function lighthouse(path, device, file) {
  const args = [join(modules, "lighthouse/cli/index.js"), origin + path, "--quiet", "--output=json",
    ...DEVICES[device].flags, `--output-path=${file}`,
    `--chrome-flags=--headless ${CHROMIUM_OPTIONS.join(" ")}`]
  await new Promise(done => spawn(process.execPath, args, {
    env: { ...process.env, CHROME_PATH: options.chromium }, stdio: "inherit",
  }).on("exit", done))
  const { categories, audits } = JSON.parse(readFileSync(file, "utf8"))
  for (const [name, { title, score, auditRefs }] of Object.entries(categories)) {
    if (score >= (name === "performance" ? DEVICES[device].minPerformance : 1)) continue
    const failed = auditRefs.filter(ref => ref.weight && (audits[ref.id].score ?? 1) < 0.9)
    report(path, `${device}: ${title} ${score}: ${failed.map(ref => ref.id).join(", ")}`)
  }
  return Object.values(categories).map(({ score }) => Math.round(score * 100)).join(" ")
}

if (options.lighthouse) {
  const scratch = mkdtempSync(join(tmpdir(), "judge-"))
  console.log("page: kB, compressed kB; performance, accessibility, best practices, SEO")
  for (const path of paths.filter(path => !path.endsWith("404.html"))) {
    const html = readFileSync(join(site, path.slice(root.length), "index.html"))
    const sizes = [html, gzipSync(html)].map(each => Math.round(each.length / 1000))
    const scores = []
    for (const device of Object.keys(DEVICES)) {
      scores.push(`${device} ${await lighthouse(path, device, join(scratch, "report.json"))}`)
    }
    console.log(`${path}: ${sizes.join(" ")}; ${scores.join("; ")}`)
  }
  rmSync(scratch, { recursive: true })
}

server.close()
console.log(errors ? `${errors} errors` : "no errors")
process.exitCode = errors ? 1 : 0
