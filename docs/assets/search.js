// The search: the worker that the theme's search box asks, in place of the theme's own.
//
// There is no index. The first question fetches the book's text, and each word is looked up in
// it as it stands, which takes about a millisecond. A rare word counts more than a frequent one,
// and so do two neighbours that are neighbours in the question too: that is what finds an error
// message of which numbers and paths are other ones here.

const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3] // the messages of the theme
const LETTERS = Array.from({ length: 0x10000 }, (_, code) => /[\p{L}\p{N}]/u.test(String.fromCharCode(code)))
let book

addEventListener("message", async ({ data: { type, data } }) => {
  if (type === SETUP) {
    if (data.docs.length) book = made(data.docs) // in the zip, for a page of a disk fetches nothing
    postMessage({ type: READY })
  }
  if (type !== QUERY) return
  if (data.trim()) book ??= read()
  const found = data.trim() ? search(await book, data) : { items: [] }
  postMessage({ type: RESULT, data: found })
})

async function read() {
  const answer = await fetch(new URL("../search/text.json", self.location))
  return made(await answer.json())
}

function made(texts) {
  let from = 0
  const sections = texts.map(([location, title, text, weight]) => {
    const plain = title.replace(/<[^>]+>/g, "")
    const section = { location, title, from, body: from + plain.length + 1, plain, text, weight }
    from = section.body + text.length + 1
    return section
  })
  sections.forEach((section, i) => {
    section.isPage = !section.location.includes("#")
    section.page = section.isPage ? section : sections[i - 1].page
  })
  const text = sections.map(({ plain, text }) => `${plain}\n${text}\n`).join("")
  return { sections, text, low: lower(text), length: from / sections.length, known: new Map() }
}

const lower = text => text.replace(/İ/g, "I").toLowerCase() // of the same length

// ---- words: what is looked up, and where it stands

const [MOST, NAME, BEFORE] = [80, 8, 0.3] // words of a question, of an error's name; what one before it counts

