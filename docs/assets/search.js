// The search: the worker that the theme's search box asks, instead of the theme's own worker.
//
// The first question fetches the text of the book, and an index of its words is made, which takes
// a fraction of a second. A question may be a plain description, an error message, or a whole log.
// - A log is first cut to its last error: paths, frames of a stack, time stamps and colours do not count.
// - A word stands for all words with the same stem, and for the other names in the lists below.
// - A rare word counts more than a frequent one, a word of a heading more than one of the text, and
//   a word of the text more than one of a program. Two words that follow each other in the question
//   and in the book count once more. So do the words of the question that stand close together.
// - A section that has all words of the question comes before one that has only some of them.

const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3] // the messages of the theme
const codes = pattern => Array.from({ length: 0x10000 }, (_, code) => pattern.test(String.fromCharCode(code)))
const [LETTERS, CAPITALS, SMALL] = [/[\p{L}\p{N}]/u, /\p{Lu}/u, /\p{Ll}/u].map(codes)
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
  const sections = texts.map(([location, title, prose, weight, code]) => {
    const plain = title.replace(/<[^>]+>/g, "")
    const [text, body] = [`${prose}\n${code}`, from + plain.length + 1]
    const { length } = text
    const section = { location, title, from, body, code: body + prose.length, length, plain, text, weight }
    from = body + text.length + 1
    return section
  })
  sections.forEach((section, i) => {
    section.number = i
    section.isPage = !section.location.includes("#")
    section.page = section.isPage ? section : sections[i - 1].page
  })
  const text = sections.map(({ plain, text }) => `${plain}\n${text}\n`).join("")
  const titled = new Map() // how many titles have a word
  for (const { plain } of sections) {
    for (const [word] of lower(plain).matchAll(/[\p{L}\p{N}]+/gu)) titled.set(word, (titled.get(word) ?? 0) + 1)
  }
  return { sections, text, titled, ...indexed(sections, text), average: from / sections.length }
}

const lower = text => text.replace(/İ/g, "I").toLowerCase() // of the same length

// ---- the index: where each word of the book is

const [TITLE, PROSE, CODE] = [0, 1, 2]

/** The words of the text, in order: where each one begins, its section; and the places of each word. */
function indexed(sections, text) {
  const low = lower(text)
  const ids = new Map() // of each word: its number
  const most = text.length >> 1
  const begins = new Int32Array(most), section = new Uint16Array(most), kind = new Uint8Array(most)
  const [entries, entryPlaces] = [new Int32Array(most), new Int32Array(most)]
  let [count, entry, current] = [0, 0, 0]
  sections[0].token = 0
  const note = (from, to, place) => {
    const word = low.slice(from, to)
    let id = ids.get(word)
    if (id === undefined) ids.set(word, id = ids.size)
    entries[entry] = id
    entryPlaces[entry++] = place
  }
  for (let at = 0; at < text.length; at++) {
    if (!LETTERS[text.charCodeAt(at)]) continue
    const [start, first] = [at, count]
    while (sections[current + 1]?.from <= at) sections[++current].token = count
    for (let from = at; LETTERS[text.charCodeAt(from)]; from = at) {
      at++
      while (LETTERS[text.charCodeAt(at)] && !isHump(text, at)) at++
      begins[count] = from
      section[count] = current
      kind[count] = from < sections[current].body - 1 ? TITLE : from < sections[current].code ? PROSE : CODE
      note(from, at, count++)
    }
    if (count > first + 1) note(start, at, first) // DataLoader is found as dataloader, too
  }
  const words = [...ids.keys()]
  const starts = new Int32Array(words.length + 1)
  for (let i = 0; i < entry; i++) starts[entries[i] + 1]++
  for (let i = 0; i < words.length; i++) starts[i + 1] += starts[i]
  const [next, places] = [starts.slice(), new Int32Array(entry)]
  for (let i = 0; i < entry; i++) places[next[entries[i]]++] = entryPlaces[i]
  const stems = new Map()
  for (const [word, id] of ids) {
    const key = stem(word)
    stems.has(key) ? stems.get(key).push(id) : stems.set(key, [id])
  }
  const placesOf = id => places.subarray(starts[id], starts[id + 1])
  return { begins, section, kind, ids, stems, placesOf, sorted: words.sort() }
}

/** Whether a word begins inside a name such as DistributedDataParallel. */
const isHump = (text, at) => CAPITALS[text.charCodeAt(at)] &&
  (SMALL[text.charCodeAt(at - 1)] || SMALL[text.charCodeAt(at + 1)])

/** An English word without its ending: compile, compiled and compilation have the same stem. */
function stem(word) {
  if (word.length < 4 || !/^[a-z]+$/.test(word)) return word
  const plain = word.replace(/ie[sd]$/, "y").replace(/([^su])s$/, "$1")
  const bare = plain.replace(/(ation|ing|ion|ed|er|ly)$/, "")
  const short = bare.length > 2 && /[aeiouy]/.test(bare) ? bare : plain
  return short.replace(/([bdfgmnprt])\1$/, "$1").replace(/(?<=...)e$/, "")
    .replace(/(?<=....)at$/, "").replace(/(?<=...)is$/, "iz")
}

// ---- the question: its words, and what each one may be called in the book

const MOST = 110 // words of a question
const CONTEXT = 20 // words before an error that are looked up, too
const WEIGHTS = {
  context: 0.3, // of a word before the error
  stem: 0.75, // of a word with the same stem
  prefix: 0.85, // of a word that begins like it
  same: 0.5, // of another name for it
  joined: 1.9, // of two words that the book writes as one
  common: 0.2, // of a common word
  small: 0.2, // of a number, or a single letter
  code: 0.8, // in a program
  k: 1, // the larger it is, the more a repeated word adds
  b: 0.8, // how much a long section counts less
  cover: 2.2, // for the fraction of the heading that the question covers
  page: 0.8, // in the title of a page
  above: 0.85, // in the title of the page, for its sections
  pair: 1.1, // two words that follow each other
  near: 0.8, // words that are close together
  span: 31, // the largest distance, in words, at which words are close together
  all: 0.6, // for the fraction of the question that a section has
  first: 0.43, // a section with this fraction of its page's score comes instead of the page
}

// Names that people use for the same thing: the words of a line stand for one another.
const SAME = `
  hang stuck freeze frozen deadlock stall
  slow slower slowdown throughput
  crash die abort fail
  spike jump
  grow increase leak
  machine node
  resume restart reload
  unequal uneven different
  same identical
  gpu device
  wrong incorrect
`.trim().split("\n").map(line => line.trim().split(" ").map(stem))
// Abbreviations, and what is looked up in addition.
const SHORT = Object.entries({
  "it/s|its/s": "iterations per second throughput",
  oom: "out of memory",
  vram: "gpu memory",
  ram: "host memory",
  "time[ds]? out": "timeout",
  "timeouts?": "timed out",
  lr: "learning rate",
  ckpt: "checkpoint",
  amp: "autocast mixed precision",
  "multi[- ]?gpus?": "several gpus",
}).map(([short, long]) => [new RegExp(`(?<![\\w.])(?:${short})(?![\\w.=(])`, "gi"), long])
const COMMON = new Set(`a about after all also am an and any are as at be been but by can cannot could did do does doing
  for from get gets give given go had has have having he how i if in into is it its just me more most my no not of on
  one or other our out own please same she should so some such than that the their them then there these they this
  those to too use used using very was way we were what when where which while who why will with without would you
  your error errors runtimeerror valueerror exception traceback recent call last file line module raise problem
  issue help`.split(/\s+/))

/** Whether a word is a number or a single letter, which says little about what is meant. */
const isSmall = word => word.length < 2 || /^\d+$/.test(word)

// The stamp at the beginning of a line that C++ or torch logged. One of the two characters WARNING
// and ERROR replaces it. It counts as a word until the last step removes it.
const STAMP = /\[?\b([EWIF])\d{3,4} \d\d:\d\d:\d\d[.\d]* (?:\d+ )?\S+?:\d+\]/g
const [WARNING, ERROR] = ["\u0001", "\u0002"]
const FRAME = RegExp([ // of Python, and its code up to the next frame
  /File "[^"]*", line \d+, in \S+/,
  /(?:(?:(?!File "|(?:Error|Exception):)[^]){0,300}(?=File "|[~^]{3}))?/,
].map(({ source }) => source).join(""), "g")