function words(query) {
  const plain = query
    .replace(/frame #\d+: .*?(\(0x[\da-f]+ in [^)]*\)|\[0x[\da-f]+\])/g, " ") // of a stack in C++
    .replace(/File "[^"]*", line \d+, in \S+|\[?rank\d+\]:?(?=\s)/g, " ") // of a traceback
    .replace(/(?<![\w.])(\w:|~|\.+)?([\/\\][\w.+-]+)+[\/\\]/g, " ") // a file's name is enough
  const all = []
  for (const { 0: run, index } of plain.matchAll(/[\p{L}\p{N}]+/gu)) {
    let at = index
    for (const part of run.split(/(?=\p{Lu}\p{Ll})/u)) {
      all.push({ word: lower(part), at })
      at += part.length
    }
  }
  const found = all.length > 1 ? all.filter(({ word }) => word.length > 1) : all
  // Of a log the last error counts, its name and what follows; where there is none, the end.
  const said = Math.max(...["error:", "exception:"].map(word => lower(plain).lastIndexOf(word)))
  const error = found.findIndex(({ at }) => said >= 0 && at >= said) - NAME
  const end = Math.max(0, found.length - MOST)
  const from = error < -NAME ? end : Math.min(Math.max(0, error), end)
  return found.slice(from, from + MOST)
    .map((each, i) => ({ ...each, weigh: from + i < error ? BEFORE : 1 }))
}

/** Where a word of the text begins with this one; also inside DistributedDataParallel. */
function places({ text, low, known }, word, whole) {
  const key = `${word} ${whole}`
  if (known.has(key)) return known.get(key)
  const found = []
  const isLetter = place => LETTERS[low.charCodeAt(place)]
  for (let i = low.indexOf(word); i >= 0; i = low.indexOf(word, i + 1)) {
    const begins = !isLetter(i - 1) ||
      (text[i] !== low[i] && (text[i - 1] === low[i - 1] || text[i + 1] === low[i + 1]))
    if (begins && !(whole && isLetter(i + word.length))) found.push(i)
  }
  known.set(key, found)
  return found
}

/** Where `first` is followed by `then` as it is in the question, give or take two letters. */
function neighbours(first, then) {
  const apart = then.at - first.at
  if (apart > first.word.length + 12) return []
  let next = 0
  return first.places.filter(place => {
    while (then.places[next] < place + apart - 2) next++
    return then.places[next] <= place + apart + 2 && then.places[next] > place
  })
}

// ---- sections: how much of the question each one has

function search(book, query) {
  const asked = words(query)
  if (!asked.length) return { items: [] }
  const scores = new Map() // of a section: in all, of its title, and how much of that is asked for
  const count = (places, word, weigh = 1, isPair = false) => {
    const found = new Map()
    let section = 0
    for (const place of places) {
      while (book.sections[section + 1]?.from <= place) section++
      const here = found.get(section) ?? { times: 0, title: 0 }
      place < book.sections[section].body - 1 ? here.title++ : here.times++
      found.set(section, here)
    }
    const rarity = Math.log(1 + book.sections.length / (found.size + 0.5)) * weigh
    for (const [section, { times, title }] of found) {
      const { text, plain } = book.sections[section]
      const many = times / (times + 0.6 + (0.6 * text.length) / book.length)
      const score = scores.get(section) ?? { sum: 0, titled: 0, covered: 0, words: new Set() }
      score.sum += rarity * many
      if (title) score.titled += rarity
      if (title && !isPair) score.covered += word.length / plain.length
      score.words.add(word)
      scores.set(section, score)
    }
    return rarity
  }
  const last = asked.at(-1)
  const rarities = new Map()
  for (const each of asked) {
    each.places = places(book, each.word, each !== last && each.word.length < 4)
    if (rarities.has(each.word)) continue
    const weigh = each.weigh * (/^\d+$/.test(each.word) ? 0.2 : 1)
    rarities.set(each.word, count(each.places, each.word, weigh))
  }
  asked.forEach((then, i) => {
    const both = i && neighbours(asked[i - 1], then)
    if (both?.length) count(both, `${asked[i - 1].word} ${then.word}`, then.weigh, true)
  })

  // ---- the answer, as the theme wants it

  const best = [...scores].map(([section, { sum, titled, covered, words }]) => {
    const { weight, isPage } = book.sections[section]
    const named = titled * (1 + 1.5 * covered) * (isPage ? 1.7 : 1)
    return { ...book.sections[section], score: (sum + named) * weight, words }
  }).sort((a, b) => b.score - a.score)
  const telling = [...rarities].filter(([, rarity]) => rarity > 1.2 || rarities.size < 3)
  const pages = new Map()
  for (const { words, ...section } of best) {
    const { location } = section.page
    if (section.score < best[0].score / 5) break
    if (!pages.has(location) && pages.size === 30) continue
    const terms = Object.fromEntries(telling.map(([word]) => [word, words.has(word)]))
    const here = pages.get(location) ?? []
    if (here.length < 6) pages.set(location, [...here, { section, terms }])
  }
  const mark = marker(telling.map(([word]) => word))
  const shown = ({ section, terms }) => ({
    location: section.location,
    title: section.title.split(/(<[^>]+>)/).map((part, i) => i % 2 ? part : mark(part)).join(""),
    text: mark(teaser(book, section, asked, rarities)),
    score: section.score,
    terms,
  })
  const items = [...pages.values()].map(found => {
    if (!found.some(({ section }) => section.isPage)) {
      found.push({ section: { ...found[0].section.page, score: 0 }, terms: found[0].terms })
    }
    return found.map(shown)
  })
  return { items, suggest: suggest(book, last.word) }
}

/** The lines around the place that has most of the question. */
function teaser({ text }, { body, text: { length } }, asked, rarities) {
  const within = asked.flatMap(({ word, places }) =>
    places.slice(index(places, body), index(places, body + length)).map(place => ({ word, place })))
    .sort((a, b) => a.place - b.place)
  let [from, most] = [body, -1]
  within.forEach(({ place }, i) => {
    const near = new Set()
    for (let j = i; within[j]?.place < place + 160; j++) near.add(within[j].word)
    const sum = [...near].reduce((sum, word) => sum + rarities.get(word), 0)
    if (sum > most) [from, most] = [place, sum]
  })
  const line = Math.max(body, from - 60, text.lastIndexOf("\n", from - 1) + 1)
  const to = Math.min(body + length, line + 240)
  const cut = text.slice(line, to).replace(/\S*$/, last => to < body + length ? "" : last)
  return (line > body ? "… " : "") + cut + (to < body + length ? " …" : "")
}

/** How many of the sorted numbers are below `limit`. */
function index(numbers, limit) {
  let [low, high] = [0, numbers.length]
  while (low < high) {
    const middle = (low + high) >> 1
    if (numbers[middle] < limit) low = middle + 1
    else high = middle
  }
  return low
}

/** What makes HTML of text, with the words of the question in it marked. */
function marker(words) {
  const escape = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;")
  const longest = words.sort((a, b) => b.length - a.length).join("|")
  const pattern = new RegExp(`((?<![\\p{L}\\p{N}])(?:${longest}))`, "iu")
  return text => text.split(pattern)
    .map((part, i) => i % 2 ? `<mark>${escape(part)}</mark>` : escape(part)).join("")
}

/** What the word begun may become: the word of most titles. */
function suggest({ sections }, begun) {
  const times = new Map()
  for (const { plain } of sections) {
    for (const [word] of lower(plain).matchAll(/[\p{L}\p{N}]+/gu)) {
      if (word.startsWith(begun)) times.set(word, (times.get(word) ?? 0) + 1)
    }
  }
  return [...times.keys()].sort((a, b) => times.get(a) - times.get(b)).slice(-1)
}