/** The words of a question, each with its place and with how much it counts. */
function wordsOf(question) {
  let plain = question
    .replace(/\x1b?\[[\d;]*m/g, " ") // colours of a terminal
    .replace(/\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*Z?/g, " ")
    .replace(STAMP, (_, level) => "EF".includes(level) ? ` ${ERROR} ` : ` ${WARNING} `)
    .replace(/frame #\d+: .*?(\(0x[\da-f]+ in [^)]*\)|\[0x[\da-f]+\])/g, " ") // of a stack in C++
    .replace(/\[?rank\d+\]:?(?=\s)/g, " ")
    .replace(FRAME, " ")
    .replace(/(?<![\w.])(\w:|~|\.+)?([\/\\][\w.+-]+)+[\/\\]/g, " ") // a file's name is enough
  for (const [short, long] of SHORT) plain = plain.replace(short, `$& ${long}`)
  const all = []
  for (const { 0: run, index } of plain.matchAll(/[\p{L}\p{N}]+|[\u0001\u0002]/gu)) {
    let at = index
    for (const part of run.split(/(?<=\p{Ll})(?=\p{Lu})|(?=\p{Lu}\p{Ll})/u)) {
      all.push({ word: lower(part), at })
      at += part.length
    }
  }
  // Of a log the last error counts, its name and what follows; where there is none, the end.
  const said = Math.max(...["error:", "exception:"].map(word => lower(plain).lastIndexOf(word)))
  const logged = Math.max(plain.indexOf(ERROR), plain.lastIndexOf("(most recent call last)"))
  const begin = said >= 0 ? plain.lastIndexOf(" ", said) : logged
  const error = all.findIndex(({ at }) => begin >= 0 && at >= begin)
  const end = Math.max(0, all.length - MOST)
  const from = error < 0 ? end : Math.min(Math.max(0, error - CONTEXT), end)
  let warned = false
  return all.slice(from, Math.max(from, error) + MOST)
    .map((each, i) => {
      const before = from + i < error
      if (each.word === WARNING || each.word === ERROR) warned = each.word === WARNING && error >= 0 && !before
      return { ...each, weigh: before || warned ? WEIGHTS.context : 1 }
    })
    .filter(({ word }) => word !== WARNING && word !== ERROR)
}

// ---- the words of the book that a word of the question can mean

/** The forms of a word, each with its weight; in a list for the word itself, and one for each other name. */
function forms(book, word, open) {
  const { ids, stems, sorted } = book
  const own = new Map()
  const add = (id, weight) => own.set(id, Math.max(weight, own.get(id) ?? 0))
  for (const id of stems.get(stem(word)) ?? []) add(id, WEIGHTS.stem)
  if (ids.has(word)) add(ids.get(word), 1)
  if (open || word.length > 4) {
    for (let i = first(sorted, word); sorted[i]?.startsWith(word); i++) add(ids.get(sorted[i]), WEIGHTS.prefix)
  }
  const key = stem(word)
  const others = (SAME.find(keys => keys.includes(key)) ?? []).filter(each => each !== key)
    .map(each => new Map((stems.get(each) ?? []).map(id => [id, WEIGHTS.same])))
  return [own, ...others].filter(each => each.size)
}

/** Where in a sorted list `item` is, or would be. */
function first(list, item) {
  let [low, high] = [0, list.length]
  while (low < high) {
    const middle = (low + high) >> 1
    if (list[middle] < item) low = middle + 1
    else high = middle
  }
  return low
}

/** The places of several words, in order. */
function placesOf(book, forms) {
  const all = [...forms.keys()].map(book.placesOf)
  if (all.length === 1) return all[0]
  const joined = new Int32Array(all.reduce((sum, { length }) => sum + length, 0))
  let at = 0
  for (const each of all) {
    joined.set(each, at)
    at += each.length
  }
  return joined.sort()
}

/** Where a word of `first` is followed by one of `then`. */
function neighbours(first, then) {
  const found = []
  let next = 0
  for (const place of first) {
    while (then[next] <= place) next++
    if (then[next] <= place + 2) found.push(then[next])
  }
  return found
}

// ---- sections: how much of the question each one has

const ALONE = 5 // so many of the best sections are listed one by one, and not by page

function search(book, query) {
  const asked = wordsOf(query)
  if (!asked.length) return { items: [] }
  const { sections, section: sectionOf, kind } = book
  const size = sections.length
  const rarity = number => Math.log(1 + size / (number + 0.5))
  const [times, title] = [new Float32Array(size), new Float32Array(size)]
  /** Note how often each section has a word, and whether its title does; return the sections that have it. */
  const count = (places, weight, found) => {
    for (const place of places) {
      const number = sectionOf[place]
      if (!times[number] && !title[number]) found.push(number)
      if (kind[place] === TITLE) title[number] = Math.max(title[number], weight)
      else times[number] += kind[place] === PROSE ? weight : weight * WEIGHTS.code
    }
  }
  const clear = found => {
    for (const number of found) times[number] = title[number] = 0
  }
  const many = number => { // how often, between 0 and 1; once in a short section counts more
    const length = 1 - WEIGHTS.b + WEIGHTS.b * sections[number].length / book.average
    return times[number] / (times[number] + WEIGHTS.k * length)
  }

  // ---- the words, one by one

  const words = [] // each: its weight, and what it is worth in each section and its title
  const rare = asked.map(({ word }) => word).filter(word => !COMMON.has(word) && !isSmall(word))
  const isTold = new Set(rare).size > 2 // without the common words
  const last = asked.at(-1)
  for (const each of asked) {
    const { word } = each
    const lists = forms(book, word, each === last)
    each.places = lists.length ? placesOf(book, lists[0]) : []
    if (words.some(other => other.word === word) || (isTold && COMMON.has(word))) continue
    const weigh = each.weigh * (isSmall(word) ? WEIGHTS.small : COMMON.has(word) ? WEIGHTS.common : 1)
    const here = { word, weight: rarity(0) * weigh, text: new Float32Array(size), title: new Float32Array(size) }
    lists.forEach((list, i) => {
      const found = []
      for (const [id, weight] of list) count(book.placesOf(id), weight, found)
      const worth = rarity(found.length) * weigh
      if (!i) here.weight = worth
      for (const number of found) {
        here.text[number] = Math.max(here.text[number], many(number) * Math.min(worth, here.weight))
        here.title[number] = Math.max(here.title[number], title[number] * Math.min(worth, here.weight))
      }
      clear(found)
    })
    words.push(here)
  }

  // ---- pairs of words that follow each other in the question

  const pairs = { text: new Float32Array(size), title: new Float32Array(size) }
  asked.forEach((then, i) => {
    const before = asked[i - 1]
    if (!i || then.at - before.at > before.word.length + 12) return
    const two = [before.word, then.word]
    const found = []
    count(neighbours(before.places, then.places), 1, found)
    const joined = book.ids.get(before.word + then.word) // data loader: dataloader
    if (joined !== undefined) count(book.placesOf(joined), WEIGHTS.joined, found)
    const isCommon = two.every(word => COMMON.has(word) || isSmall(word))
    const less = two.every(isSmall) ? WEIGHTS.small : isCommon ? WEIGHTS.common : 1
    const worth = rarity(found.length) * then.weigh * WEIGHTS.pair * less
    for (const number of found) {
      pairs.text[number] += worth * many(number)
      pairs.title[number] += worth * title[number]
    }
    clear(found)
  })

  // ---- what is in a page's title counts for its sections; what stands together counts more

  const weights = new Map(words.map(({ word, weight }) => [word, weight]))
  const total = words.reduce((sum, { weight }) => sum + weight, 0)
  const [text, titled, has, covered, above] = Array.from({ length: 5 }, () => new Float32Array(size))
  text.set(pairs.text)
  titled.set(pairs.title)
  for (const word of words) {
    for (let number = 0; number < size; number++) {
      if (!word.text[number] && !word.title[number]) continue
      text[number] += word.text[number]
      titled[number] += word.title[number]
      has[number] += word.weight
      if (!word.title[number]) continue
      covered[number] += word.word.length / sections[number].plain.length
      if (!sections[number].isPage) continue
      for (let below = number + 1; below < size && !sections[below].isPage; below++) {
        above[below] += Math.max(0, word.title[number] - word.title[below])
      }
    }
  }
  const ranked = []
  sections.forEach(({ number, weight, isPage }) => {
    if (!has[number]) return
    const named = titled[number] * (1 + WEIGHTS.cover * covered[number]) * (isPage ? WEIGHTS.page : 1)
    const sum = text[number] + named + WEIGHTS.above * above[number]
    ranked.push({
      number,
      weight,
      score: sum * (1 - WEIGHTS.all + WEIGHTS.all * has[number] / total),
    })
  })
  ranked.sort((a, b) => b.score * b.weight - a.score * a.weight).splice(200)
  const distinct = asked.filter(({ word }, i) => asked.findIndex(each => each.word === word) === i && !COMMON.has(word))
  for (const each of ranked.slice(0, 60)) {
    const [most, place] = nearest(book, each.number, distinct, weights)
    each.score += WEIGHTS.near * most
    each.place = place
  }
  for (const each of ranked) each.score *= each.weight
  ranked.sort((a, b) => b.score - a.score)

  // ---- the answer, as the theme wants it

  // The best sections come one by one, also several of a page, and the others page by page. The theme
  // shows the page above its section, so the page itself follows a section that is nearly as good.
  const telling = words.filter(({ weight }) => weight > 1.2 || words.length < 3)
  const best = ranked.filter(({ score }) => score > ranked[0].score / 10)
    .map(({ number, score, place }) => ({ ...sections[number], score, place }))
  for (const page of best.filter(({ isPage }) => isPage)) {
    const inside = best.find(each => !each.isPage && each.page.location === page.location)
    if (inside?.score > page.score * WEIGHTS.first) [inside.score, page.score] = [Math.max(inside.score, page.score), 0]
  }
  best.sort((a, b) => b.score - a.score)
  const groups = best.splice(0, ALONE).filter(({ score }) => score).map(section => [section])
  const pages = new Map()
  for (const section of best) {
    const { location } = section.page
    if (!section.score || (!pages.has(location) && pages.size === 30)) continue
    const here = pages.get(location) ?? []
    if (here.length < 6) pages.set(location, [...here, section])
  }
  const mark = marker(telling.map(({ word }) => word))
  const shown = section => ({
    location: section.location,
    title: section.title.split(/(<[^>]+>)/).map((part, i) => i % 2 ? part : mark(part)).join(""),
    text: mark(teaser(book, section)),
    score: section.score,
    terms: Object.fromEntries(telling.map(({ word, text, title }) =>
      [word, Boolean(text[section.number] || title[section.number])])),
  })
  const items = [...groups, ...pages.values()].map(found =>
    [...found, ...found.some(({ isPage }) => isPage) ? [] : [{ ...found[0].page, score: 0 }]].map(shown))
  return { items, suggest: suggest(book, last.word) }
}

/** Where most of the question stands together in a section, and how much of it that is. */
function nearest({ begins, sections }, number, asked, weights) {
  const { token, body } = sections[number]
  const end = sections[number + 1]?.token ?? begins.length
  const within = []
  for (const { word, places } of asked) {
    for (let i = first(places, token); places[i] < end; i++) within.push({ word, place: places[i] })
  }
  within.sort((a, b) => a.place - b.place)
  const times = new Map()
  let [sum, from, most, place] = [0, 0, 0, 0]
  for (const each of within) {
    while (within[from].place < each.place - WEIGHTS.span) {
      const { word } = within[from++]
      times.set(word, times.get(word) - 1)
      if (!times.get(word)) sum -= weights.get(word)
    }
    if (!times.get(each.word)) sum += weights.get(each.word)
    times.set(each.word, (times.get(each.word) ?? 0) + 1)
    if (sum > most) [most, place] = [sum, within[from].place]
  }
  return [most, begins[place]]
}

/** The lines around the place that has most of the question. */
function teaser({ text }, { body, text: { length }, place }) {
  const from = Math.max(body, place ?? body)
  const line = Math.max(body, from - 60, text.lastIndexOf("\n", from - 1) + 1)
  const to = Math.min(body + length, line + 240)
  const cut = text.slice(line, to).replace(/\S*$/, last => to < body + length ? "" : last)
  return (line > body ? "… " : "") + cut + (to < body + length ? " …" : "")
}

/** What makes HTML of text, with the words of the question in it marked. */
function marker(words) {
  const escape = text => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;")
  const stems = new Set(words.map(stem))
  const marked = part => {
    const word = lower(part)
    const begin = words.find(each => word.startsWith(each))
    const length = stems.has(stem(word)) ? part.length : begin ? begin.length : 0
    return length ? `<mark>${escape(part.slice(0, length))}</mark>${escape(part.slice(length))}` : escape(part)
  }
  return text => text.split(/([\p{L}\p{N}]+)/u)
    .map((part, i) => i % 2 ? marked(part) : escape(part)).join("")
}

/** What the word begun may become: the word of most titles. */
function suggest({ titled }, begun) {
  let best = []
  for (const [word, times] of titled) if (word.startsWith(begun) && !(times < best[1])) best = [word, times]
  return best.slice(0, 1)
}
